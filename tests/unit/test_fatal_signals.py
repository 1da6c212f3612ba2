"""What ends a process without an exception says on stderr where it was."""

from __future__ import annotations

import signal
import subprocess
import sys

_TOUCH = """
import os, signal, sys
from tidemill import __main__
from tidemill.cli.processes import PROCESSES

def touch_a_page_that_cannot_be_read(arguments):
    os.kill(os.getpid(), signal.SIGBUS)

PROCESSES["broker"] = touch_a_page_that_cannot_be_read
sys.argv = ["tidemill", "broker"]
__main__.main()
"""


def test_a_process_that_sigbus_ends_leaves_a_trace() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _TOUCH], capture_output=True, text=True, check=False
    )
    assert ended.returncode == -signal.SIGBUS
    assert "Bus error" in ended.stderr
    assert "touch_a_page_that_cannot_be_read" in ended.stderr
