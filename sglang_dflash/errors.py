"""What a user can mend is raised as `Refusal`: one paragraph, no traceback."""


class Refusal(ValueError):
    """A checkpoint, a flag or a request that cannot be served exactly.

    The message says what is wrong and what to change. At the command line the process prints it
    and exits with status 1; `sglang.Engine` users see the exception.
    """
