"""Damage to the log of one replica: the other replicas keep their records."""

from __future__ import annotations

import pytest

from tests.support.worlds.engine_group import Group, Node
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.replica import log_frames
from tidemill.broker.engine.replication.replica_phases import ReplicaPhase
from tidemill.broker.engine.store import commit_log
from tidemill.broker.engine.store.segment import CorruptStore, segment_name
from tidemill.broker.engine.store.whole_records import find_frame

MESSAGE_BYTES = 5_000


def with_a_replica_away() -> tuple[Group, Node, Node, int]:
    """Return a group, its master, a replica that was down for half of the log, and its log end."""
    group = Group()
    group.elect(0, 0, 1, 2)
    group.send(*(f"m{n}" for n in range(30)), size=MESSAGE_BYTES)
    group.settle()
    group.kill(2)
    group.set_members(0, 1)
    group.send(*(f"n{n}" for n in range(30)), size=MESSAGE_BYTES)
    group.settle()
    return group, group.nodes[0], group.nodes[2], group.nodes[2].log.log_end


def damage(node: Node, log_offset: int) -> None:
    node.disk.damage(segment_name(0), log_offset)


def test_damage_at_the_master_removes_nothing_from_a_returning_replica() -> None:
    group, master, replica, end = with_a_replica_away()
    damage(master, end - 30_000)
    group.restart(2)
    group.settle(1_000)
    assert (replica.runs, replica.log.log_end) == (2, master.log.log_end), "it was not emptied"
    assert len(replica.bodies()) == 60


@pytest.mark.parametrize("is_readable", [True, False])
def test_a_master_without_an_intact_record_to_compare_rejects_the_replica(
    monkeypatch: pytest.MonkeyPatch, is_readable: bool
) -> None:
    if not is_readable:
        # The kernel's cache counts as this small.
        monkeypatch.setattr(commit_log, "WARM_BYTES", 0)
    group, master, replica, end = with_a_replica_away()
    if is_readable:
        damage(master, end - 100)
    else:
        master.disk.spoil(segment_name(0), (end - 100) // 4096)
        master.engine.mappings.forget(segment_name(0))
    group.restart(2)
    group.settle(1_000)
    assert (replica.runs, replica.log.log_end) == (2, end), "it was not emptied"
    assert "is damaged at byte" in master.log.frames.damage


def test_a_damaged_replica_is_copied_again() -> None:
    group, master, replica, end = with_a_replica_away()
    group.cut_off.add(2)
    group.restart(2)
    damage(replica, end - 100)
    group.cut_off.clear()
    group.settle(1_000)
    assert (replica.runs, replica.log.log_end) == (3, master.log.log_end)
    assert len(replica.bodies()) == 60


def test_a_record_larger_than_a_digest_is_compared_as_a_whole() -> None:
    group, master, replica, _ = with_a_replica_away()
    group.send("large", size=200_000)
    group.restart(2)
    group.settle(1_000)
    end = master.log.log_end
    found = master.log.digest(0, end)
    assert found is not None
    assert end - found.begin > 200_000
    assert replica.log.digest(found.begin, end) == found
    damage(master, end - 150_000)
    assert master.log.digest(0, end) is None


@pytest.mark.parametrize("at", [0, 1_000])
def test_a_damaged_record_is_not_sent_and_the_records_before_it_are(
    monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    monkeypatch.setattr(log_frames, "RECENT_BYTES", 0)
    _, master, _, end = with_a_replica_away()
    first = master.log.frame_at(end, 1)
    assert first is not None
    # In its magic, as if the log continued in another segment, and in its body.
    damage(master, first.end + at)
    frame = master.log.frame_at(end, 1 << 20)
    assert frame is not None
    assert frame.end == first.end
    assert master.log.frame_at(first.end, 1 << 20) is None
    assert "is damaged at byte" in master.log.frames.damage


def test_a_copy_of_a_damaged_record_is_not_confirmed() -> None:
    group, master, replica, end = with_a_replica_away()
    first = master.log.frame_at(end, 1)
    assert first is not None
    damage(master, first.end + 1_000)
    group.restart(2)
    group.settle(1_000)
    assert replica.log.log_end == first.end
    assert replica.replication.replica is not None
    assert replica.replication.replica.phase is ReplicaPhase.FOLLOWING
    with pytest.raises(CorruptStore):
        find_frame(master.engine.log, LogOffset(first.end), 1)
