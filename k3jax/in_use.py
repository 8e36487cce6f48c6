"""Whether a process is at work in a run directory: it holds a lock there from start to end."""

import fcntl
import os
import pathlib

LOCK = ".lock"


def is_in_use(path: pathlib.Path) -> bool:
    """Whether another process holds a directory now; nothing in it is changed."""
    try:
        descriptor = os.open(path / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
