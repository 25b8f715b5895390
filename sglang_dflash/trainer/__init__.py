"""What trainers of drafts ask of a running server."""
