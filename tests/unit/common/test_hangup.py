"""The effect of SIGHUP on a process."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

# Prints "reload" for each SIGHUP that requests one, and exits with 0 at a stop.
PROGRAM = """
import asyncio
from tidemill.common.lifecycle import stop_on_signal
from tidemill.common.log import configure_logging

configure_logging(process="test", level="info")  # Standard output is the test's.

def say(text):
    print(text, flush=True)

async def serve():
    with stop_on_signal(on_hangup=lambda: say("reload")) as stop:
        say("ready")
        await stop.wait()

asyncio.run(serve())
"""

# A process that stays in its start until the test continues it.
STARTING = """
import signal, sys
from tidemill import __main__
from tidemill.cli.processes import PROCESSES

def start(arguments):
    print("starting", flush=True)
    {wait}
    return 0

PROCESSES["broker"] = start
sys.argv = ["tidemill", "broker"]
__main__.main()
"""
GO_ON = b"\n"


def start(stdin: int, program: str = PROGRAM, *, says: str = "ready") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert line(process) == says
    return process


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> int:
    with process:
        return process.wait(timeout=30)


def test_a_hangup_requests_a_reload() -> None:
    process = start(subprocess.DEVNULL)
    for _ in range(2):
        process.send_signal(signal.SIGHUP)
        assert line(process) == "reload"
    process.terminate()
    assert end(process) == 0


def test_a_hangup_requests_a_reload_while_the_terminal_exists() -> None:
    ours, theirs = pty.openpty()
    process = start(theirs)
    os.close(theirs)
    process.send_signal(signal.SIGHUP)
    assert line(process) == "reload"
    os.close(ours)
    process.send_signal(signal.SIGHUP)
    assert end(process) == 0


@pytest.mark.parametrize("opened", [os.pipe, lambda: pty.openpty()[::-1]])
def test_a_hangup_during_the_start_does_not_end_the_process(
    opened: Callable[[], tuple[int, int]],
) -> None:
    theirs, ours = opened()
    process = start(theirs, STARTING.format(wait="sys.stdin.readline()"), says="starting")
    os.close(theirs)
    process.send_signal(signal.SIGHUP)
    os.write(ours, GO_ON)
    assert end(process) == 0
    os.close(ours)


def test_the_loss_of_the_terminal_during_the_start_ends_the_process() -> None:
    ours, theirs = pty.openpty()
    process = start(theirs, STARTING.format(wait="while True: signal.pause()"), says="starting")
    os.close(theirs)
    os.close(ours)
    process.send_signal(signal.SIGHUP)
    assert end(process) == -signal.SIGHUP
