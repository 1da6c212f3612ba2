"""Packs in broker groups: replicas that lag, begin empty, take over, and mend."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from zlib import crc32

import pytest

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.seeds import seeds
from tests.support.worlds.engine_group import Group, Node
from tests.support.worlds.engine_world import SMALL, blob
from tests.support.worlds.packed_worlds import drop_dead_entries, pack_engine
from tidemill.broker.engine.configuration.purge import PurgedQueue
from tidemill.broker.engine.layout import pack
from tidemill.broker.engine.layout.numbers import LogOffset, QueueId, TopicId
from tidemill.broker.engine.layout.record import is_gap
from tidemill.broker.engine.metadata.catalog import TopicType
from tidemill.broker.engine.store.damaged_ranges import MendOutcome
from tidemill.broker.engine.store.segment import CorruptStore, Hole
from tidemill.broker.engine.timer.status import SCHEDULE_QUEUE
from tidemill.broker.engine.upkeep import dead_entries
from tidemill.message.resource_names import TIMER_TOPIC

SEGMENT = 16 << 10
CONFIG = replace(SMALL, segment_bytes=SEGMENT, checkpoint_log_bytes=SEGMENT)
TEXTS = [f"m{n}" for n in range(60)]


def group_of(count: int = 3) -> Group:
    group = Group(count, config=CONFIG)
    group.records_proposals = True
    group.elect(0)
    group.set_members(0, 1)
    return group


def lose(group: Group, number: int, *, power_cut: bool = False) -> None:
    """End a replica, and continue without it."""
    group.kill(number, power_cut=power_cut)
    group.set_members(*[node.number for node in group.nodes if node.is_up])
    group.settle(3_000)


def checkpoint(group: Group, node: Node) -> None:
    for n, files in enumerate(node.engine.checkpoints.write()):
        for file in files:
            file.sync()
        if node.engine.background.needs_quiet:
            group.settle(100)
        assert n < 10_000, "the checkpoint waits for a quiet moment in vain"


def purge(group: Group, low: int) -> None:
    assert group.view.master is not None
    engine = group.nodes[group.view.master.replica_id].engine
    topic = engine.catalog.find_topic("orders")
    assert topic is not None
    for _ in engine.purge.purge([PurgedQueue(topic.id, QueueId(0), low)], group.now_ms):
        pass
    engine.write(group.now_ms)
    group.settle()


def master_of(group: Group) -> Node:
    assert group.view.master is not None
    return group.nodes[group.view.master.replica_id]


def move_floor(group: Group, number: int = -1) -> None:
    """Move the state floor at the master to the end of one of the segments that it may pass."""
    node = master_of(group)
    checkpoint(group, node)
    log, derived = node.engine.log, node.engine.store.derived_offset
    ends = [one.end for one in log.segments[:-1] if log.state_floor < one.end <= derived]
    if not ends:
        return
    floor = ends[number % len(ends)]
    for n, files in enumerate(node.engine.retention.move_floor(floor, group.now_ms)):
        for file in files:
            file.sync()
        node.engine.write(group.now_ms)
        group.settle(100)
        assert n < 1_000, "the floor waits for a quiet moment in vain"
    assert log.state_floor == floor
    group.settle()  # The replicas apply the record.


def pack_node(group: Group, node: Node) -> int:
    checkpoint(group, node)
    return pack_engine(node.engine)


def test_a_replica_that_was_down_continues_inside_a_pack() -> None:
    group = group_of()
    group.send(*TEXTS[:10], size=1_000)
    group.settle()
    end = group.nodes[2].log.log_end
    lose(group, 2)
    group.send(*TEXTS[10:], size=1_000)
    group.settle()
    purge(group, 55)
    assert pack_node(group, group.nodes[0]) >= 2
    log = group.nodes[0].engine.log
    assert log.segment_of(LogOffset(end)).pack is not None, "it ended there"
    group.restart(2)
    group.settle(2_000)
    replica = group.nodes[2]
    assert replica.diverged == ""
    assert replica.log.log_min == 0, "it was not emptied"
    assert replica.log.log_end == group.nodes[0].log.log_end
    assert replica.bodies() == TEXTS[55:]
    group.kill(2, power_cut=True)
    group.restart(2)
    group.settle(2_000)
    assert replica.bodies() == TEXTS[55:]
    assert pack_node(group, replica) >= 2
    assert replica.bodies() == TEXTS[55:]


def test_a_replica_keeps_its_log_if_a_pack_of_the_master_ends_with_dead_messages() -> None:
    """The digest of the master begins behind them, and the replica has whole messages there."""
    group = group_of()
    group.set_members(0, 1, 2)
    group.send(*TEXTS, size=1_000)
    group.settle()
    master, replica = group.nodes[0], group.nodes[2]
    log, queue = master.engine.log, master.engine.catalog.queues[TopicId(1), QueueId(0)]
    purge(group, queue.offset_behind(log.segments[1].start))
    assert pack_node(group, master) == 1
    lose(group, 2)
    disk = replica.disk
    group.restart(2)
    group.settle(2_000)
    assert replica.log.log_end == master.log.log_end
    assert replica.disk is disk, "it was not emptied"


def test_a_replica_that_begins_empty_copies_packs() -> None:
    group = group_of()
    lose(group, 2)
    group.send(*TEXTS, size=1_000)
    group.settle()
    purge(group, 55)
    assert pack_node(group, group.nodes[0]) >= 2
    group.nodes[2].disk = FaultyDisk(Random(7))
    group.restart(2)
    group.settle(2_000)
    assert group.nodes[2].bodies() == TEXTS[55:]
    group.set_members(0, 1, 2)
    lose(group, 0)
    group.elect(2, 1, 2)
    group.settle(2_000)
    group.send("later")
    group.settle()
    assert group.nodes[2].bodies() == [*TEXTS[55:], "later"]
    assert group.nodes[1].bodies() == [*TEXTS[55:], "later"]


def test_a_replica_that_begins_empty_copies_a_log_with_gaps() -> None:
    """It takes no state from the records that are left before the state floor."""
    group = group_of()
    lose(group, 2)
    group.send(*TEXTS, size=1_000)
    group.settle()
    purge(group, 35)
    master = group.nodes[0]
    move_floor(group)
    assert pack_node(group, master) >= 2
    assert master.engine.log.packed_floor > 0
    group.nodes[2].disk = FaultyDisk(Random(7))
    group.restart(2)
    group.settle(2_000)
    replica = group.nodes[2]
    assert replica.bodies() == TEXTS[35:]
    assert replica.engine.log.state_floor == master.engine.log.state_floor
    # Its whole segments contain gaps. It serves them, also without any derived file.
    replica.disk = replica.disk.after_kill()
    for folder in ("queues", "index", "snapshots"):
        for name in replica.disk.names(folder):
            replica.disk.remove(name)
    lose(group, 2)
    group.restart(2)
    group.settle(2_000)
    assert replica.bodies() == TEXTS[35:]
    group.set_members(0, 1, 2)
    lose(group, 0)
    group.elect(2, 1, 2)
    group.settle(2_000)
    group.nodes[1].disk = FaultyDisk(Random(8))
    lose(group, 1)
    group.nodes[1].disk = FaultyDisk(Random(8))
    group.restart(1)
    group.settle(3_000)
    assert group.nodes[1].bodies() == TEXTS[35:]


def send_gone(group: Group) -> None:
    """Send a message to another topic than `Group.send`."""
    node, data = master_of(group), blob("gone", size=1_000)
    topic = node.engine.catalog.find_topic("gone") or node.engine.administration.put_topic(
        "gone", type_=TopicType.NORMAL, queues=1, now_ms=group.now_ms
    )
    node.engine.commands.send(
        topic.id, QueueId(0), data, crc32(data), now_ms=group.now_ms, firing_ms=group.now_ms
    )
    node.engine.write(group.now_ms)
    group.settle(50)


@pytest.mark.parametrize("lost", [(), ("snapshots",), ("queues",)])
def test_a_replica_that_copied_gaps_is_elected_before_it_joins_again(lost: tuple[str, ...]) -> None:
    """Its log begins with a live message, and a gap follows. No header names the floor."""
    group = Group(3, config=CONFIG)
    group.records_proposals = True
    group.cut_off = {2}
    group.elect(0, 0, 1)
    master = group.nodes[0]
    master.engine.administration.put_topic(
        "orders", type_=TopicType.NORMAL, queues=1, now_ms=group.now_ms
    )
    send_gone(group)
    while SEGMENT - master.engine.log.log_end > 1_230:
        send_gone(group)
    kept = []
    for n in range(40):
        kept.append(f"m{n}")
        group.send(kept[-1], size=1_100)
        for _ in range(4):
            send_gone(group)
    master.engine.administration.delete_topic("gone", group.now_ms)
    master.engine.write(group.now_ms)
    group.settle()
    move_floor(group)
    for files in master.engine.retention.give_up_oldest(group.now_ms):
        for file in files:
            file.sync()
        group.settle(100)
    assert master.log.log_min == SEGMENT
    assert pack_node(group, master) >= 4
    group.cut_off = set()
    group.elect(0, 0, 1)
    group.settle(3_000)
    replica = group.nodes[2]
    group.set_members(0, 1, 2)
    group.settle(1_000)
    assert replica.bodies() == kept
    assert all(one.pack is None for one in replica.engine.log.segments)
    if lost:
        checkpoint(group, replica)
    group.kill(2)
    for folder in lost:
        for name in replica.disk.names(folder):
            replica.disk.remove(name)
    group.cut_off = {0, 1}
    group.restart(2)
    group.kill(0)
    group.cut_off = set()
    group.elect(2, 1, 2)
    assert replica.log.is_master
    assert replica.bodies() == kept


def test_a_replica_drops_the_fired_timers_before_the_state_floor() -> None:
    """Otherwise it would count their messages as live, and would not pack their segments."""
    group = Group(2, config=CONFIG)
    group.records_proposals = True
    group.elect(0)
    group.set_members(0, 1)
    group.send("unread")
    topic = group.nodes[0].engine.catalog.find_topic("orders")
    assert topic is not None
    for n in range(40):
        data = blob(f"d{n}", size=1_000)
        group.nodes[0].engine.timers.commands.schedule(
            topic,
            QueueId(0),
            data,
            crc32(data),
            due_at_ms=group.now_ms + 1_000,
            now_ms=group.now_ms,
            firing_ms=group.now_ms,
        )
        group.nodes[0].engine.write(group.now_ms)
    group.settle(2_000)
    for _ in range(10):
        group.now_ms += 1_000
        group.nodes[0].engine.run_due(group.now_ms, firing_ms=group.now_ms)
        group.nodes[0].engine.write(group.now_ms)
        group.settle()
    group.send(*TEXTS[:20], size=1_000)
    group.settle(2_000)
    move_floor(group)
    floor = group.nodes[0].engine.log.state_floor
    for node in group.nodes:
        step_background(group, node)
        assert node.engine.log.state_floor == floor > 40_000
        schedules = node.engine.catalog.queue(
            node.engine.catalog.topic_ids[TIMER_TOPIC], SCHEDULE_QUEUE
        )
        assert schedules.max_offset == 40
        assert schedules.min_offset == 40, f"replica {node.number}"


def step_background(group: Group, node: Node) -> None:
    """Run the background jobs of a node that are due."""
    for _ in range(10_000):
        files = node.engine.background.step(group.now_ms, firing_ms=group.now_ms)
        if files is None:
            return
        for file in files:
            file.sync()
        if node is master_of(group):
            node.engine.write(group.now_ms)
        group.settle(50)
    raise AssertionError("the background jobs never end")


def test_a_damaged_gap_is_mended_from_whole_segments() -> None:
    group = group_of()
    group.set_members(0, 1, 2)
    group.send(*TEXTS, size=1_000)
    group.settle()
    purge(group, 20)
    move_floor(group)
    node = group.nodes[1]
    assert pack_node(group, node)
    log, first = node.engine.log, node.engine.log.segments[0]
    assert first.pack is not None
    before = [one.log_offset for one in log.walk_between(first.start, first.end)]
    [gap, *_] = [
        one
        for one in log.walk_between(first.start, first.end)
        if not isinstance(one, Hole) and is_gap(one.header)
    ]
    node.disk.damage(first.name, log.reader.position(first, gap.log_offset) + 20)
    assert log.damage.request(gap.log_offset)
    assert MendOutcome.MENDED in group.mend(1)
    log.verify(LogOffset(gap.log_offset))
    assert [one.log_offset for one in log.walk_between(first.start, first.end)] == before
    assert node.bodies() == TEXTS[20:]


def test_a_damaged_record_of_a_pack_is_mended_from_whole_segments() -> None:
    """Both a kept record and a stub; the other replicas have the whole messages."""
    group = group_of()
    group.set_members(0, 1, 2)
    group.send(*TEXTS, size=1_000)
    group.settle()
    purge(group, 14)
    node = group.nodes[1]
    checkpoint(group, node)
    first = node.engine.log.segments[0]
    assert pack_engine(node.engine)
    assert first.pack is not None
    header = first.pack.header
    data = node.disk.read(first.name)
    for at in (pack.HEADER_SIZE + 60, (pack.HEADER_SIZE + header.records_end) // 2):
        node.disk.damage(first.name, at)
        log = node.engine.log
        bad = next(
            one.log_offset
            for one in log.walk_between(first.start, first.end)
            if not _is_sound(node, one.log_offset)
        )
        log.damage.has_replicas = True
        assert log.damage.request(bad)
        group.mend(1)
        assert node.disk.read(first.name) == data


def test_a_replica_that_copied_stubs_serves_the_records_before_them() -> None:
    """Its segments are whole files with stubs, and the other replica has whole messages there."""
    group = group_of()
    lose(group, 2)
    group.send(*TEXTS, size=1_000)
    group.settle()
    purge(group, 14)
    assert pack_node(group, group.nodes[0])
    group.restart(2)
    group.settle(3_000)
    node, server = group.nodes[1], group.nodes[2]
    queue = node.engine.catalog.queues[TopicId(1), QueueId(0)]
    damaged = int(queue.entry(14)[0])
    segment = node.engine.log.segment_of(LogOffset(damaged))
    assert (segment.pack, server.engine.log.segment_of(LogOffset(damaged)).pack) == (None, None)
    node.disk.damage(segment.name, damaged - segment.start + 150)
    group.kill(0)
    assert node.engine.log.damage.request(damaged)
    outcomes = group.mend(1)
    group.now_ms += 2_000
    outcomes += group.mend(1)
    assert MendOutcome.MENDED in outcomes
    assert _is_sound(node, damaged)


def test_neighbouring_damaged_records_of_a_pack_are_mended() -> None:
    group = group_of()
    group.set_members(0, 1, 2)
    group.send(*TEXTS, size=1_000)
    group.settle()
    purge(group, 30)
    node = group.nodes[1]
    assert pack_node(group, node)
    log, first = node.engine.log, node.engine.log.segments[0]
    data = node.disk.read(first.name)
    bad = [int(one.log_offset) for one in log.walk_between(first.start, first.end)][3:6]
    for log_offset in bad:
        node.disk.damage(first.name, log.reader.position(first, log_offset) + 10)
        assert log.damage.request(log_offset)
    group.mend(1)
    assert node.disk.read(first.name) == data


@pytest.mark.parametrize("is_inside", [True, False])
def test_an_unclean_cut_behind_which_a_pack_has_its_reasons_empties_the_replica(
    *, is_inside: bool
) -> None:
    """The new master has whole, live messages where the replica has stubs."""
    group = Group(config=replace(CONFIG, checkpoint_log_bytes=1 << 40))
    group.elect(0)
    group.set_members(0, 1, 2)
    group.send(*(TEXTS[:20] if is_inside else TEXTS), size=1_000)
    group.settle()
    if not is_inside:
        checkpoint(group, group.nodes[1])
    lose(group, 2)
    if is_inside:
        group.send(*TEXTS[20:], size=1_000)
        group.settle()
    purge(group, 50)
    assert pack_engine(group.nodes[1].engine)
    group.kill(0)
    group.kill(1)
    group.restart(2)
    epoch = group.view.epoch + 1
    group.view = group.view._replace(
        epoch=epoch,
        version=group.view.version + 1,
        master=group.nodes[2].me,
        sss=frozenset({group.nodes[2].me}),
        unclean_since=epoch,
        min_in_sync=1,
    )
    group.share_view()
    group.settle(2_000)
    group.restart(1)
    group.settle(2_000)
    expected = TEXTS[:20] if is_inside else TEXTS
    assert [node.bodies() for node in group.nodes[1:]] == [expected, expected]
    assert all(one.pack is None for one in group.nodes[1].engine.log.segments)


def test_an_unclean_cut_of_a_trim_empties_a_replica_whose_files_lost_entries() -> None:
    """The messages are live again, and the queue files of the replica do not have them."""
    group = group_of()
    group.set_members(0, 1, 2)
    for n in range(0, 60, 10):
        group.send(*TEXTS[n : n + 10], size=1_000)
        group.settle()
        checkpoint(group, group.nodes[1])
    lose(group, 2)
    purge(group, 50)
    drop_dead_entries(group.nodes[1].engine)
    for number in (0, 1):
        group.kill(number)
    group.restart(2)
    epoch, me = group.view.epoch + 1, group.nodes[2].me
    group.view = group.view._replace(
        epoch=epoch,
        version=group.view.version + 1,
        master=me,
        sss=frozenset({me}),
        unclean_since=epoch,
        min_in_sync=1,
    )
    group.share_view()
    group.settle(2_000)
    group.restart(1)
    group.settle(3_000)
    for node in group.nodes[1:]:
        assert node.bodies() == TEXTS, f"replica {node.number}"


def test_logs_with_other_records_have_other_digests() -> None:
    """No record of the second log begins where the digest of the first one begins."""
    logs = []
    for tag, sizes in (("a", [1_000, 900, 1_100, 1_000]), ("b", [970, 1_030, 950, 1_050])):
        group = Group(1, config=SMALL)
        group.elect(0)
        for n in range(100):
            group.send(f"{tag}{n:02}", size=sizes[n % 4])
        group.settle()
        logs.append(group.nodes[0].log)
    first, second = logs
    assert first.log_end == second.log_end
    digest = first.digest(0, first.log_end)
    assert digest is not None
    mine = second.digest(digest.begin, digest.end)
    assert mine is not None
    assert not digest.matches(mine)


def _is_sound(node: Node, log_offset: int) -> bool:
    try:
        node.engine.log.verify(LogOffset(log_offset))
    except CorruptStore:
        return False
    return True


@pytest.mark.parametrize("seed", seeds("packs in groups", 40))
def test_replicas_agree_with_any_packs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends, purges, packs at any replica, kills, power cuts, lost disks, an election (R-4)."""
    monkeypatch.setattr(dead_entries, "FREED_BYTES_MIN", 1)
    random = Random(seed)
    group = group_of()
    group.set_members(0, 1, 2)
    sent = low = 0
    for _ in range(60):
        up = [node for node in group.nodes if node.is_up]
        match random.randrange(8):
            case 0 | 1 | 2:
                count = random.randrange(1, 6)
                texts = [f"m{sent + n}" for n in range(count)]
                group.send(*texts, size=random.choice([0, 500, 2_000]))
                sent += count
                group.settle()
            case 3:
                low = max(low, random.randrange(sent + 1))
                if low:
                    purge(group, low)
            case 4 | 5:
                node = random.choice(up)
                pack_node(group, node)
                if random.random() < 0.5:
                    drop_dead_entries(node.engine)
            case 7 if len(up) > 1:
                move_floor(group, random.randrange(100))
            case 6:
                master = group.view.master
                assert master is not None
                others = [node for node in up if node.number != master.replica_id]
                down = [node for node in group.nodes if not node.is_up]
                if down:
                    if random.random() < 0.4:
                        down[0].disk = FaultyDisk(Random(seed))
                    group.restart(down[0].number)
                    if random.random() < 0.3:
                        # It ends in the middle of the copy, and the master's floor may move.
                        group.settle(50)
                        group.kill(down[0].number)
                        continue
                    group.settle(3_000)
                elif others:
                    node = random.choice(others)
                    lose(group, node.number, power_cut=random.random() < 0.5)
    for node in group.nodes:
        if not node.is_up:
            group.restart(node.number)
    group.settle(3_000)
    assert len({node.log.applied_offset for node in group.nodes}) == 1, "all have caught up"
    if random.random() < 0.5:
        group.elect(random.randrange(1, 3), 0, 1, 2)
        group.settle(1_000)
    expected = [f"m{n}" for n in range(low, sent)]
    for node in group.nodes:
        assert node.bodies() == expected, node.number
        assert node.log.log_end == group.nodes[0].log.log_end
