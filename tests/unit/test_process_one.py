"""Tests of the first process of a container, in a process that adopts orphans like process 1."""

from __future__ import annotations

import signal
import subprocess
import sys

# Adopts the orphans of its descendants, like process 1 (prctl 36 is PR_SET_CHILD_SUBREAPER).
_ADOPT = """
import ctypes, os, signal, sys
from tidemill.__main__ import live_as_init

ctypes.CDLL(None).prctl(36, 1)
live_as_init(has_children=False)
"""
_LEAVE_ORPHAN = """
if os.fork() == 0:
    os.fork()
    os._exit(0)
try:
    sys.exit(f"unreaped child: {os.wait()}")
except ChildProcessError:
    pass  # All children ended, and the kernel reaped them.
"""
_END_BY_SIGTERM = """
os.kill(os.getpid(), signal.SIGTERM)
signal.pause()
"""


def _run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _ADOPT + script], capture_output=True, text=True, check=False
    )


def test_orphans_are_reaped() -> None:
    ended = _run(_LEAVE_ORPHAN)
    assert ended.returncode == 0, ended.stderr


def test_sigterm_ends_a_child_without_a_handler() -> None:
    assert _run(_END_BY_SIGTERM).returncode == 128 + signal.SIGTERM
