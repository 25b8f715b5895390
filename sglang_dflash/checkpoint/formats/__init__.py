"""The formats of drafts: each reads its config.json into a `DFlashConfig`.

A module has `matches(raw)`, `read(raw, path, name, tensors)` and `rename(name)`. raw: the
config.json. path: its folder. name: the format's in `FORMATS`, or a tensor's in the checkpoint.
tensors: the checkpoint's, by the model's own names.
"""
