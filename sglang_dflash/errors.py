"""The error that a user can correct."""

# SGLang's own DFLASH serves some things that were not compared with this package.
BUILT_IN = "Or set SGLANG_PLUGINS=dflash_cpu for SGLang's own DFLASH."
WITHOUT_DFLASH = "Serve it without --speculative-algorithm DFLASH."  # a fix of many


class Refusal(ValueError):
    """A checkpoint, a flag or a request that cannot be served exactly.

    what: the reason. fix: the change that a user can make. Both are whole sentences: they begin
    with a capital letter and end with a full stop. At the command line the process prints both as
    one paragraph, without a traceback, and exits with status 1. `sglang.Engine` raises it. If it
    depends on the loaded target, the scheduler logs it, and SGLang kills the process tree.
    """

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what, fix)  # pickle calls the class with these two
        self.what = what
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.what} {self.fix}"
