"""The promises to official clients in every role while masters are killed, stopped and moved.

One process for each official client that is built here, at least the one for Python, through a
standalone with three replicas. No message is lost, no acked message comes back, no timer is early,
and message groups keep their order.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from tests.support.clients.disturbed_clients import CALLS, DisturbedClients, disturbed_clients
from tests.support.clients.looping_clients import judge
from tests.support.processes.processes import standalone
from tests.support.processes.replicated_standalone import FLAGS, ReplicatedStandalone, send_signal

pytestmark = pytest.mark.large


def test_official_clients_keep_their_promises_when_masters_go(tmp_path: Path) -> None:
    with standalone(tmp_path / "data", *FLAGS) as running:
        with disturbed_clients(tmp_path, running) as disturbed:
            Failovers(ReplicatedStandalone(running), disturbed).run()
            statuses = disturbed.end()
        log = running.log.read_text()
        assert running.stop() == 0
    verdict = judge(disturbed.facts(), disturbed.disturbances)
    assert verdict.is_clean, f"{verdict}\n{disturbed.done()}"
    assert statuses == [0] * len(disturbed.clients)
    assert "Traceback" not in log


class Failovers:
    """Faults of replicas, one after the other, while the clients work."""

    def __init__(self, group: ReplicatedStandalone, disturbed: DisturbedClients) -> None:
        self._group = group
        self._disturbed = disturbed

    def run(self) -> None:
        """Run each fault once."""
        self._disturbed.ready()
        for fault in (
            self._move_master,
            self._kill_master,
            self._freeze_master,
            self._kill_controller,
        ):
            self._disturbed.progress()
            asyncio.run(self._group.in_sync())
            fault()
        self._disturbed.progress()

    def _move_master(self) -> None:
        with self._disturbed.disturbance("the master is moved", frozenset()):
            epoch = self._group.led()["epoch"]
            self._group.transfer()
            asyncio.run(self._group.in_sync(after_epoch=epoch))

    def _kill_master(self) -> None:
        with self._disturbed.disturbance("the master is killed", CALLS):
            epoch = self._group.led()["epoch"]
            send_signal(self._group.pids(self._group.master()), signal.SIGKILL)
            asyncio.run(self._group.in_sync(after_epoch=epoch))

    def _freeze_master(self) -> None:
        with self._disturbed.disturbance("the master stands still", CALLS):
            epoch = self._group.led()["epoch"]
            frozen = self._group.pids(self._group.master())
            send_signal(frozen, signal.SIGSTOP)
            try:
                self._disturbed.progress()
            finally:
                send_signal(frozen, signal.SIGCONT)
            asyncio.run(self._group.in_sync(after_epoch=epoch))

    def _kill_controller(self) -> None:
        with self._disturbed.disturbance("the controller is killed", frozenset()):
            send_signal(self._group.pids("controller-0"), signal.SIGKILL)
            self._disturbed.progress()
