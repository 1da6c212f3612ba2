"""Kills of a standalone's children, and waits for their restart."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.support.clients.history_against_audit import LostAnswerSpan
from tests.support.eventually import LOOK_EVERY_S
from tests.support.processes.processes import Standalone
from tidemill.common.clock import SystemClock

RECOVERY_S = 120.0  # the supervisor waits up to 10 s before a restart
# Longest time before a kill from a pop to its answer. If the broker is killed in between, the
# receive does not fail, because the proxy's poll continues at other brokers.
ANSWERING_MS = 2_000
READY_S = 5.0  # timeout of a readiness probe


class NoProgress(Exception):
    """No progress was made in a long time."""


async def kill(running: Standalone, name: str) -> None:
    """Kill a child once it runs."""
    await until(lambda: child_pid(running, name) > 0)
    os.kill(child_pid(running, name), signal.SIGKILL)


async def kill_and_note(running: Standalone, name: str) -> LostAnswerSpan:
    """Kill a child, and return the time in which answers may be lost."""
    await kill(running, name)
    now_ms = SystemClock().wall_ms()
    return LostAnswerSpan(now_ms - ANSWERING_MS, now_ms)


async def until(check: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + RECOVERY_S
    while not check():
        if asyncio.get_running_loop().time() > deadline:
            raise NoProgress
        await asyncio.sleep(LOOK_EVERY_S)


def child_pid(running: Standalone, name: str) -> int:
    """Return the process id of a supervisor's child; 0 while it is down."""
    parent = running.process.pid
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text("ascii")
    for pid in map(int, children.split()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{pid}/comm").read_text("utf-8").strip() == name:
                return pid
    return 0


def is_back(running: Standalone, name: str, former_pid: int) -> bool:
    """Return whether a child has been started again and is ready."""
    if child_pid(running, name) in (0, former_pid):
        return False
    ready = running.processes[name].metrics.replace("/metrics", "/readyz")
    try:
        return httpx.get(ready, trust_env=False, timeout=READY_S).is_success
    except httpx.TransportError:
        return False
