"""`python -m launch.sweep_child PARENT train ...`: a run that is asked to stop, and so saves, when its sweep dies."""

import ctypes
import os
import signal
import sys

from launch.__main__ import main

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>; Linux only


def follow(parent: int) -> None:
    """Asks the kernel for SIGTERM when the parent process ends; does nothing where it cannot."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before we asked
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    follow(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
