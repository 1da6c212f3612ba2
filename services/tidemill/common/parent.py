"""What a process wants of the kernel when its parent ends; it imports nothing that serves."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl option: the signal this process gets when its parent ends (Linux)


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Ask the kernel for a signal when the parent ends, even if this process is busy then.

    SIGKILL ends even a process that stands still.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
