"""Official clients and operators over three broker groups of three replicas, under every fault.

Python, Node.js, Go and Java clients run in every role over two proxies. Operators ask every
question of the REST API at random. Topics and consumer groups are used, purged, deleted and created
again. Retention is a minute. Each process is killed, some are stopped or frozen, and masters move.

Short by default. `make soak` runs it for SOAK_MINUTES. The seed repeats the choices of a run, but
not their timing.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from tests.support.clients.client_process import GO_PROGRAM, JAVA_CLASSES, NODE_PACKAGES, needs
from tests.support.clients.disturbed_clients import CALLS, DisturbedClients, disturbed_clients
from tests.support.clients.looping_clients import judge
from tests.support.clients.message_kinds import ROLES
from tests.support.clients.random_operators import RestOfOperators, judge_answers, random_operators
from tests.support.clients.short_lives import short_lives
from tests.support.eventually import eventually
from tests.support.processes.killing import RECOVERY_S, child_pid, is_back
from tests.support.processes.processes import Standalone, standalone
from tests.support.processes.replicated_standalone import FLAGS, ReplicatedStandalone, send_signal
from tests.support.seeds import seed_base

pytestmark = [
    pytest.mark.large,
    needs("node", NODE_PACKAGES),
    needs("go", GO_PROGRAM),
    needs("java", JAVA_CLASSES),
]

SOAK_S = float(os.environ.get("SOAK_MINUTES", "0")) * 60
SEED = seed_base()
GROUPS = ("broker-0", "broker-1", "broker-2")  # the home first
FRONTS = ("proxy-0", "proxy-1", "admin")
RETENTION_MS = 60_000
SETTINGS = f"retention_ms: {RETENTION_MS}\nsegment_bytes: 1048576\n"
# A message expires only if a fault loses its delivery to a push consumer, which takes a minute.
EXPIRED_MAX = 0.05  # of the messages, each of which counts once for each consumer group


def test_every_promise_is_kept_while_everything_is_killed_and_operated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "tidemill.yaml"
    settings.write_text(SETTINGS, "utf-8")
    flags = (*FLAGS, f"--groups={len(GROUPS)}", "--proxies=2", f"--config={settings}")
    with standalone(tmp_path / "data", *flags) as running:
        with (
            closing(RestOfOperators(running)) as rest,
            disturbed_clients(tmp_path, running) as disturbed,
        ):
            with random_operators(rest, SEED), short_lives(running, rest, SEED) as lives:
                Faults(running, disturbed, random.Random(SEED)).run()
            statuses = disturbed.end()
        log = running.log.read_text()
        assert running.stop() == 0
    clients = disturbed.clients
    verdict = judge(disturbed.facts(), disturbed.disturbances, RETENTION_MS * 1000)
    forbidden, answers = judge_answers(rest.answers, disturbed.disturbances)
    (tmp_path / "answers.jsonl").write_text(  # For the analysis of a verdict.
        "".join(f"{json.dumps(one._asdict())}\n" for one in rest.answers)
    )
    resurrected = [each for life in lives for each in life.violations]
    actions = [
        *(client.status for client in clients),
        *map(str, disturbed.disturbances),
        f"{len(disturbed.disturbances)} disturbances; {verdict}",
        f"answers of the REST API by status: {dict(sorted(answers.items()))}",
        f"lives of topics: {[life.lives for life in lives]}",
        f"messages received of them: {[life.received for life in lives]}",
        *resurrected,
        *forbidden,
    ]
    with capsys.disabled():
        if SOAK_S:
            sys.stderr.write("\n" + "\n".join(actions) + "\n")
    story = f"seed {SEED}\n" + "\n".join(actions)
    assert verdict.is_clean, story
    assert not resurrected, story
    assert not forbidden, story
    assert statuses == [0] * len(clients)
    for client in clients:
        assert set(client.report.received) == set(disturbed.roles), client.status
        assert all(client.report.stored[topic] for topic in disturbed.topics), client.status
    expected = sum(
        len(client.report.stored[topic])
        for client in clients
        for role in disturbed.roles
        for topic in ROLES[role]
    )
    assert verdict.explained["expired"] <= EXPIRED_MAX * expected, story
    assert all(life.lives and life.received for life in lives), story
    assert "Traceback" not in log


class Faults:
    """Faults of all processes, one after the other, while clients and operators work."""

    def __init__(
        self, running: Standalone, disturbed: DisturbedClients, rng: random.Random
    ) -> None:
        self._running = running
        self._disturbed = disturbed
        self._rng = rng
        self._groups = {name: ReplicatedStandalone(running, name) for name in GROUPS}
        self._acts: list[Callable[[], None]] = [
            self._kill_master,
            self._kill_broker_of_master,
            self._kill_all_masters,
            self._kill_follower,
            self._kill_controller,
            self._freeze_master,
            self._stop_master,
            self._move_master,
            partial(self._kill_fronts, "proxy-0"),
            partial(self._kill_fronts, "proxy-1", "admin"),
            partial(self._kill_fronts, *FRONTS),
            self._kill_master_proxy_and_admin,
        ]

    def run(self) -> None:
        """Run each fault at least once, and go on for the given time."""
        self._disturbed.ready()
        self._in_sync()
        self._disturbed.progress()
        end_at = time.monotonic() + SOAK_S
        while True:
            for act in self._rng.sample(self._acts, len(self._acts)):
                act()
                self._disturbed.progress()
                if SOAK_S and time.monotonic() > end_at:
                    return
            if time.monotonic() > end_at:
                return

    def _one_group(self) -> ReplicatedStandalone:
        return self._rng.choice(list(self._groups.values()))

    def _in_sync(self) -> None:
        async def all_of_them() -> None:
            await asyncio.gather(*(group.in_sync() for group in self._groups.values()))

        asyncio.run(all_of_them())

    def _kill_replicas(self, what: str, names: Sequence[str], fronts: Sequence[str] = ()) -> None:
        """Kill replicas with their supervisors, and fronts. Wait until all are back."""
        with self._disturbed.disturbance(f"kill {what}: {' '.join([*names, *fronts])}", CALLS):
            pids = {name: self._pids(name) for name in [*names, *fronts]}
            for each in pids.values():
                send_signal(each, signal.SIGKILL)
            former = {name: found for name, (found, *_) in pids.items()}
            self._await_return(former)

    def _await_return(self, former: dict[str, int]) -> None:
        for name, pid in former.items():
            if name in FRONTS:
                self._disturbed.eventually(partial(is_back, self._running, name, pid))
            else:
                eventually(
                    partial(self._is_restarted, name, pid), within_ms=round(RECOVERY_S * 1000)
                )
        self._in_sync()

    def _is_restarted(self, name: str, former_pid: int) -> bool:
        return child_pid(self._running, name) not in (0, former_pid)

    def _pids(self, name: str) -> list[int]:
        return self._one_group().pids(name)

    def _kill_master(self) -> None:
        self._kill_replicas("a master", [self._one_group().master()])

    def _kill_all_masters(self) -> None:
        self._kill_replicas("all masters", [group.master() for group in self._groups.values()])

    def _kill_follower(self) -> None:
        self._kill_replicas("a replica", [self._one_group().follower()])

    def _kill_controller(self) -> None:
        self._kill_replicas("the controller", ["controller-0"])

    def _kill_fronts(self, *names: str) -> None:
        self._kill_replicas("fronts", [], names)

    def _kill_master_proxy_and_admin(self) -> None:
        fronts = [self._rng.choice(["proxy-0", "proxy-1"]), "admin"]
        self._kill_replicas("across", [self._one_group().master()], fronts)

    def _kill_broker_of_master(self) -> None:
        group = self._one_group()
        with self._disturbed.disturbance(f"kill the broker of {group.group}'s master", CALLS):
            epoch = group.led()["epoch"]
            send_signal(group.pids(group.master())[1:2], signal.SIGKILL)
            asyncio.run(group.in_sync(after_epoch=epoch))

    def _freeze_master(self) -> None:
        group = self._one_group()
        with self._disturbed.disturbance(f"freeze the master of {group.group}", CALLS):
            epoch = group.led()["epoch"]
            frozen = group.pids(group.master())
            send_signal(frozen, signal.SIGSTOP)
            try:
                self._disturbed.progress()
            finally:
                send_signal(frozen, signal.SIGCONT)
            asyncio.run(group.in_sync(after_epoch=epoch))

    def _stop_master(self) -> None:
        group = self._one_group()
        name = group.master()
        with self._disturbed.disturbance(f"stop {name}", CALLS):
            former = self._pids(name)[0]
            send_signal([former], signal.SIGTERM)
            self._await_return({name: former})

    def _move_master(self) -> None:
        group = self._one_group()
        with self._disturbed.disturbance(f"move the master of {group.group}", frozenset()):
            epoch = group.led()["epoch"]
            group.transfer()
            asyncio.run(group.in_sync(after_epoch=epoch))
