"""Every official client in every role, while the server is killed, stopped, drained and added to.

Two proxies, three broker groups, and a process each for Python, Node.js, Go and Java, which send
NORMAL, DELAY and FIFO messages and receive them as simple and as push consumers, ordered and not.
All languages share the consumer groups, so each gets what the others have sent.

What clients do not do for an application, which therefore sees it here: none asks again for a
receive, and none but for push consumers for an ack. An ordered push consumer in Go goes on with the
next message where its listener fails, so there it never fails.

Short by default. `make soak` runs it for SOAK_MINUTES; CLIENTS_LOOP_SEED repeats the choices of a
run, though not the moments at which they met the clients.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.support.client_process import (
    GO_PROGRAM,
    JAVA_CLASSES,
    JAVA_LIBRARIES,
    NODE_PACKAGES,
    SCRIPTS,
    Fact,
    needs,
)
from tests.support.eventually import eventually
from tests.support.killing import RECOVERY_S, child_pid
from tests.support.looping_clients import (
    ROLES,
    TOPICS,
    US_PER_S,
    Disturbance,
    Looping,
    judge,
    unsettled,
)
from tests.support.processes import Standalone, broker, command, environment, standalone

pytestmark = [
    pytest.mark.large,
    needs("node", NODE_PACKAGES),
    needs("go", GO_PROGRAM),
    needs("java", JAVA_CLASSES),
]

SOAK_S = float(os.environ.get("SOAK_MINUTES", "0")) * 60
SEED = int(os.environ.get("CLIENTS_LOOP_SEED", "1"))
FLAGS = ("--groups=3", "--proxies=2")
BROKERS = ("broker-0", "broker-1", "broker-2")
PROXIES = ("proxy-0", "proxy-1")
ATTEMPTS_MAX = 1000  # none becomes a dead letter
RETRY_MS = 1000  # before a message that failed in a push consumer comes again
PROGRESS = 10  # messages that each client stores of each topic between two disturbances
READY_S = 5.0  # for an answer of a process that says whether it is ready
# For all that was sent to be acked. A push consumer's delivery whose answer was lost comes back
# after a minute, and what is behind it in its queue after that.
DRAIN_S = 150.0
QUIET_S = 3.0  # without a message, at the end: what would come again has come by then
COMMAND_S = 150.0  # for a broker group to become empty, too: see DRAIN_S

# Calls of which an application sees errors when a process is killed: the one that was under way is
# lost, and no client asks again but with what it sends. An ack may find that its delivery is over.
CALLS = frozenset({"normal", "delayed", "ordered", "receive", "ack"})


def test_every_official_client_keeps_its_promises_whatever_happens_to_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with standalone(tmp_path / "data", *FLAGS) as running:
        for topic in TOPICS:
            kind = {"delayed": "DELAY", "ordered": "FIFO"}.get(topic, "NORMAL")
            running.put(f"topics/{topic}", messageType=kind, queues=2)
        for role in ROLES:
            order = "FIFO" if role.startswith("ordered") else "CONCURRENT"
            retry = {"customized": {"nextMs": [RETRY_MS]}}
            running.put(
                f"groups/{role}", deliveryOrder=order, maxAttempts=ATTEMPTS_MAX, retry=retry
            )
        with looping_clients(tmp_path, running.grpc) as clients:
            loop = Loop(running, clients, tmp_path, random.Random(SEED))
            try:
                loop.run()
                statuses = [client.end() for client in clients]
            finally:
                facts = told_by(clients)
                # For whoever looks into a verdict.
                lines = "".join(f"{json.dumps(fact)}\n" for fact in facts)
                (tmp_path / "facts.jsonl").write_text(lines)
        log = running.log.read_text()
        assert running.stop() == 0
    verdict = judge(facts, loop.disturbances)
    with capsys.disabled():
        if SOAK_S:
            done = "\n".join(client.status for client in clients)
            sys.stderr.write(f"\n{done}\n{len(loop.disturbances)} disturbances; {verdict}\n")
    told = "\n".join(map(str, loop.disturbances))
    assert verdict.is_clean, f"seed {SEED}\n{verdict}\n{told}"
    assert statuses == [0] * len(clients)
    for client in clients:
        # Each had a part in each role, so all of this is said of each.
        assert set(client.told.received) == set(ROLES), client.status
        assert all(client.told.stored.values()), client.status
    assert "Traceback" not in log


def told_by(clients: list[Looping]) -> list[Fact]:
    """Return all that the clients have said by now."""
    return [
        {"client": client.name, **fact} for client in clients for fact in list(client.told.facts)
    ]


@contextlib.contextmanager
def looping_clients(folder: Path, endpoint: str) -> Iterator[list[Looping]]:
    """Run each client for the block; afterwards none is left."""
    java_home = f"-Duser.home={folder / 'java'}"
    commands = {
        "python": [sys.executable, str(SCRIPTS / "python" / "loop.py")],
        "node": ["node", str(SCRIPTS / "node" / "loop.mjs")],
        "go": [str(GO_PROGRAM), "loop"],
        "java": ["java", java_home, "-cp", f"{JAVA_CLASSES}:{JAVA_LIBRARIES}/*", "Loop"],
    }
    clients: list[Looping] = []
    try:
        for name, client_command in commands.items():
            clients.append(Looping(name, client_command, endpoint, folder / name))
        yield clients
    finally:
        for client in clients:
            client.kill()


class Loop:
    """What is done to the server while the clients go on, one thing after the other."""

    def __init__(
        self, running: Standalone, clients: list[Looping], folder: Path, rng: random.Random
    ) -> None:
        self._running = running
        self._clients = clients
        self._folder = folder
        self._rng = rng
        self._added = len(BROKERS)
        kill, stop = signal.SIGKILL, signal.SIGTERM
        self._acts: list[Callable[[], None]] = [
            partial(self._signal, kill, "proxy-0"),
            partial(self._signal, kill, "broker-0"),  # the home of the others
            partial(self._signal, kill, "broker-1", "proxy-1"),
            partial(self._signal, stop, "broker-2"),
            partial(self._signal, stop, "proxy-0"),
            self._add_and_drain,
        ]
        self.disturbances: list[Disturbance] = []

    def run(self) -> None:
        """Disturb the server for as long as is wanted, and return when everything is quiet."""
        self._eventually(lambda: all(client.told.said["ready"] for client in self._clients))
        end_at = time.monotonic() + SOAK_S
        self._progress()
        # First, so that no kill can be to blame for what an application sees.
        for name in PROXIES:
            self._signal(signal.SIGTERM, name)
        while True:
            for act in self._rng.sample(self._acts, len(self._acts)):
                act()
            if time.monotonic() > end_at:
                break
        self._drain_one_with_message_groups()
        for client in self._clients:
            client.stop_sending()
        self._eventually(lambda: all(client.told.said["stopped"] for client in self._clients))
        self._quiet()

    def _signal(self, number: signal.Signals, *names: str) -> None:
        """Kill or stop processes, which are started again, and wait until everything goes on."""
        is_proxy_stop = number is signal.SIGTERM and set(names) <= set(PROXIES)
        with self._disturbance(
            f"{number.name} {' '.join(names)}", frozenset() if is_proxy_stop else CALLS
        ):
            pids = {name: child_pid(self._running, name) for name in names}
            for pid in pids.values():
                os.kill(pid, number)
            for name, pid in pids.items():
                self._eventually(partial(self._is_back, name, pid))
        self._progress()

    def _is_back(self, name: str, former_pid: int) -> bool:
        if child_pid(self._running, name) in (0, former_pid):
            return False
        ready = self._running.processes[name].metrics.replace("/metrics", "/readyz")
        try:
            return httpx.get(ready, trust_env=False, timeout=READY_S).is_success
        except httpx.TransportError:
            return False

    def _add_and_drain(self) -> None:
        """Add a broker group, let it have messages, drain it, and remove it."""
        name, self._added = f"broker-{self._added}", self._added + 1
        with (
            broker(self._folder / name, f"--name={name}") as (_, address, _),
            self._disturbance(f"add and drain {name}", frozenset()),
        ):
            self._tidemill("broker-group", "add", name, address)
            self._progress()
            self._leave(name)
        self._progress()

    def _drain_one_with_message_groups(self) -> None:
        """Drain a broker group in which message groups have their place.

        Their sends are refused until it is removed, and then they have another place: so an
        application sees errors of ordered sends, and of nothing else.
        """
        with self._disturbance("drain broker-2", frozenset({"ordered"})):
            self._leave("broker-2")
        self._progress()

    def _leave(self, name: str) -> None:
        """Drain a broker group and remove it; where that takes too long say who holds what."""
        try:
            self._tidemill("broker-group", "drain", name, "--wait", "--yes")
        except subprocess.TimeoutExpired as late:
            held = [self._tidemill("delivery", "ls", role) for role in ROLES]
            pytest.fail(f"{name} is not empty: {late.output!r}\n{''.join(held)}")
        self._tidemill("broker-group", "remove", name, "--yes")

    def _tidemill(self, *arguments: str) -> str:
        done = subprocess.run(
            command(*arguments), env=environment() | {"TIDEMILL_ADMIN": self._running.admin},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_S,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{arguments}: {done.stdout}\n{done.stderr}"
        return done.stdout

    @contextlib.contextmanager
    def _disturbance(self, what: str, fails: frozenset[str]) -> Iterator[None]:
        begun = now_us()
        sys.stderr.write(f"{what}\n")  # what a failed run has done
        yield
        self.disturbances.append(Disturbance(what, begun, now_us(), fails))

    def _progress(self) -> None:
        """Wait until each client has stored some more of each topic, and all roles got some."""
        goals = [
            (client.told.stored[topic], len(client.told.stored[topic]) + PROGRESS)
            for client in self._clients
            for topic in TOPICS
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

    def _quiet(self) -> None:
        """Wait until all is acked, and nothing has come for a while; what is not is lost."""
        with contextlib.suppress(AssertionError):
            self._eventually(
                lambda: not unsettled([client.told for client in self._clients]), DRAIN_S
            )
        self._eventually(lambda: now_us() - self._last_received() > QUIET_S * US_PER_S)

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
            done = "\n".join(map(str, self.disturbances))
            raise AssertionError(
                f"seed {SEED}: {late}\n{told}\n{done}\n{self._running.log.read_text()[-5000:]}"
            ) from None


def now_us() -> int:
    return time.time_ns() // 1000
