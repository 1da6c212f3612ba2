"""What people read of a failover: for how long sends were away, and what was cut of whose log."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.support.controlled_group import ControlledGroup, controlled_group
from tests.support.processes import descendants
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.stubs.tidemill.broker.v1 import broker_pb2_grpc

CALL_S = 5.0


@pytest.fixture
def group(tmp_path: Path) -> Iterator[ControlledGroup]:
    with controlled_group(tmp_path) as running:
        running.await_in_sync()
        yield running


class Writer:
    """Writes to a broker, one record after the other, until a call fails."""

    def __init__(self, address: str) -> None:
        self.answered = 0
        self.has_written = threading.Event()
        self._address = address
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()
        assert self.has_written.wait(CALL_S)

    def join(self) -> None:
        self._thread.join(2 * CALL_S)

    def _run(self) -> None:
        with grpc.insecure_channel(self._address) as channel:
            stub = broker_pb2_grpc.BrokerAdminStub(channel)
            for number in itertools.count():
                request = pb.PutTopicRequest(name=f"t-{number}", queues=1)
                try:
                    stub.PutTopic(request, timeout=CALL_S)
                except grpc.RpcError:
                    return
                self.answered += 1
                self.has_written.set()


def test_what_nobody_was_told_ok_for_is_cut_and_said_so(group: ControlledGroup) -> None:
    writer = Writer(group.replicas[0].grpc)
    writer.start()
    # Together, so that nothing which the master writes from now on gets to anybody.
    pids = [pid for replica in (1, 2) for pid in descendants(group.replicas[replica].pid)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    writer.join()
    master = group.replicas[0].broker_pid
    os.kill(master, signal.SIGSTOP)
    for replica in (1, 2):
        group.replicas[replica].end()
        group.start_replica(replica)
    after = group.await_group(lambda found: found.view.epoch == 2)
    assert after.view.master.replica_id in {1, 2}
    os.kill(master, signal.SIGCONT)
    told = group.await_group(
        lambda found: found.history[-1].HasField("away_ms") and len(found.history[-1].cuts) > 0
    )
    last = told.history[-1]
    assert last.away_ms >= last.detected_ms
    [cut] = last.cuts
    assert (cut.replica_id, cut.epoch, cut.confirmed_bytes) == (0, 2, 0)
    assert cut.records >= 1
    assert cut.size_bytes > 0
    group.await_in_sync()
