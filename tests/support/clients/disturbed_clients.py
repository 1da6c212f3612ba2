"""Official clients in every role, while a test disturbs their server.

Each official client runs in its own process. The clients send messages of the kinds in
`message_kinds`, by default NORMAL, DELAY and FIFO messages. They receive them as simple and as push
consumers, ordered and unordered. All clients share the consumer groups, so each receives messages
of the others. `looping_clients.judge` checks the guarantees.

No client retries a receive, and only push consumers retry an ack. The application sees these
errors, and so do these tests.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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
from tests.support.clients.looping_clients import US_PER_S, Disturbance, LoopingClient, unsettled
from tests.support.clients.message_kinds import BASIC_TOPICS, TOPICS, roles_of
from tests.support.eventually import eventually
from tests.support.processes.killing import RECOVERY_S
from tests.support.processes.processes import Standalone

ATTEMPTS_MAX = 1000  # enough that no message becomes a dead letter
RETRY_MS = 1000  # delay of a message that failed in a push consumer
PROGRESS = 10  # messages per client and topic between two disturbances
# Longest time until all sent messages are acked. If the answer to a push consumer's receive is
# lost, the delivery comes back after a minute. Later messages of its queue wait for it.
DRAIN_S = 150.0
QUIET_S = 3.0  # time without a message at the end; duplicates come earlier
NS_PER_US = 1000
LOG_CHARS = 5000  # end of a process's log that a failure shows
# Calls that may return an error to the application after a kill. The running call is lost, and
# clients retry only sends. The delivery of an ack may have expired.
CALLS = frozenset({*TOPICS, "receive", "ack"})
# Longer than two sends of a client with all their repeats. A drain waits for the end of the window.
DEDUP_WINDOW_MS = 60_000
OPTIONS: dict[str, dict[str, object]] = {
    "delayed": {"messageType": "DELAY"},
    "ordered": {"messageType": "FIFO"},
    # No half message expires: a disturbance takes less time than all checks.
    "transaction": {
        "messageType": "TRANSACTION",
        "transaction": {"firstCheckMs": 2_000, "periodMs": 3_000, "attempts": 100},
    },
    "priority": {"messageType": "PRIORITY"},
    "dedup": {"messageType": "NORMAL", "dedup": {"windowMs": DEDUP_WINDOW_MS}},
}


def prepare(running: Standalone, topics: Sequence[str]) -> None:
    """Create the topics and the consumer groups of the clients."""
    for topic in topics:
        options = OPTIONS.get(topic, {"messageType": "NORMAL"})
        running.put(f"topics/{topic}", queues=2, **options)
    for role in roles_of(topics):
        order = "FIFO" if role.startswith("ordered") else "CONCURRENT"
        retry = {"customized": {"nextMs": [RETRY_MS]}}
        running.put(f"groups/{role}", deliveryOrder=order, maxAttempts=ATTEMPTS_MAX, retry=retry)


def client_commands(folder: Path) -> dict[str, list[str]]:
    """Return the command of each looping client that is built on this machine."""
    java_home = f"-Duser.home={folder / 'java'}"
    commands = {"python": [sys.executable, str(SCRIPTS / "python" / "loop.py")]}
    if shutil.which("node") and NODE_PACKAGES.exists():
        commands["node"] = ["node", str(SCRIPTS / "node" / "loop.mjs")]
    if GO_PROGRAM.exists():
        commands["go"] = [str(GO_PROGRAM), "loop"]
    if shutil.which("java") and JAVA_CLASSES.exists():
        commands["java"] = ["java", java_home, "-cp", f"{JAVA_CLASSES}:{JAVA_LIBRARIES}/*", "Loop"]
    return commands


@contextlib.contextmanager
def disturbed_clients(
    folder: Path, running: Standalone, topics: Sequence[str] = BASIC_TOPICS
) -> Iterator[DisturbedClients]:
    """Run each client that is built on this machine. Write `facts.jsonl` at the end."""
    prepare(running, topics)
    clients: list[LoopingClient] = []
    disturbed = DisturbedClients(running, clients, topics)
    try:
        for name, command in client_commands(folder).items():
            clients.append(LoopingClient(name, command, running.grpc, folder / name, topics))
        yield disturbed
    finally:
        lines = "".join(f"{json.dumps(fact)}\n" for fact in disturbed.facts())
        (folder / "facts.jsonl").write_text(lines)  # For the analysis of a verdict.
        for client in clients:
            client.kill()


class DisturbedClients:
    """The clients and the disturbances of their server."""

    def __init__(
        self, running: Standalone, clients: list[LoopingClient], topics: Sequence[str]
    ) -> None:
        self.clients = clients
        self.topics = topics
        self.roles = roles_of(topics)
        self.disturbances: list[Disturbance] = []
        self._running = running

    def facts(self) -> list[Fact]:
        """Return all facts that the clients have reported so far."""
        return [
            {"client": client.name, **fact}
            for client in self.clients
            for fact in list(client.report.facts)
        ]

    @contextlib.contextmanager
    def disturbance(self, what: str, fails: frozenset[str]) -> Iterator[None]:
        """Record a disturbance and the calls that it may fail."""
        begun = _now_us()
        sys.stderr.write(f"{what}\n")  # the story of a failed run
        yield
        self.disturbances.append(Disturbance(what, begun, _now_us(), fails))

    def ready(self) -> None:
        """Wait until each client is ready."""
        self.eventually(lambda: all(client.report.line_counts["ready"] for client in self.clients))

    def progress(self) -> None:
        """Wait until each client has stored more of each topic, and each role received more."""
        goals = [
            (client.report.stored[topic], len(client.report.stored[topic]) + PROGRESS)
            for client in self.clients
            for topic in self.topics
        ]
        received = {role: self._received(role) for role in self.roles}
        self.eventually(
            lambda: (
                all(len(stored) >= goal for stored, goal in goals)
                and all(self._received(role) > received[role] for role in self.roles)
            )
        )

    def end(self) -> list[int]:
        """Stop the sends, wait for all acks and a quiet time, and return the exit statuses.

        The verdict reports the remaining messages without an ack as lost.
        """
        for client in self.clients:
            client.stop_sending()
        self.eventually(
            lambda: all(client.report.line_counts["stopped"] for client in self.clients)
        )
        with contextlib.suppress(AssertionError):
            self.eventually(
                lambda: not unsettled([client.report for client in self.clients]), DRAIN_S
            )
        self.eventually(
            lambda: (
                _now_us() - max(client.report.last_received_at for client in self.clients)
                > QUIET_S * US_PER_S
            )
        )
        return [client.end() for client in self.clients]

    def eventually(self, check: Callable[[], bool], within_s: float = RECOVERY_S) -> None:
        """Wait until `check` holds. Fail with all logs, at once if a client dies."""

        def checked() -> bool:
            for client in self.clients:
                if client.has_died:
                    pytest.fail(f"{client.name} died\n{client.stderr.read_text()[-LOG_CHARS:]}")
            return check()

        try:
            eventually(checked, within_ms=int(within_s * 1000))
        except AssertionError as late:
            statuses = "\n".join(client.status for client in self.clients)
            log = self._running.log.read_text()[-LOG_CHARS:]
            raise AssertionError(f"{late}\n{statuses}\n{self.done()}\n{log}") from None

    def done(self) -> str:
        """Return the disturbances, one per line."""
        return "\n".join(map(str, self.disturbances))

    def _received(self, role: str) -> int:
        return sum(client.report.received[role] for client in self.clients)


def _now_us() -> int:
    return time.time_ns() // NS_PER_US
