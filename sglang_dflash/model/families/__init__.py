"""A file for each family of drafts: its head, and its layers if they are not DFlash's."""
