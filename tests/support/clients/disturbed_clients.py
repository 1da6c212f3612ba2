"""Official clients in every role, while a test disturbs the server they talk to.

A process for each official client. They send NORMAL, DELAY and FIFO messages and receive them as
simple and as push consumers, ordered and not; all share the consumer groups, so each gets what the
others have sent. `looping_clients.judge` says what they are promised.

What clients do not do for an application, which therefore sees it here: none asks again for a
receive, and none but for push consumers for an ack.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.clients.client_process import (
    GO_PROGRAM,
    JAVA_CLASSES,
    JAVA_LIBRARIES,
    NODE_PACKAGES,
    SCRIPTS,
    Fact,
)
from tests.support.clients.looping_clients import (
    ROLES,
    TOPICS,
    US_PER_S,
    Disturbance,
    Looping,
    unsettled,
)
from tests.support.eventually import eventually
from tests.support.processes.killing import RECOVERY_S
from tests.support.processes.processes import Standalone

ATTEMPTS_MAX = 1000  # none becomes a dead letter
RETRY_MS = 1000  # before a message that failed in a push consumer comes again
PROGRESS = 10  # messages that each client stores of each topic between two disturbances
# For all that was sent to be acked. A push consumer's delivery whose answer was lost comes back
# after a minute, and what is behind it in its queue after that.
DRAIN_S = 150.0
QUIET_S = 3.0  # without a message, at the end: what would come again has come by then
NS_PER_US = 1000
LOG_CHARS = 5000  # of a process, that a failure shows
# Calls of which an application sees errors when a process is killed: the one that was under way is
# lost, and no client asks again but with what it sends. An ack may find that its delivery is over.
CALLS = frozenset({"normal", "delayed", "ordered", "receive", "ack"})


def prepare(running: Standalone) -> None:
    """Make the topics and the consumer groups of the clients."""
    for topic in TOPICS:
        kind = {"delayed": "DELAY", "ordered": "FIFO"}.get(topic, "NORMAL")
        running.put(f"topics/{topic}", messageType=kind, queues=2)
    for role in ROLES:
        order = "FIFO" if role.startswith("ordered") else "CONCURRENT"
        retry = {"customized": {"nextMs": [RETRY_MS]}}
        running.put(f"groups/{role}", deliveryOrder=order, maxAttempts=ATTEMPTS_MAX, retry=retry)


@contextlib.contextmanager
def disturbed_clients(folder: Path, running: Standalone) -> Iterator[DisturbedClients]:
    """Run each client that is made here for the block; then none is left, and `facts.jsonl` is."""
    java_home = f"-Duser.home={folder / 'java'}"
    commands = {"python": [sys.executable, str(SCRIPTS / "python" / "loop.py")]}
    if shutil.which("node") and NODE_PACKAGES.exists():
        commands["node"] = ["node", str(SCRIPTS / "node" / "loop.mjs")]
    if GO_PROGRAM.exists():
        commands["go"] = [str(GO_PROGRAM), "loop"]
    if shutil.which("java") and JAVA_CLASSES.exists():
        commands["java"] = ["java", java_home, "-cp", f"{JAVA_CLASSES}:{JAVA_LIBRARIES}/*", "Loop"]
    prepare(running)
    clients: list[Looping] = []
    disturbed = DisturbedClients(running, clients)
    try:
        for name, command in commands.items():
            clients.append(Looping(name, command, running.grpc, folder / name))
        yield disturbed
    finally:
        lines = "".join(f"{json.dumps(fact)}\n" for fact in disturbed.facts())
        (folder / "facts.jsonl").write_text(lines)  # For whoever looks into a verdict.
        for client in clients:
            client.kill()


class DisturbedClients:
    """The clients, and what has been done to their server."""

    def __init__(self, running: Standalone, clients: list[Looping]) -> None:
        self.clients = clients
        self.disturbances: list[Disturbance] = []
        self._running = running

    def facts(self) -> list[Fact]:
        """Return all that the clients have said by now."""
        return [
            {"client": client.name, **fact}
            for client in self.clients
            for fact in list(client.told.facts)
        ]

    @contextlib.contextmanager
    def disturbance(self, what: str, fails: frozenset[str]) -> Iterator[None]:
        """Note what is done to the server, and which calls may fail by it."""
        begun = _now_us()
        sys.stderr.write(f"{what}\n")  # what a failed run has done
        yield
        self.disturbances.append(Disturbance(what, begun, _now_us(), fails))

    def ready(self) -> None:
        """Wait until each client is at work."""
        self.eventually(lambda: all(client.told.said["ready"] for client in self.clients))

    def progress(self) -> None:
        """Wait until each client has stored some more of each topic, and all roles got some."""
        goals = [
            (client.told.stored[topic], len(client.told.stored[topic]) + PROGRESS)
            for client in self.clients
            for topic in TOPICS
        ]
        received = {role: self._received(role) for role in ROLES}
        self.eventually(
            lambda: (
                all(len(stored) >= goal for stored, goal in goals)
                and all(self._received(role) > received[role] for role in ROLES)
            )
        )

    def end(self) -> list[int]:
        """Stop sending, wait until all is acked and quiet, and return the clients' exit statuses.

        What is not acked is left: it is lost, says the verdict.
        """
        for client in self.clients:
            client.stop_sending()
        self.eventually(lambda: all(client.told.said["stopped"] for client in self.clients))
        with contextlib.suppress(AssertionError):
            self.eventually(
                lambda: not unsettled([client.told for client in self.clients]), DRAIN_S
            )
        self.eventually(
            lambda: (
                _now_us() - max(client.told.last_received_at for client in self.clients)
                > QUIET_S * US_PER_S
            )
        )
        return [client.end() for client in self.clients]

    def eventually(self, check: Callable[[], bool], within_s: float = RECOVERY_S) -> None:
        """Wait until `check` holds; a client that dies ends it, and a failure tells all."""

        def checked() -> bool:
            for client in self.clients:
                if client.has_died:
                    pytest.fail(f"{client.name} died\n{client.stderr.read_text()[-LOG_CHARS:]}")
            return check()

        try:
            eventually(checked, within_ms=int(within_s * 1000))
        except AssertionError as late:
            told = "\n".join(client.status for client in self.clients)
            log = self._running.log.read_text()[-LOG_CHARS:]
            raise AssertionError(f"{late}\n{told}\n{self.done()}\n{log}") from None

    def done(self) -> str:
        """Return what was done, a line each."""
        return "\n".join(map(str, self.disturbances))

    def _received(self, role: str) -> int:
        return sum(client.told.received[role] for client in self.clients)


def _now_us() -> int:
    return time.time_ns() // NS_PER_US
