"""An engine whose log has replicas: what they store, apply and cut."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.worlds.engine_group import Group, Node
from tests.support.worlds.engine_world import SMALL
from tidemill.broker.engine.config import EngineConfig
from tidemill.broker.engine.layout import truncate_intent
from tidemill.broker.engine.layout.truncate_intent import LogCut
from tidemill.broker.engine.recovery import open_engine
from tidemill.broker.engine.replica.opening import FreshIdentity, open_replica_engine
from tidemill.broker.engine.replica.replica_files import FOLDER, INTENT
from tidemill.broker.engine.store.segment import CorruptStore, segment_name
from tidemill.broker.engine.time_search import TimeSearch


def founded(config: EngineConfig = SMALL) -> Group:
    group = Group(config=config)
    group.elect(0)
    group.set_members(0, 1, 2)
    return group


def test_replicas_apply_confirmed_records() -> None:
    group = founded()
    group.send("a", "b", "c")
    group.settle()
    assert [node.bodies() for node in group.nodes] == [["a", "b", "c"]] * 3
    master = group.nodes[0]
    assert {node.log.log_end for node in group.nodes} == {master.log.log_end}
    assert {node.log.confirm_offset for node in group.nodes} == {master.log.log_end}
    assert all(node.log.log_end == node.engine.log.committed_offset for node in group.nodes[1:])


def test_no_record_is_applied_before_it_is_confirmed() -> None:
    group = founded()
    group.send("a")
    group.settle()
    group.kill(2)
    group.send("b")
    group.settle(200)
    assert group.nodes[1].bodies() == ["a"]
    group.set_members(0, 1)
    assert group.nodes[1].bodies() == ["a", "b"]


def test_no_record_is_applied_before_it_is_durable_here() -> None:
    group = founded()
    group.send("a")
    group.settle()
    group.set_members(0, 1)
    group.send("b")
    for node in group.nodes[:2]:
        node.sync()
        node.replication.handle_progress(group.now_ms)
    learner = group.nodes[2]
    learner.log.confirm(learner.log.log_end)
    learner.apply()
    assert learner.bodies() == ["a"]
    learner.sync()
    learner.apply()
    assert learner.bodies() == ["a", "b"]


def test_an_elected_replica_needs_no_replay_and_the_others_follow_it() -> None:
    group = founded()
    group.send("a", "b")
    group.settle()
    group.kill(0)
    group.elect(1, 1, 2)
    group.send("c")
    group.settle()
    assert [group.nodes[n].bodies() for n in (1, 2)] == [["a", "b", "c"]] * 2
    group.restart(0)
    group.settle()
    assert group.nodes[0].bodies() == ["a", "b", "c"]


def test_a_new_master_with_an_earlier_clock_records_the_fall_of_times() -> None:
    group = founded()
    group.now_ms = 10_000_000
    group.send("a", "b")
    group.settle()
    group.kill(0)
    group.now_ms -= 3_600_000
    group.nodes[1].log.now_ms = group.now_ms
    group.elect(1, 1, 2)
    group.send("c", "d", "e")
    group.settle()
    engine = group.nodes[1].engine
    topic = engine.catalog.find_topic("orders")
    assert topic is not None
    search = TimeSearch(
        engine.store, engine.catalog.queues_of(topic), 9_000_000, falls=engine.catalog.clock_falls
    )
    while search.step():
        pass
    assert search.offsets == [0], "the first two were stored later"


def test_a_tail_that_the_new_master_does_not_have_is_cut() -> None:
    group = founded()
    group.send("a")
    group.settle()
    group.cut_off = {0}
    group.lose_streams(group.nodes[0])
    group.send("lost")
    group.nodes[0].sync()
    group.elect(1, 1, 2)
    group.send("b")
    group.settle()
    group.cut_off = set()
    group.share_view()
    group.settle(1_000)
    assert [node.bodies() for node in group.nodes] == [["a", "b"]] * 3
    group.kill(0, power_cut=True)
    group.restart(0)
    group.settle()
    assert group.nodes[0].bodies() == ["a", "b"]


def test_a_master_that_is_elected_again_continues() -> None:
    group = founded()
    group.send("a")
    group.settle()
    group.elect(0, 0, 1, 2)
    group.send("b")
    group.settle(1_000)
    assert [node.bodies() for node in group.nodes] == [["a", "b"]] * 3
    assert {node.engine.log.epoch for node in group.nodes} == {2}


def test_old_records_are_sent_in_small_parts() -> None:
    group = founded()
    group.send(*(f"m{n}" for n in range(30)), size=700_000)
    group.settle()
    log = group.nodes[0].log
    assert log.frame_at(0, 1 << 20) is not None
    log.frames.old_bytes_left = 1
    assert log.frame_at(0, 1 << 20) is not None
    assert log.frame_at(0, 1 << 20) is None
    newest = log.engine.log.segments[-1].start
    assert log.frame_at(newest, 1 << 20) is not None


def test_all_logs_have_the_same_segments() -> None:
    group = founded()
    group.send(*(f"m{n}" for n in range(40)), size=90_000)
    group.settle()
    texts = [f"m{n}" for n in range(40)]
    assert [node.bodies() for node in group.nodes] == [texts] * 3
    starts = [[segment.start for segment in node.engine.log.segments] for node in group.nodes]
    assert len(starts[0]) > 3
    assert starts == [starts[0]] * 3


def test_a_restarted_replica_continues_at_the_end_of_its_files() -> None:
    group = founded()
    group.send(*(f"m{n}" for n in range(30)), size=20_000)
    group.settle()
    replica = group.nodes[1]
    for files in replica.engine.checkpoints.write():
        for file in files:
            file.sync()
    group.send("x")
    group.settle()
    group.kill(1)
    group.send("y")
    group.restart(1)
    group.settle(1_000)
    assert replica.report.snapshot
    group.set_members(0, 1, 2)
    assert replica.bodies() == [*(f"m{n}" for n in range(30)), "x", "y"]


def test_an_empty_replica_is_copied_from_the_begin_of_the_log() -> None:
    group = founded()
    group.send(*(f"m{n}" for n in range(30)), size=90_000)
    group.settle()
    group.kill(2)
    group.set_members(0, 1)
    master = group.nodes[0].engine
    for _ in range(2):
        for files in master.checkpoints.write():
            for file in files:
                file.sync()
            group.settle(100)
        for files in master.retention.retire_oldest(group.now_ms):
            for file in files:
                file.sync()
            if master.log.log_end > master.log.written_offset:
                master.write(group.now_ms)
            group.settle(100)
    assert master.log.min_offset > 0
    replica = group.nodes[1]
    replica.log.follow_floor(group.nodes[0].log.log_min, group.nodes[0].log.confirm_offset)
    for _ in range(1_000):
        step = replica.engine.background.step(group.now_ms, firing_ms=group.now_ms)
        for file in step or ():
            file.sync()
    assert replica.log.log_min == master.log.min_offset
    assert replica.bodies() == group.nodes[0].bodies()
    group.nodes[2].disk = FaultyDisk(Random(2))
    group.restart(2)
    group.settle(1_000)
    assert group.nodes[2].log.log_min == master.log.min_offset
    assert group.nodes[2].bodies() == group.nodes[0].bodies()
    group.kill(0)
    group.set_members(1, 2)
    group.elect(2, 1, 2)
    group.send("z")
    group.settle()
    assert group.nodes[1].bodies()[-1] == "z"


def test_a_full_replica_deletes_the_segments_that_its_master_deleted() -> None:
    group = founded(replace(SMALL, disk_reserve_bytes=32 << 20))
    group.send(*(f"m{n}" for n in range(30)), size=90_000)
    group.settle()
    replica = group.nodes[1]
    for files in replica.engine.checkpoints.write():
        for file in files:
            file.sync()
    replica.engine.retention.retention_ms = 0
    used = replica.disk.capacity_bytes - replica.disk.free_bytes()
    replica.disk.capacity_bytes = used + (512 << 10)  # less than the reserve of derived files
    log_end = replica.log.log_end
    for floor in (0, replica.engine.log.segments[0].end):
        replica.log.follow_floor(floor, 0)
        for _ in range(100):
            group.now_ms += 1_000
            step = replica.engine.background.step(group.now_ms, firing_ms=group.now_ms)
            for file in step or ():
                file.sync()
        assert replica.log.log_min == floor
        assert replica.log.log_end == log_end


def test_a_start_completes_an_interrupted_cut() -> None:
    group = founded()
    group.send("a")
    group.settle()
    replica = group.nodes[1]
    cut = replica.log.log_end
    group.kill(2)
    group.send(*(f"m{n}" for n in range(30)), size=90_000)
    replica.sync()
    assert len(replica.engine.log.segments) > 2
    file = replica.disk.open(INTENT, create=True)
    expected = LogCut(cut, epoch=3, size_bytes=900, records=2, confirmed_bytes=0)
    file.write_at(0, [truncate_intent.encode(expected)])
    file.sync()
    replica.disk.folder(FOLDER).sync()
    group.kill(1, power_cut=True)
    group.cut_off = {1}
    group.restart(1)
    assert replica.log.log_end == cut
    group.cut_off = set()
    assert replica.disk.read(INTENT) is None
    assert replica.log.cut == expected, "it may be unreported"
    group.settle(1_000)
    assert replica.log.log_end == group.nodes[0].log.log_end


def test_the_store_of_a_single_broker_founds_a_group_above_its_epochs() -> None:
    disk, config = FaultyDisk(Random(0)), EngineConfig()
    for _ in range(3):
        engine, _ = open_engine(disk, config, now_ms=0, entropy=bytes(32))
        engine.close()
    fresh = FreshIdentity(bytes(16), bytes(32))
    log, _ = open_replica_engine(disk, config, now_ms=0, fresh=fresh)
    assert (log.epoch_seen, log.epoch_alone) == (0, 3)
    log.save_epoch_seen(4)
    assert (log.epoch_seen, log.epoch_alone) == (4, 0)
    log.engine.close()


def test_the_epochs_of_a_single_broker_do_not_count_in_a_group_that_it_meets() -> None:
    """The store was started as a replica of a group. The lower epoch of that group goes on."""
    disk, config = FaultyDisk(Random(0)), EngineConfig()
    for _ in range(3):
        engine, _ = open_engine(disk, config, now_ms=0, entropy=bytes(32))
        engine.close()
    fresh = FreshIdentity(bytes(16), bytes(32))
    log, _ = open_replica_engine(disk, config, now_ms=0, fresh=fresh)
    log.save_epoch_seen(1)
    assert log.epoch_seen == 1
    log.engine.close()


def test_damaged_records_of_the_master_are_not_sent() -> None:
    group = founded()
    group.send(*(f"m{n}" for n in range(30)), size=90_000)
    group.settle()
    master = group.nodes[0]
    for files in master.engine.checkpoints.write():
        for file in files:
            file.sync()
        group.settle(100)
    group.kill(0)
    damage(master)
    master.start()
    offset, sent = 0, 0
    while (frame := master.log.frame_at(offset, 1)) is not None:
        offset, sent = frame.end, sent + 1
    assert sent < 10
    assert "is damaged at byte" in master.log.frames.damage


def test_damage_to_confirmed_records_is_not_a_torn_tail() -> None:
    group = founded()
    group.send(*(f"m{n}" for n in range(30)), size=90_000)
    group.settle()
    replica = group.nodes[1]
    assert replica.log.files.request_confirm(replica.log.confirm_offset)
    for file in replica.log.begin_sync():
        file.sync()
    group.kill(1)
    damage(replica)
    with pytest.raises(CorruptStore, match="is damaged at byte"):
        replica.start()


def damage(node: Node) -> None:
    """Change a byte of a message that is in all logs."""
    file = node.disk.open(segment_name(0))
    file.write_at(1_000, [b"?"])
    file.sync()
