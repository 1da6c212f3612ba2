"""An operator's last resort: to elect a replica that misses acknowledged messages.

The cluster reports the lost messages. From then on no replica acknowledges messages that would also
be lost.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.support.eventually import eventually
from tests.support.processes.controlled_group import WITHIN_MS, ControlledGroup, controlled_group
from tests.support.processes.processes import descendants
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.stubs.tidemill.broker.v1 import broker_pb2_grpc
from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire

SCRAPES = 2
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


def send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


def processes_of(group: ControlledGroup, replicas: set[int]) -> list[int]:
    """Return the processes of replicas; their supervisors are the last ones."""
    supervisors = [group.replicas[one].pid for one in replicas]
    others = [pid for one in supervisors for pid in descendants(one) if pid != one]
    return [*others, *supervisors]


def unacked_bytes(group: ControlledGroup, master: int, replica: int) -> float:
    metric = "rocketmq_ha_replica_behind_bytes"
    return group.replicas[master].metric(metric, replica=str(replica))


def connections_to(group: ControlledGroup, master: int, replica: int) -> int:
    """Return how often a replica has connected to a master, by the log of the master."""
    lines = (group.folder / f"replica-{master}.log").read_text().splitlines()
    records = [json.loads(line) for line in lines if "replica connected" in line]
    return sum(record["replica"] == replica for record in records)


def test_a_replacement_reports_its_loss_and_stops_the_old_master(group: ControlledGroup) -> None:
    """The old master and its replica connect to each other before they hear of the replacement.

    These two are sufficient to acknowledge messages.
    """
    master = group.master
    behind, other = (master + 2) % 3, (master + 1) % 3
    complete = processes_of(group, {master, other})
    send(processes_of(group, {behind}), signal.SIGSTOP)
    group.await_in_sync(2)
    writer = Writer(group.replicas[master].grpc)
    writer.start()
    # First the master: later acks of the other replica wait at the stopped master.
    send(processes_of(group, {master}), signal.SIGSTOP)
    send(processes_of(group, {other}), signal.SIGSTOP)
    send(processes_of(group, {behind}), signal.SIGCONT)
    # Rejected while a connected replica has all messages.
    group.lead(behind)
    replaced = group.await_group(lambda found: found.view.master.replica_id == behind)
    answered, connections = writer.answered, connections_to(group, master, other)
    brokers, supervisors = complete[:-2], complete[-2:]
    send(brokers, signal.SIGCONT)
    eventually(lambda: connections_to(group, master, other) > connections, within_ms=WITHIN_MS)
    for _ in range(SCRAPES):  # Time for some calls of the writer, if any succeeded.
        eventually(lambda: unacked_bytes(group, master, other) == 0, within_ms=WITHIN_MS)
    send(supervisors, signal.SIGCONT)
    writer.join()
    # The record of the call in flight may have been confirmed before the pause.
    assert writer.answered <= answered + 1
    whole = group.await_group(
        lambda found: (
            {cut.replica_id for cut in cuts_of(found, replaced.view.epoch)} == {master, other}
        )
    )
    for cut in cuts_of(whole, replaced.view.epoch):
        assert cut.confirmed_bytes > 0
        assert cut.records > 0
    group.await_in_sync()


def cuts_of(found: wire.BrokerGroupStatus, epoch: int) -> list[wire.Cut]:
    """Return the cuts after the election of an epoch."""
    return [cut for one in found.history if one.epoch == epoch for cut in one.cuts]
