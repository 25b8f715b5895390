"""The formats of drafts: each reads its config.json into a `DFlashConfig`."""
