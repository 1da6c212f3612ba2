"""Official clients in every role while masters die, stand still and move: what they are promised.

One process for each official client that is made here, the one for Python at least. They send
NORMAL, DELAY and FIFO messages and receive them as simple and as push consumers, ordered and not,
through a standalone with three replicas. `looping_clients.judge` says what is promised: nothing is
lost, nothing acked comes back, no timer is early, message groups keep their order.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.client_process import (
    GO_PROGRAM,
    JAVA_CLASSES,
    JAVA_LIBRARIES,
    NODE_PACKAGES,
    SCRIPTS,
)
from tests.support.eventually import eventually
from tests.support.killing import RECOVERY_S
from tests.support.looping_clients import (
    ROLES,
    TOPICS,
    US_PER_S,
    Disturbance,
    Looping,
    judge,
    unsettled,
)
from tests.support.processes import Standalone, standalone
from tests.support.replicated_standalone import FLAGS, Replicated, send_signal

pytestmark = pytest.mark.large

ATTEMPTS_MAX = 1000  # none becomes a dead letter
RETRY_MS = 1000  # before a message that failed in a push consumer comes again
PROGRESS = 10  # messages that each client stores of each topic between two faults
# For all to be acked: a push consumer's delivery whose answer was lost comes back in a minute, and
# what is behind it in its queue after that.
DRAIN_S = 150.0
QUIET_S = 3.0  # without a message, at the end: what would come again has come by then
NS_PER_US = 1000
# The call that is under way when a process goes may see that; so may an ack of what came before.
CALLS = frozenset({"normal", "delayed", "ordered", "receive", "ack"})


def test_official_clients_keep_their_promises_when_masters_go(tmp_path: Path) -> None:
    with standalone(tmp_path / "data", *FLAGS) as running:
        prepare(running)
        with looping(tmp_path, running.grpc) as clients:
            failovers = Failovers(running, clients)
            failovers.run()
            statuses = [client.end() for client in clients]
        log = running.log.read_text()
        assert running.stop() == 0
    facts = [{"client": each.name, **fact} for each in clients for fact in each.told.facts]
    (tmp_path / "facts.jsonl").write_text("".join(f"{json.dumps(fact)}\n" for fact in facts))
    verdict = judge(facts, failovers.disturbances)
    assert verdict.is_clean, f"{verdict}\n{failovers.disturbances}"
    assert statuses == [0] * len(clients)
    assert "Traceback" not in log


def prepare(running: Standalone) -> None:
    for topic in TOPICS:
        kind = {"delayed": "DELAY", "ordered": "FIFO"}.get(topic, "NORMAL")
        running.put(f"topics/{topic}", messageType=kind, queues=2)
    for role in ROLES:
        order = "FIFO" if role.startswith("ordered") else "CONCURRENT"
        retry = {"customized": {"nextMs": [RETRY_MS]}}
        running.put(f"groups/{role}", deliveryOrder=order, maxAttempts=ATTEMPTS_MAX, retry=retry)


@contextlib.contextmanager
def looping(folder: Path, endpoint: str) -> Iterator[list[Looping]]:
    """Run each client that is made here for the block; afterwards none is left."""
    java = ["java", f"-Duser.home={folder / 'java'}", "-cp", f"{JAVA_CLASSES}:{JAVA_LIBRARIES}/*"]
    commands = {"python": [sys.executable, str(SCRIPTS / "python" / "loop.py")]}
    if shutil.which("node") and NODE_PACKAGES.exists():
        commands["node"] = ["node", str(SCRIPTS / "node" / "loop.mjs")]
    if GO_PROGRAM.exists():
        commands["go"] = [str(GO_PROGRAM), "loop"]
    if shutil.which("java") and JAVA_CLASSES.exists():
        commands["java"] = [*java, "Loop"]
    clients: list[Looping] = []
    try:
        for name, command in commands.items():
            clients.append(Looping(name, command, endpoint, folder / name))
        yield clients
    finally:
        for client in clients:
            client.kill()


class Failovers:
    """What is done to replicas while the clients go on, one thing after the other."""

    def __init__(self, running: Standalone, clients: list[Looping]) -> None:
        self._group = Replicated(running)
        self._clients = clients
        self.disturbances: list[Disturbance] = []

    def run(self) -> None:
        """Do everything once, and return when all is quiet."""
        self._eventually(lambda: all(client.told.said["ready"] for client in self._clients))
        for fault in (
            self._move_master, self._kill_master, self._freeze_master, self._kill_controller,
        ):  # fmt: skip
            self._progress()
            asyncio.run(self._group.in_sync())
            fault()
        self._progress()
        for client in self._clients:
            client.stop_sending()
        self._eventually(lambda: all(client.told.said["stopped"] for client in self._clients))
        with contextlib.suppress(AssertionError):  # What is not acked is lost, says the verdict.
            self._eventually(
                lambda: not unsettled([client.told for client in self._clients]), DRAIN_S
            )
        self._eventually(lambda: now_us() - self._last_received() > QUIET_S * US_PER_S)

    def _move_master(self) -> None:
        with self._disturbed("the master is moved", frozenset()):
            epoch = self._group.led()["epoch"]
            self._group.transfer()
            asyncio.run(self._group.in_sync(after_epoch=epoch))

    def _kill_master(self) -> None:
        with self._disturbed("the master is killed", CALLS):
            epoch = self._group.led()["epoch"]
            send_signal(self._group.pids(self._group.master()), signal.SIGKILL)
            asyncio.run(self._group.in_sync(after_epoch=epoch))

    def _freeze_master(self) -> None:
        with self._disturbed("the master stands still", CALLS):
            epoch = self._group.led()["epoch"]
            frozen = self._group.pids(self._group.master())
            send_signal(frozen, signal.SIGSTOP)
            try:
                self._progress()
            finally:
                send_signal(frozen, signal.SIGCONT)
            asyncio.run(self._group.in_sync(after_epoch=epoch))

    def _kill_controller(self) -> None:
        with self._disturbed("the controller is killed", frozenset()):
            send_signal(self._group.pids("controller-0"), signal.SIGKILL)
            self._progress()

    @contextlib.contextmanager
    def _disturbed(self, what: str, fails: frozenset[str]) -> Iterator[None]:
        begun = now_us()
        yield
        self.disturbances.append(Disturbance(what, begun, now_us(), fails))

    def _progress(self) -> None:
        """Wait until each client has stored some more of each topic, and all roles got some."""
        goals = [
            (stored, len(stored) + PROGRESS)
            for client in self._clients
            for stored in client.told.stored.values()
        ]
        received = {role: self._received(role) for role in ROLES}
        self._eventually(
            lambda: (
                all(len(stored) >= goal for stored, goal in goals)
                and all(self._received(role) > received[role] for role in ROLES)
            )
        )

    def _received(self, role: str) -> int:
        return sum(client.told.received[role] for client in self._clients)

    def _last_received(self) -> int:
        return max(client.told.last_received_at for client in self._clients)

    def _eventually(self, check: Callable[[], bool], within_s: float = RECOVERY_S) -> None:
        def checked() -> bool:
            for client in self._clients:
                if client.has_died:
                    pytest.fail(f"{client.name} died\n{client.stderr.read_text()[-5000:]}")
            return check()

        try:
            eventually(checked, within_ms=int(within_s * 1000))
        except AssertionError as late:
            told = "\n".join(client.status for client in self._clients)
            raise AssertionError(f"{late}\n{told}\n{self.disturbances}") from None


def now_us() -> int:
    return time.time_ns() // NS_PER_US
