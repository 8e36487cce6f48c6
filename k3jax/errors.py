"""The one rule for who an error is for."""


class UserError(ValueError):
    """Something that whoever started the program can mend: a setting, a file, a directory.

    The message says what is wrong and what to do, in one line or a list of lines. The `k3` command prints it and
    exits with status 2; any other exception is a bug, and keeps its traceback.
    """
