"""The signal that a process receives when its parent ends; this module imports no server code."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl option: the signal at the end of the parent (Linux)


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Ask the kernel to signal this process when its parent ends, even if it is busy.

    SIGKILL also ends a process whose event loop is blocked.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
