"""A replica with a full disk whose master's disk has room."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.worlds.engine_group import Group, Node
from tests.support.worlds.engine_world import SMALL
from tidemill.broker.engine.replica.replica_engine import FRAMES_LEFT_BYTES
from tidemill.broker.engine.replication.replica_phases import ReplicaPhase
from tidemill.broker.engine.store.cutting import erase

SEGMENT_BYTES = 1 << 20
SMALL_FILES_BYTES = 64 << 10  # room for the durable state of a replica
CONFIG = replace(SMALL, segment_bytes=SEGMENT_BYTES)


def founded() -> tuple[Group, Node, Node]:
    group = Group(config=CONFIG)
    group.elect(0, 0, 1, 2)
    group.send("first")
    group.settle()
    return group, group.nodes[0], group.nodes[2]


def leave_room(node: Node, size: int) -> None:
    """Limit the free space of a disk, as if other programs had used the rest."""
    node.disk.capacity_bytes += size - node.disk.free_bytes()
    node.engine.room.measure()  # as the round loop does once per second


def test_a_full_replica_takes_no_data_until_its_disk_has_room() -> None:
    group, master, replica = founded()
    leave_room(replica, FRAMES_LEFT_BYTES + SEGMENT_BYTES)
    group.send(*(f"m{n}" for n in range(40)), size=90_000)
    group.settle(3_000)
    assert replica.is_up
    assert replica.disk.free_bytes() >= FRAMES_LEFT_BYTES - SEGMENT_BYTES
    assert 0 < replica.log.log_end < master.log.log_end
    assert replica.replication.replica is not None
    assert replica.replication.replica.phase is ReplicaPhase.FOLLOWING, (
        "it still learns what it may delete"
    )
    assert master.replication.master is not None
    assert replica.me not in master.replication.master.sync_state.desired_set(group.now_ms)
    leave_room(replica, 3 * FRAMES_LEFT_BYTES)
    group.settle(1_000)
    assert replica.log.log_end == master.log.log_end
    assert replica.me in master.replication.master.sync_state.desired_set(group.now_ms)


def test_a_start_on_a_full_disk_cuts_a_torn_tail_without_more_space() -> None:
    group, _, replica = founded()
    group.send("second", size=90_000)
    group.kill(2)
    end = replica.log.log_end
    leave_room(replica, SMALL_FILES_BYTES)
    tail = replica.disk.open("log/00000000000000000000.log")
    tail.write_at(end - 20, [b"torn"])
    tail.close()
    group.restart(2)
    assert replica.report.cut_bytes > 0
    assert replica.log.log_end < end


def test_only_written_ranges_are_erased() -> None:
    disk = FaultyDisk(Random(0), capacity_bytes=1 << 20)
    file = disk.open("f", create=True)
    file.resize(1 << 30)
    file.write_at(5_000, [b"x" * 10_000])
    file.write_at(300_000, [b"y"])
    used = disk.free_bytes()
    erase(file, 6_000, 1 << 20)
    assert file.read_at(0, 1 << 19) == bytes(5_000) + b"x" * 1_000 + bytes((1 << 19) - 6_000)
    assert disk.free_bytes() == used


def test_a_lagging_replica_deletes_the_segments_that_its_master_deleted() -> None:
    group, master, replica = founded()
    retention = replica.engine.retention
    for n in range(3):
        group.send(f"m{n}")
        group.settle()
        # It got a confirm offset ahead of its applied offset, as from every busy master.
        replica.log.follow_floor(100 * (n + 1), master.log.confirm_offset + 10)
    assert retention.may_go_before == 100
