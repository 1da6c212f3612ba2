"""What SIGHUP does to a process of ours."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys

# Says "reload" for each SIGHUP that asks for one, and ends with 0 when it is to stop.
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


def start(stdin: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=stdin, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert line(process) == "ready"
    return process


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> int:
    with process:
        return process.wait(timeout=30)


def test_a_hangup_asks_for_a_reload() -> None:
    process = start(subprocess.DEVNULL)
    for _ in range(2):
        process.send_signal(signal.SIGHUP)
        assert line(process) == "reload"
    process.terminate()
    assert end(process) == 0


def test_a_hangup_at_a_terminal_asks_for_a_reload_until_that_is_gone() -> None:
    ours, theirs = pty.openpty()
    process = start(theirs)
    os.close(theirs)
    process.send_signal(signal.SIGHUP)
    assert line(process) == "reload"
    os.close(ours)
    process.send_signal(signal.SIGHUP)
    assert end(process) == 0
