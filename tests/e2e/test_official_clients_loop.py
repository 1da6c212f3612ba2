"""Every official client in every role, while servers are killed, stopped, drained and added.

Two proxies, three broker groups, and one process each for Python, Node.js, Go and Java. They send
every kind of message, and consume with and without filters. If the
listener of an ordered push consumer in Go fails, the consumer continues with the next message. So
this listener never fails.

Short by default. `make soak` runs it for SOAK_MINUTES. The data pipeline then audits the logs of
the remaining broker groups. It names the one invented send, and nothing else.
The seed repeats the choices of a run, but not their timing.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.support.clients.client_process import GO_PROGRAM, JAVA_CLASSES, NODE_PACKAGES, needs
from tests.support.clients.disturbed_clients import (
    CALLS,
    DRAIN_S,
    DisturbedClients,
    disturbed_clients,
)
from tests.support.clients.looping_clients import judge
from tests.support.clients.message_kinds import ROLES, TOPICS
from tests.support.processes.killing import child_pid, is_back
from tests.support.processes.processes import Standalone, broker, command, environment, standalone
from tests.support.seeds import seed_base

pytestmark = [
    pytest.mark.large,
    needs("node", NODE_PACKAGES),
    needs("go", GO_PROGRAM),
    needs("java", JAVA_CLASSES),
]

SOAK_S = float(os.environ.get("SOAK_MINUTES", "0")) * 60
SEED = seed_base()
FLAGS = ("--groups=3", "--proxies=2")
BROKERS = ("broker-0", "broker-1", "broker-2")
PROXIES = ("proxy-0", "proxy-1")
COMMAND_S = DRAIN_S  # Also the time for a broker group to become empty.
# After the removal of a broker group: later acks cannot be in its log. The audit's tolerance for an
# ack, and a margin.
SURE_S = 65.0
PHANTOM = "nobody/normal/0"  # Reported as stored, but never sent.
# Findings that must not occur. If an ack came before the removal of a broker group and is in no
# log, it is unknown: the removed log may have had it.
OPINIONS = ("missing", "unexpected", "early", "unreadable")


def test_every_official_client_keeps_its_promises_whatever_happens_to_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with standalone(tmp_path / "data", *FLAGS) as running:
        with disturbed_clients(tmp_path, running, TOPICS) as disturbed:
            Loop(running, disturbed, tmp_path, random.Random(SEED)).run()
            statuses = disturbed.end()
        if SOAK_S:
            found = second_opinion(running, disturbed, tmp_path)
            assert found == {("missing", PHANTOM)}, f"seed {SEED}"
        log = running.log.read_text()
        assert running.stop() == 0
    clients = disturbed.clients
    verdict = judge(disturbed.facts(), disturbed.disturbances)
    with capsys.disabled():
        if SOAK_S:
            done = "\n".join(client.status for client in clients)
            sys.stderr.write(f"\n{done}\n{len(disturbed.disturbances)} disturbances; {verdict}\n")
    assert verdict.is_clean, f"seed {SEED}\n{verdict}\n{disturbed.done()}"
    assert statuses == [0] * len(clients)
    for client in clients:
        # Each client had each role, so these claims hold for each.
        assert set(client.report.received) == set(ROLES), client.status
        assert all(client.report.stored.values()), client.status
        assert client.report.line_counts["checked"], client.status  # of transactions
    assert "Traceback" not in log


def second_opinion(
    running: Standalone, disturbed: DisturbedClients, folder: Path
) -> set[tuple[str, str]]:
    """Return the findings of an audit of the logs: kinds and messages."""
    # Needs Spark, which only a soak requires.
    from tests.chaos.audit import found_by_events
    from tidemill_pipeline.jobs.running import session

    facts = disturbed.facts()
    last = max((fact for fact in facts if fact["fact"] == "send"), key=lambda fact: fact["ended"])
    phantom = last | {"key": PHANTOM, "topic": "normal", "error": ""}
    with session("audit", "local[2]") as spark:
        findings, _ = found_by_events(
            spark,
            [*facts, phantom],
            to=str(folder / "audit"),
            connection={"endpoints": running.grpc},
        )
    return {(each["kind"], each["message_id"]) for each in findings if each["kind"] in OPINIONS}


class Loop:
    """Disturbances of the servers, one after the other, while the clients run."""

    def __init__(
        self, running: Standalone, disturbed: DisturbedClients, folder: Path, rng: random.Random
    ) -> None:
        self._running = running
        self._disturbed = disturbed
        self._folder = folder
        self._rng = rng
        self._added = len(BROKERS)
        kill, stop = signal.SIGKILL, signal.SIGTERM
        self._acts: list[Callable[[], None]] = [
            partial(self._signal, kill, "proxy-0"),
            partial(self._signal, kill, "broker-0"),  # The home broker group.
            partial(self._signal, kill, "broker-1", "proxy-1"),
            partial(self._signal, stop, "broker-2"),
            partial(self._signal, stop, "proxy-0"),
            self._add_and_drain,
        ]

    def run(self) -> None:
        """Disturb the servers for the given time."""
        self._disturbed.ready()
        end_at = time.monotonic() + SOAK_S
        self._disturbed.progress()
        # First, so that no kill can cause an error in an application.
        for name in PROXIES:
            self._signal(signal.SIGTERM, name)
        while True:
            for act in self._rng.sample(self._acts, len(self._acts)):
                act()
            if time.monotonic() > end_at:
                break
        self._drain_owner()
        sure_at = time.monotonic() + (SURE_S if SOAK_S else 0)
        while time.monotonic() < sure_at:
            self._disturbed.progress()

    def _signal(self, number: signal.Signals, *names: str) -> None:
        """Kill or stop processes that are started again, and wait until all work continues."""
        is_proxy_stop = number is signal.SIGTERM and set(names) <= set(PROXIES)
        with self._disturbed.disturbance(
            f"{number.name} {' '.join(names)}", frozenset() if is_proxy_stop else CALLS
        ):
            pids = {name: child_pid(self._running, name) for name in names}
            for pid in pids.values():
                os.kill(pid, number)
            for name, pid in pids.items():
                self._disturbed.eventually(partial(is_back, self._running, name, pid))
        self._disturbed.progress()

    def _add_and_drain(self) -> None:
        """Add a broker group, wait until it has messages, drain it and remove it."""
        name, self._added = f"broker-{self._added}", self._added + 1
        with (
            broker(self._folder / name, f"--name={name}") as (_, address, _),
            self._disturbed.disturbance(f"add and drain {name}", frozenset()),
        ):
            self._tidemill("broker-group", "add", name, address)
            self._disturbed.progress()
            self._leave(name)
        self._disturbed.progress()

    def _drain_owner(self) -> None:
        """Drain a broker group that owns message groups and dedup keys.

        The proxy rejects their sends until the broker group is removed. Then other broker groups
        store them. So an application sees errors of these sends, and no other errors.
        """
        with self._disturbed.disturbance("drain broker-2", frozenset({"ordered", "dedup"})):
            self._leave("broker-2")
        self._disturbed.progress()

    def _leave(self, name: str) -> None:
        """Drain and remove a broker group; on a timeout, report the holders of its messages."""
        try:
            self._tidemill("broker-group", "drain", name, "--wait", "--yes")
        except subprocess.TimeoutExpired as late:
            held = [self._tidemill("delivery", "list", role) for role in ROLES]
            pytest.fail(f"{name} is not empty: {late.output!r}\n{''.join(held)}")
        self._tidemill("broker-group", "remove", name, "--yes")

    def _tidemill(self, *arguments: str) -> str:
        done = subprocess.run(
            command(*arguments),
            env=environment() | {"TIDEMILL_ADMIN": self._running.admin},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout}\n{done.stderr}"
        return done.stdout
