"""Killing the children of a standalone, and waiting until they are back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

from tests.support.clients.history_against_audit import Failed
from tests.support.eventually import LOOK_EVERY_S
from tests.support.processes.processes import Standalone
from tidemill.common.clock import SystemClock

RECOVERY_S = 120.0  # the supervisor waits up to 10 s before a restart
# Before a kill, at most, until what was popped had been answered. A broker that is killed between
# the two fails no receive: the proxy's poll goes on without it.
ANSWERING_MS = 2_000


class Stuck(Exception):
    """No progress was made in a long time."""


async def kill(running: Standalone, name: str) -> None:
    """Kill a child once it runs."""
    await until(lambda: child_pid(running, name) > 0)
    os.kill(child_pid(running, name), signal.SIGKILL)


async def kill_and_note(running: Standalone, name: str) -> Failed:
    """Kill a child, and return when that may have lost answers."""
    await kill(running, name)
    now_ms = SystemClock().wall_ms()
    return Failed(now_ms - ANSWERING_MS, now_ms)


async def until(check: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + RECOVERY_S
    while not check():
        if asyncio.get_running_loop().time() > deadline:
            raise Stuck
        await asyncio.sleep(LOOK_EVERY_S)


def child_pid(running: Standalone, name: str) -> int:
    """Return the id under which a child of the supervisor runs now; 0 while it does not."""
    parent = running.process.pid
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text("ascii")
    for pid in map(int, children.split()):
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if f"--replica-name={name}" in arguments or f"--name={name}" in arguments:
            return pid
    return 0
