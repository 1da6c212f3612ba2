"""Replicas that were down while the master's log grew and lost its begin."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.worlds.engine_group import Group, Node
from tests.support.worlds.engine_world import SMALL
from tidemill.broker.engine.replica import log_frames
from tidemill.broker.engine.replication.replica_phases import ReplicaPhase

SEGMENT_BYTES = 128 << 10
CONFIG = replace(SMALL, segment_bytes=SEGMENT_BYTES)


def retire(node: Node, *, up_to: int) -> None:
    """Drop the segments of a master before an offset, as retention does."""
    while node.engine.log.segments[0].end <= up_to:
        for files in node.engine.log.drop_oldest():
            for file in files:
                file.sync()


def state_of(node: Node) -> ReplicaPhase | None:
    replica = node.replication.replica
    return None if replica is None else replica.phase


def test_a_replica_overtaken_by_retention_during_the_copy_begins_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_frames, "RECENT_BYTES", SEGMENT_BYTES)
    group = Group(config=CONFIG)
    group.elect(0, 0, 1)
    master, learner = group.nodes[0], group.nodes[2]
    group.kill(2)
    group.set_members(0, 1)
    group.send(*(f"m{n}" for n in range(400)), size=3_000)
    group.settle()
    master.log.frames.old_bytes_left = 200_000
    group.restart(2)
    group.settle()
    assert 0 < learner.log.log_end < master.log.log_end // 2
    retire(master, up_to=master.log.log_end - 500_000)
    assert learner.log.log_end < master.log.log_min
    master.log.frames.old_bytes_left = None
    group.settle(1_000)
    assert (learner.log.log_min, learner.log.log_end) == (master.log.log_min, master.log.log_end)


def test_a_replica_that_diverged_before_the_begin_of_the_masters_log_is_copied_again() -> None:
    group = Group(config=CONFIG)
    group.elect(0, 0, 1)
    group.kill(2)
    group.set_members(0, 1)
    group.send(*(f"a{n}" for n in range(20)), size=3_000)
    group.settle()
    group.cut_off.add(0)
    group.lose_streams(group.nodes[0])
    group.send(*(f"lost{n}" for n in range(60)), size=3_000)  # only this replica has them
    group.nodes[0].sync()
    group.kill(0)
    group.elect(1, 1)
    group.cut_off.clear()
    group.restart(2)
    group.settle()
    group.set_members(1, 2)
    group.send(*(f"b{n}" for n in range(150)), size=3_000)
    group.settle()
    master, deposed = group.nodes[1], group.nodes[0]
    retire(master, up_to=SEGMENT_BYTES)
    group.restart(0)
    group.settle(1_000)
    assert (deposed.log.log_min, deposed.log.log_end) == (SEGMENT_BYTES, master.log.log_end)


def test_a_replica_that_learns_late_of_its_removal_is_copied_then() -> None:
    group = Group(config=CONFIG)
    group.elect(0, 0, 1, 2)
    group.send("a")
    group.settle()
    master, member = group.nodes[0], group.nodes[2]
    before = group.view
    group.cut_off.add(2)
    group.lose_streams(member)
    group.set_members(0, 1)
    group.send(*(f"m{n}" for n in range(150)), size=3_000)
    group.settle()
    retire(master, up_to=2 * SEGMENT_BYTES)
    after, group.view = group.view, before
    group.cut_off.clear()
    group.settle(1_000)
    assert state_of(member) is ReplicaPhase.DIVERGED
    group.view = after
    group.share_view()
    group.settle(1_000)
    assert state_of(member) is ReplicaPhase.FOLLOWING
    assert member.log.log_end == master.log.log_end
