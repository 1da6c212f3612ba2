"""A standalone with several replicas of a broker group: its master, and faults of its parts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from typing import Any

import httpx

from tests.support.eventually import LOOK_EVERY_S, eventually
from tests.support.processes.killing import RECOVERY_S, NoProgress, child_pid
from tests.support.processes.processes import ADMIN_S, Standalone, descendants

GROUP = "broker-0"
REPLICAS = 3
FLAGS = (f"--replicas={REPLICAS}",)


class ReplicatedStandalone:
    """A running standalone with its controller's view of one broker group."""

    def __init__(self, running: Standalone, group: str = GROUP) -> None:
        self.running = running
        self.group = group

    def status(self) -> dict[str, Any]:
        """Return the REST API's view of the replicas; empty if the API does not answer."""
        url = f"{self.running.admin}/api/v1/replicas/{self.group}"
        with httpx.Client(trust_env=False, timeout=ADMIN_S) as client:
            try:
                answer = client.get(url)
            except httpx.TransportError:
                return {}
        found: dict[str, Any] = answer.json() if answer.is_success else {}
        return found

    def led(self) -> dict[str, Any]:
        """Wait until the group has a master; return the same view."""

        def look() -> dict[str, Any]:
            found = self.status()
            return found if "master" in found else {}

        return eventually(look, within_ms=round(RECOVERY_S * 1000))

    def master(self) -> str:
        """Return the name of the master's process."""
        return f"{self.group}-{self.led()['master']}"

    def follower(self) -> str:
        """Return the name of another replica's process."""
        return f"{self.group}-{(self.led()['master'] + 1) % REPLICAS}"

    def transfer(self) -> None:
        """Transfer the master role to another replica."""
        url = f"{self.running.admin}/api/v1/replicas/{self.group}:transfer"
        with httpx.Client(trust_env=False, timeout=ADMIN_S) as client:
            client.post(url, json={}).raise_for_status()

    def drain(self, replica: int, *, undo: bool = False) -> None:
        """Drain a replica, or undo it."""
        url = f"{self.running.admin}/api/v1/replicas/{self.group}:drain"
        with httpx.Client(trust_env=False, timeout=ADMIN_S) as client:
            client.post(url, json={"replica": replica, "undo": undo}).raise_for_status()

    def pids(self, name: str) -> list[int]:
        """Return the process ids of a child: a replica has a supervisor, a broker and helpers.

        Wait until the child runs: its id is 0 before that, which signals this process group.
        """
        return descendants(eventually(lambda: child_pid(self.running, name)))

    async def in_sync(self, *, after_epoch: int = 0) -> None:
        """Wait for a master of an epoch later than `after_epoch` with all replicas in sync."""

        def look() -> bool:
            found = self.status()
            return found.get("epoch", 0) > after_epoch and found.get("inSync") == REPLICAS

        deadline = asyncio.get_running_loop().time() + RECOVERY_S
        while not await asyncio.to_thread(look):
            if asyncio.get_running_loop().time() > deadline:
                raise NoProgress
            await asyncio.sleep(LOOK_EVERY_S)


def send_signal(pids: Sequence[int], number: signal.Signals) -> None:
    """Send a signal to processes. Some of them may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
