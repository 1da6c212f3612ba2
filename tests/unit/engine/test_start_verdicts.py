"""The verdict of a start about a broken log end: a torn tail only after a power cut."""

from __future__ import annotations

import pytest

from tests.support.worlds.engine_group import Group, Node
from tests.support.worlds.engine_world import ENTROPY, SMALL
from tidemill.broker.engine.layout.numbers import LogOffset, QueueId
from tidemill.broker.engine.replica.opening import FreshIdentity, open_replica_engine
from tidemill.broker.engine.replica.replica_engine import ReplicaEngine
from tidemill.broker.engine.store.mending import proven_prefix
from tidemill.broker.engine.store.segment import LogDamaged

BOOT, OTHER_BOOT = b"\xab" * 16, b"\xcd" * 16


def opened(node: Node, *, boot_id: bytes = BOOT, cuts_damage: bool = False) -> ReplicaEngine:
    """Open the store of a killed node, as a start does."""
    node.disk = node.disk.after_kill()
    log, _ = open_replica_engine(
        node.disk,
        SMALL,
        now_ms=1_000_000,
        fresh=FreshIdentity(bytes(16), ENTROPY),
        boot_id=boot_id,
        cuts_damage=cuts_damage,
    )
    return log


def group_of() -> tuple[Group, Node]:
    """Return a group, and a registered replica without a saved mark since its registration."""
    group = Group(config=SMALL)
    group.elect(0)
    group.set_members(0, 1, 2)
    node = group.nodes[1]
    before, known_end = node.log.log_end, node.log.files.known_end
    group.send("a", "b", "c", size=400)
    group.settle()
    known_end._boot_id = BOOT
    known_end.note_cut(before)  # As if all later records were from the last second.
    known_end.note_opened(before)
    return group, node


def damage(node: Node, number: int) -> int:
    topic = node.engine.catalog.find_topic("orders")
    assert topic is not None
    log_offset, size, _ = node.engine.catalog.queue(topic.id, QueueId(0)).entry(number)
    segment = node.engine.log.segment_of(LogOffset(log_offset))
    node.disk.damage(segment.name, log_offset - segment.start + size - 1)
    return log_offset


def test_a_broken_record_before_intact_ones_is_damage_without_a_power_cut() -> None:
    _, node = group_of()
    at = damage(node, 1)
    with pytest.raises(LogDamaged) as raised:
        opened(node)
    assert raised.value.log_offset == at


def test_a_broken_record_before_intact_ones_may_be_torn_by_a_power_cut() -> None:
    _, node = group_of()
    at = damage(node, 1)
    log = opened(node, boot_id=OTHER_BOOT)
    assert (log.log_end, log.files.known_end.is_doubtful) == (at, False), (
        "acked records were synced"
    )


def test_a_broken_record_after_an_orderly_stop_is_damage() -> None:
    _, node = group_of()
    node.log.files.close(node.log.durable_offset)
    at = damage(node, 2)
    with pytest.raises(LogDamaged) as raised:
        opened(node, boot_id=OTHER_BOOT)
    assert raised.value.log_offset == at


def test_a_broken_last_record_without_a_power_cut_is_doubtful() -> None:
    _, node = group_of()
    at = damage(node, 2)
    log = opened(node)
    assert (log.log_end, log.files.known_end.is_doubtful) == (at, True)


def test_an_intact_log_is_never_doubtful_after_its_oldest_segment_was_dropped() -> None:
    group = Group(config=SMALL)
    group.elect(0)
    group.set_members(0, 1, 2)
    node = group.nodes[0]
    known_end, log = node.log.files.known_end, node.engine.log
    while len(log.segments) < 2 or log._active_end - log.log_end < SMALL.segment_bytes // 4 * 3:
        group.send("a", size=3000)
        group.settle()
    known_end._boot_id = BOOT
    known_end.note_opened(log.log_end)
    assert not log._next.is_ready
    for files in log.drop_oldest():
        for file in files:
            file.sync()
    again = opened(node)
    assert (again.log_end, again.files.known_end.is_doubtful) == (log.log_end, False)


def test_a_replica_that_was_cut_at_damage_is_doubtful_until_it_is_a_member_again() -> None:
    _, node = group_of()
    at = damage(node, 1)
    log = opened(node, cuts_damage=True)
    assert (log.log_end, log.files.known_end.is_doubtful) == (at, True)
    log = opened(node)
    assert log.files.known_end.is_doubtful, "the doubt is unreported"
    log.files.close(log.durable_offset)
    log = opened(node)
    assert log.files.known_end.is_doubtful, "an orderly stop does not clear the doubt"
    log.files.known_end.clear_doubt()
    assert not opened(node).files.known_end.is_doubtful


def test_equal_records_after_a_damaged_one_prove_its_bytes() -> None:
    group, node = group_of()
    at = damage(node, 1)
    log = node.engine.log
    other = group.nodes[0].engine.log
    data = bytes(other.bytes_at(LogOffset(at), other.log_end - at))
    assert proven_prefix(log, at, data) == data
    damage(node, 2)
    assert proven_prefix(log, at, data) == b"", "no later record is equal"
