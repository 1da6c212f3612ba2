"""Failover reports for operators: the duration without sends, and the cuts of each log."""

from __future__ import annotations

import itertools
import os
import signal
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

CALL_S = 5.0
WITHIN_MS = 120_000


@pytest.fixture
def group(tmp_path: Path) -> Iterator[ControlledGroup]:
    with controlled_group(tmp_path) as running:
        running.await_in_sync()
        yield running


def signal_followers(group: ControlledGroup, number: signal.Signals) -> None:
    """Signal replicas 1 and 2 and their supervisors."""
    for pid in [pid for each in (1, 2) for pid in descendants(group.replicas[each].pid)]:
        os.kill(pid, number)


def write_at_the_master_alone(group: ControlledGroup) -> None:
    """Let replica 0 write a record that no other replica gets; kill the other replicas.

    The other replicas are frozen before the write, as a write between two kills would be in one of
    two logs. A master without their reports rejects the write after a while: then this tries again.
    """
    names = itertools.count()

    def write() -> bool:
        group.await_in_sync()
        signal_followers(group, signal.SIGSTOP)
        with grpc.insecure_channel(group.replicas[0].grpc) as channel:
            stub = broker_pb2_grpc.BrokerAdminStub(channel)
            request = pb.PutTopicRequest(name=f"t-{next(names)}", queues=1)
            with pytest.raises(grpc.RpcError) as failure:
                stub.PutTopic(request, timeout=CALL_S, wait_for_ready=True)
        if failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return True
        signal_followers(group, signal.SIGCONT)
        return False

    eventually(write, within_ms=WITHIN_MS)
    signal_followers(group, signal.SIGKILL)


def test_unacknowledged_records_are_cut_and_logged_after_a_failover(group: ControlledGroup) -> None:
    write_at_the_master_alone(group)
    master = group.replicas[0].broker_pid
    os.kill(master, signal.SIGSTOP)
    for replica in (1, 2):
        group.replicas[replica].end()
        group.start_replica(replica)
    after = group.await_group(lambda found: found.view.epoch >= 2)
    assert after.view.master.replica_id in {1, 2}
    os.kill(master, signal.SIGCONT)
    group_status = group.await_group(lambda found: bool(cuts_of(found) and away_of(found)))
    [cut] = cuts_of(group_status)
    assert (cut.replica_id, cut.confirmed_bytes) == (0, 0)
    assert cut.epoch >= 2
    assert cut.records >= 1
    assert cut.size_bytes > 0
    assert all(each.away_ms >= each.detected_ms for each in away_of(group_status))
    group.await_in_sync()


def cuts_of(group: wire.BrokerGroupStatus) -> list[wire.Cut]:
    return [cut for transition in group.history for cut in transition.cuts]


def away_of(group: wire.BrokerGroupStatus) -> list[wire.Transition]:
    """Return the transitions with a known duration without sends."""
    return [each for each in group.history if each.HasField("away_ms")]
