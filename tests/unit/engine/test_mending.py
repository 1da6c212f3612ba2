"""Mending: damage in one replica's log loses no message, because another replica has the bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from zlib import crc32

import pytest

from tests.support.bodies import body_of, text_of
from tests.support.disk.faulty_disk import FaultyDisk, PowerCut
from tests.support.disk.log_checker import check_log
from tests.support.worlds.engine_group import Group, Node
from tests.support.worlds.engine_world import SMALL, blob
from tidemill.broker.engine.layout.numbers import GroupId, LogOffset, QueueId, TopicId
from tidemill.broker.engine.queries.queue_reader import ENDLESS
from tidemill.broker.engine.store.damaged_ranges import GIVE_UP_MS, MendOutcome
from tidemill.broker.engine.store.mending import mend
from tidemill.broker.engine.store.segment import Record
from tidemill.broker.server.replicas.mending import served
from tidemill.common.errors import Repairing
from tidemill.message import stored_message

TEXTS = ["a", "b", "c", "d"]
FIRST = "log/00000000000000000000.log"
DEAD = "%DLQ%billing"
HIDDEN_MS = 60_000
HOUR_MS = 3_600_000


def group_of(*, size: int = 400) -> Group:
    group = Group(config=SMALL)
    group.elect(0)
    group.set_members(0, 1, 2)
    group.send(*TEXTS, size=size)
    group.settle()
    return group


def reborn(group: Group, name: str = "", *pages: int) -> Node:
    """Return replica 1 as the master, after a restart and with spoiled pages of a file."""
    node = group.nodes[1]
    for files in node.engine.checkpoints.write():
        for file in files:
            file.sync()
    group.kill(1)
    if name:
        node.disk.spoil(name, *pages)
    group.restart(1)
    group.settle()
    group.elect(1, 0, 1, 2)
    group.settle()
    assert node.log.is_master
    assert node.engine.store.verified_from > 0
    return node


def place_of(node: Node, number: int) -> tuple[int, int]:
    """Return the log offset of message `number`, and its size."""
    topic = node.engine.catalog.find_topic("orders")
    assert topic is not None
    log_offset, size, _ = node.engine.catalog.queue(topic.id, QueueId(0)).entry(number)
    return log_offset, size


def damage(node: Node, number: int, position: int = -1) -> LogOffset:
    """Flip a bit of message `number`; a negative `position` counts from its end."""
    log_offset, size = place_of(node, number)
    at = log_offset + (position if position >= 0 else size + position)
    segment = node.engine.log.segment_of(LogOffset(log_offset))
    node.disk.damage(segment.name, at - segment.start)
    return LogOffset(log_offset)


def ids(group: Group, node: Node) -> tuple[TopicId, GroupId]:
    engine = node.engine
    topic = engine.catalog.find_topic("orders")
    found = engine.catalog.find_group("billing")
    if found is None:
        found = engine.administration.put_group("billing", now_ms=group.now_ms)
        write(group, node)
    assert topic is not None
    return topic.id, found.id


def write(group: Group, node: Node) -> None:
    node.engine.write(group.now_ms)
    node.replication.handle_progress(group.now_ms)
    group._carry(node)
    group.settle()


def pop(group: Group, node: Node, count: int = 32) -> list[str]:
    """Pop as a round does: without the damaged messages."""
    topic_id, group_id = ids(group, node)
    engine = node.engine
    batches = engine.commands.pop(
        group_id,
        topic_id,
        max_messages=count,
        invisible_duration_ms=HIDDEN_MS,
        attempt_id="",
        now_ms=group.now_ms,
    )
    write(group, node)
    found = []
    for batch in batches:
        _, records = engine.consumption.read_batch(batch)
        found += [text_of(bytes(one.blob)) for one in records]
    return found


def run_due(group: Group, node: Node) -> None:
    for _ in node.engine.due_slices(group.now_ms, firing_ms=group.now_ms):
        pass
    write(group, node)


def has_dead_letters(node: Node) -> bool:
    return node.engine.catalog.find_topic(DEAD) is not None


@pytest.mark.parametrize("position", [0, 8, 20, 40, 60, 100, -1])
def test_a_damaged_message_is_mended_and_delivered(position: int) -> None:
    group = group_of()
    node = reborn(group)
    place = damage(node, 1, position)
    assert pop(group, node) == ["a", "c", "d"], "the other messages do not wait"
    run_due(group, node)
    assert pop(group, node) == []
    assert group.mend(1) == [MendOutcome.MENDED]
    node.engine.log.verify(place)
    run_due(group, node)
    run_due(group, node)
    assert pop(group, node) == ["b"]
    assert not has_dead_letters(node)
    check_log(node.disk)


def test_a_message_that_every_replica_has_lost_is_dead_lettered() -> None:
    group = group_of()
    node = reborn(group)
    for one in group.nodes:
        damage(one, 1)
    assert pop(group, node) == ["a", "c", "d"]
    run_due(group, node)
    assert not has_dead_letters(node)
    assert group.mend(1) == [MendOutcome.NOTHING, MendOutcome.NOTHING]
    run_due(group, node)
    assert has_dead_letters(node)


def test_a_damaged_message_waits_for_an_unreachable_replica() -> None:
    group = group_of()
    node = reborn(group)
    damage(node, 1)
    damage(group.nodes[0], 1)
    group.cut_off = {2}
    pop(group, node)
    assert group.mend(1) == [MendOutcome.NOTHING, MendOutcome.SILENT]
    run_due(group, node)
    assert not has_dead_letters(node)
    group.cut_off = set()
    group.now_ms += 1_000
    assert group.mend(1) == [MendOutcome.MENDED]
    run_due(group, node)
    assert not has_dead_letters(node)


def test_the_wait_for_an_unreachable_replica_has_a_limit() -> None:
    group = group_of()
    node = reborn(group)
    damage(node, 1)
    damage(group.nodes[0], 1)
    group.cut_off = {2}
    group.set_members(0, 1)
    pop(group, node)
    group.mend(1)
    group.now_ms += GIVE_UP_MS
    assert group.mend(1) == []
    run_due(group, node)
    assert has_dead_letters(node)


@pytest.mark.parametrize("position", [0, 60, -1])
def test_a_damaged_delivery_that_expires_is_revived_after_the_mending(position: int) -> None:
    group = group_of()
    node = group.nodes[0]
    assert pop(group, node) == TEXTS
    damage(node, 1, position)
    group.now_ms += HIDDEN_MS + 1
    run_due(group, node)
    assert sorted(pop(group, node)) == ["a", "c", "d"]
    assert group.mend(0) == [MendOutcome.MENDED]
    run_due(group, node)
    assert pop(group, node) == ["b"]
    assert not has_dead_letters(node)


def test_a_master_continues_to_send_after_its_log_is_mended() -> None:
    group = group_of()
    node = reborn(group)
    damage(node, 2)
    group.kill(0)
    group.nodes[0].disk = FaultyDisk(Random(0))
    group.restart(0)
    group.settle()
    assert group.nodes[0].log.log_end < node.log.log_end
    # It lags, so it does not delay requests to the third replica.
    assert MendOutcome.MENDED in group.mend(1)
    group.settle()
    assert group.nodes[0].log.log_end == node.log.log_end


def run_until(group: Group, node: Node, holds: Callable[[], bool]) -> None:
    for _ in range(200):
        group.now_ms += 1_000
        run_due(group, node)
        if holds():
            return
    raise AssertionError("it does not come to that")


def delayed(group: Group, node: Node, text: str) -> LogOffset:
    """Delay a message by an hour, and return its log offset."""
    topic_id, _ = ids(group, node)
    data = blob(text, size=400, kind=stored_message.TYPE_DELAY)
    at = node.log.log_end
    node.engine.commands.send(
        topic_id,
        QueueId(0),
        data,
        crc32(data),
        now_ms=group.now_ms,
        firing_ms=group.now_ms,
        delay_ms=HOUR_MS,
    )
    write(group, node)
    return next(
        LogOffset(one.log_offset)
        for one in node.engine.log.walk_between(at, node.log.log_end)
        if isinstance(one, Record) and text.encode() in bytes(one.tail)
    )


def test_a_damaged_delayed_message_is_delivered_after_the_mending() -> None:
    group = group_of()
    node = group.nodes[0]
    assert pop(group, node) == TEXTS
    place = delayed(group, node, "later")
    found = node.engine.log.record_at(place)
    segment = node.engine.log.segment_of(place)
    node.disk.damage(segment.name, place - segment.start + found.header.size - 1)
    group.now_ms += HOUR_MS
    run_until(group, node, lambda: bool(node.engine.timers.quarantined))
    assert group.mend(0) == [MendOutcome.MENDED]
    run_until(group, node, lambda: not node.engine.timers.index.pending_count)
    assert not node.engine.timers.quarantined
    assert "later" in pop(group, node)


def test_only_whole_confirmed_records_are_served() -> None:
    group = group_of()
    node = group.nodes[1]
    begin, size = place_of(node, 0)
    confirm = node.log.confirm_offset
    assert len(served(node.log, begin, begin + 1)) >= size
    assert served(node.log, confirm, confirm + 1) == b""
    assert served(node.log, begin + 1, begin + 2) == b"", "no record begins at this offset"
    assert served(node.log, begin, 1 << 40) == bytes(
        node.engine.log.bytes_at(LogOffset(begin), confirm - begin)
    )


def pull(node: Node, offset: int) -> tuple[list[bytes], int]:
    """Pull until the first empty result; return the bodies and the next offset."""
    topic = node.engine.catalog.find_topic("orders")
    assert topic is not None
    queue = node.engine.catalog.queue(topic.id, QueueId(0))
    pulling = node.engine.inspection.read(
        queue, offset, max_messages=32, max_bytes=1 << 20, until_offset=ENDLESS, with_bodies=True
    )
    while pulling.step():
        pass
    found = [body_of(each.blob) for each in pulling.take()]
    return found, pulling.next_offset


def test_a_pull_stops_before_a_record_that_may_be_mended() -> None:
    group = group_of()
    node = reborn(group)
    whole, _ = pull(node, 0)
    damage(node, 1)
    assert pull(node, 0) == (whole[:1], 1)
    with pytest.raises(Repairing, match="requested from another replica"):
        pull(node, 1)
    assert MendOutcome.MENDED in group.mend(1)
    assert pull(node, 1) == (whole[1:], len(whole))


def test_a_pull_skips_records_that_every_replica_has_lost() -> None:
    group = group_of()
    node = reborn(group)
    whole, _ = pull(node, 0)
    for number in range(3):
        damage(group.nodes[number], 1)
    with pytest.raises(Repairing):
        pull(node, 1)
    group.mend(1)
    assert pull(node, 0) == (whole[:1] + whole[2:], len(whole))


def test_a_mend_does_not_overwrite_another_record() -> None:
    group, other = group_of(), Group(config=SMALL)
    other.now_ms += 7_000
    other.elect(0)
    other.set_members(0, 1, 2)
    other.send(*TEXTS, size=400)
    other.settle()
    node = group.nodes[0]
    begin, _ = place_of(node, 1)
    before = bytes(node.engine.log.bytes_at(LogOffset(begin), 400))
    damage(node, 1)
    group.nodes[1] = other.nodes[1]
    group.nodes[2] = other.nodes[2]
    node.engine.log.damage.request(begin)
    assert group.mend(0) == [MendOutcome.NOTHING, MendOutcome.NOTHING]
    assert bytes(node.engine.log.bytes_at(LogOffset(begin), 400)) == before


def test_unreadable_pages_are_written_whole() -> None:
    group = group_of(size=10_000)
    node = group.nodes[1]
    begin, size = place_of(node, 1)
    segment = node.engine.log.segment_of(LogOffset(begin))
    expected = bytes(node.engine.log.bytes_at(LogOffset(begin), size))
    first, last = (begin - segment.start) // 4096 + 1, (begin + size - 1 - segment.start) // 4096
    node = reborn(group, segment.name, first, last)
    log = node.engine.log
    assert not log.is_readable(LogOffset(segment.start + first * 4096))
    assert pop(group, node) == ["a", "d"], "the next record has a part of the last page"
    assert MendOutcome.MENDED in group.mend(1)
    assert log.is_readable(LogOffset(segment.start + first * 4096))
    assert bytes(log.bytes_at(LogOffset(begin), size)) == expected
    run_due(group, node)
    run_due(group, node)
    assert sorted(pop(group, node)) == ["b", "c"]
    assert not has_dead_letters(node)


def test_a_power_cut_during_a_mend_leaves_the_record_damaged_or_mended() -> None:
    outcomes: list[str] = []
    while "whole" not in outcomes:
        group = group_of(size=100_000)
        node = group.nodes[0]
        before = node.disk.read(FIRST)
        place = damage(node, 1)
        node.engine.log.damage.request(place)
        found = served(group.nodes[1].log, place, place + 1)
        node.disk.cut_at = len(node.disk.operations) + len(outcomes)
        try:
            for files in mend(node.engine.log, node.disk, place, found):
                for file in files:
                    file.sync()
        except PowerCut:
            outcomes.append("cut")
        else:
            outcomes.append("whole")
        node.disk.cut_at = None
        group.kill(0, power_cut=True)
        after = node.disk.read(FIRST)
        assert before is not None
        assert after is not None
        end = place + place_of(group.nodes[1], 1)[1]
        assert (after[:place], after[end:]) == (before[:place], before[end:]), "no other state"
        assert after == before or outcomes[-1] == "cut"
    assert outcomes.count("cut") >= 2


@pytest.mark.parametrize("is_first", [True, False])
def test_a_replica_waits_for_the_mending_of_a_record_that_it_must_apply(
    is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record before the first one of a segment ends before a pad."""
    group = Group(2, config=replace(SMALL, segment_bytes=16 << 10))
    group.records_proposals = True
    group.elect(0)
    group.set_members(0, 1)
    node = group.nodes[1]
    monkeypatch.setattr(node, "apply", lambda: None)
    texts = [f"m{n}" for n in range(40)]
    group.send(*texts, size=1_000)
    group.settle()
    log, damage = node.engine.log, node.engine.log.damage
    queue = group.nodes[0].engine.catalog.queue(TopicId(1), QueueId(0))
    offsets = [int(queue.entry(n)[0]) for n in range(40)]
    segment = next(one for one in log.segments if one.start in offsets)
    place = segment.start if is_first else offsets[offsets.index(segment.start) + 1]
    node.disk.damage(segment.name, place - segment.start)
    requests = []
    request = damage.request

    def counted(log_offset: int, end: int | None = None) -> bool:
        requests.append(log_offset)
        assert len(requests) < 10, "it tries again and again"
        return request(log_offset, end)

    monkeypatch.setattr(damage, "request", counted)
    for _ in node.log.apply_slices():
        pass
    assert log.folded_offset == place
    assert not node.log.is_behind
    assert group.mend(1) == [MendOutcome.MENDED]
    for _ in node.log.apply_slices():
        pass
    assert node.bodies() == texts
