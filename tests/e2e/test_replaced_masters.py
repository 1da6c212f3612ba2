"""An operator's last resort: to elect a replica that misses acknowledged messages.

The cluster reports the lost messages. From then on no replica acknowledges messages that would also
be lost.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.support.eventually import eventually
from tests.support.processes.controlled_group import ControlledGroup, controlled_group
from tests.support.processes.processes import descendants
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.stubs.tidemill.broker.v1 import broker_pb2_grpc
from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire

PATIENT_S = 120.0  # Timeout of a client that waits for any master.


@pytest.fixture
def group(tmp_path: Path) -> Iterator[ControlledGroup]:
    with controlled_group(tmp_path) as running:
        running.await_in_sync()
        yield running


class Writer:
    """A client that writes one record after the other to a broker until a call fails."""

    def __init__(self, address: str) -> None:
        self.answered = 0
        self._address = address
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()
        eventually(lambda: self.answered > 10, within_ms=round(PATIENT_S * 1000))

    def join(self) -> None:
        self._thread.join(2 * PATIENT_S)

    def _run(self) -> None:
        with grpc.insecure_channel(self._address) as channel:
            stub = broker_pb2_grpc.BrokerAdminStub(channel)
            for number in itertools.count():
                request = pb.PutTopicRequest(name=f"t-{number}", queues=1)
                try:
                    stub.PutTopic(request, timeout=PATIENT_S)
                except grpc.RpcError:
                    return
                self.answered += 1


def send(group: ControlledGroup, replicas: set[int], number: signal.Signals) -> None:
    """Send a signal to all processes of replicas and to their supervisors."""
    for pid in [pid for one in replicas for pid in descendants(group.replicas[one].pid)]:
        os.kill(pid, number)


def test_a_replacement_reports_its_loss_and_stops_the_old_master(group: ControlledGroup) -> None:
    master = group.master
    behind = (master + 2) % 3
    complete = {0, 1, 2} - {behind}
    send(group, {behind}, signal.SIGSTOP)
    group.await_in_sync(2)
    writer = Writer(group.replicas[master].grpc)
    writer.start()
    # First the master: later acks of the other replica wait at the stopped master.
    send(group, {master}, signal.SIGSTOP)
    send(group, complete - {master}, signal.SIGSTOP)
    send(group, {behind}, signal.SIGCONT)
    # Rejected while a connected replica has all messages.
    group.lead(behind)
    replaced = group.await_group(lambda found: found.view.master.replica_id == behind)
    answered = writer.answered
    # One call is in flight at the previous master. The master continues with its replica: these
    # two are sufficient for it.
    send(group, complete, signal.SIGCONT)
    writer.join()
    assert writer.answered == answered
    whole = group.await_group(
        lambda found: {cut.replica_id for cut in cuts_of(found, replaced.view.epoch)} == complete
    )
    for cut in cuts_of(whole, replaced.view.epoch):
        assert cut.confirmed_bytes > 0
        assert cut.records > 0
    group.await_in_sync()


def cuts_of(found: wire.BrokerGroupStatus, epoch: int) -> list[wire.Cut]:
    """Return the cuts after the election of an epoch."""
    return [cut for one in found.history if one.epoch == epoch for cut in one.cuts]
