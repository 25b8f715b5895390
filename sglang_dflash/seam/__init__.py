"""How plugins of this repository reach into SGLang: what a hook is, and when it acts."""
