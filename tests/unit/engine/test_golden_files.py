"""The bytes on disk: this build reads the golden files and writes the same bytes.

A golden file may be made again only while no release exists. After the first release, a changed
format gets a new version, keeps its reader and adds a file.
`python -m tests.unit.engine.test_golden_files` makes missing files.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from zlib import crc32

import pytest

from tests.support.audit_changes import change_of, put_topic, records_of
from tests.support.bodies import body_of
from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.disk.log_checker import check_log
from tests.support.disk.timer_log_fold import CANCELLED, DROPPED, PENDING
from tests.support.security_items import MODE_ON, change, delete, put, table_of
from tests.support.worlds.dedup_world import DedupWorld
from tests.support.worlds.engine_world import GROUP, SMALL, TOPIC, World, blob
from tests.support.worlds.letter_world import LetterWorld
from tests.support.worlds.packed_worlds import move_floor, pack_all
from tests.support.worlds.timer_bulk_world import CANCEL as CANCEL_TIMERS
from tests.support.worlds.timer_bulk_world import FIRE as FIRE_TIMERS
from tests.support.worlds.timer_bulk_world import RESCHEDULE as RESCHEDULE_TIMERS
from tests.support.worlds.timer_bulk_world import TimerBulkWorld
from tests.support.worlds.timer_world import HOUR_MS, TIMERS, TimerWorld
from tests.support.worlds.transaction_world import TransactionWorld
from tidemill.broker.engine.configuration.administration import ResetTarget
from tidemill.broker.engine.layout import (
    message,
    pop_checkpoint,
    record,
    store_checkpoint,
    timer_checkpoint,
    timer_entry,
    timer_record,
)
from tidemill.broker.engine.layout.message import Reason
from tidemill.broker.engine.layout.numbers import HalfId, LogOffset, QueueId, TimerId, TopicId
from tidemill.broker.engine.layout.operation import OperationKind, OperationState
from tidemill.broker.engine.layout.record import RecordHeader, RecordKind
from tidemill.broker.engine.layout.transaction import TransactionState
from tidemill.broker.engine.metadata.catalog import ExponentialRetry
from tidemill.broker.engine.metadata.dedup_policy import DedupMode
from tidemill.broker.engine.metadata.transaction_policy import PolicyChange
from tidemill.broker.engine.pop.deliveries import AckResult
from tidemill.broker.engine.store.disk import File
from tidemill.broker.engine.timer.status import TimerState
from tidemill.broker.engine.timer.wheel import TimerWheel
from tidemill.common.feature_level import FIRST_LEVEL
from tidemill.message import stored_message
from tidemill.message.receipt_handle import HandleFields, HandleSigner

FOLDER = Path(__file__).parent / "golden"
START_MS = 1_700_000_000_000
SEGMENT = 16_384

HANDLES = [
    (GROUP, TOPIC, HandleFields(0, 0, 0, 0)),
    (GROUP, TOPIC, HandleFields(7, 4_096, START_MS, 31)),
    ("%RETRY%g", "a|b", HandleFields(2**32 - 1, 2**63, 2**62, 16)),
]
MESSAGE = blob("the body", message_id="0123", tag="tag", keys=("key-1", "key-2"))


def sync(files: list[object]) -> None:
    for file in files:
        file.sync()  # type: ignore[attr-defined]  # a file of a FaultyDisk


@cache
def history() -> dict[str, bytes]:
    """Write a store with every kind of record, and return its files by golden name."""
    world = World(
        FaultyDisk(Random(0)),
        now_ms=START_MS,
        feature_level=FIRST_LEVEL,
        segment_bytes=SEGMENT,
        deliveries_max=1_000,
    )
    engine = world.engine
    world.group(max_attempts=2, customized_ms=(1_000, 5_000))
    retry = ExponentialRetry(initial_ms=500, max_ms=60_000, multiplier=1.5)
    world.group("fifo", is_ordered=True, exponential=retry)
    world.topic(queues=2)
    for n in range(12):
        data = blob(f"m{n}", tag="ab"[n // 2 % 2], keys=("k",) * (n % 3))
        engine.commands.send(
            TopicId(world.topic()),
            QueueId(n % 2),
            data,
            crc32(data),
            now_ms=world.now_ms,
            firing_ms=world.now_ms,
        )
    world.commit()
    gaps = world.pop(2, tags=("a",), invisible_ms=1_000)
    rest = world.pop(4, invisible_ms=600_000)
    ordered = world.pop(3, group="fifo", invisible_ms=600_000, attempt_id="attempt-1")
    world.ack(rest[0], ordered[1])
    world.change(rest[1], 900_000, suspend=True)
    world.change(ordered[0], 700_000)
    world.advance(1_000)
    world.pop(invisible_ms=1_000)
    world.advance(1_000)
    engine.commands.dead_letter(rest[2].delivery, world.now_ms)
    world.pop(1, group="resetter")
    engine.administration.reset_offset("resetter", TOPIC, ResetTarget(offset=3), world.now_ms)
    world.topic("gone")
    engine.administration.delete_topic("gone", world.now_ms)
    world.commit()
    assert len(gaps) == 2
    for files in engine.checkpoints.write():
        sync(list(files))
    found = {
        f"{folder}.bin": world.disk.read(world.disk.names(folder)[0]) or b""
        for folder in ("queues", "index", "snapshots")
    }
    found["checkpoint.bin"] = world.disk.read("checkpoint") or b""
    while len(engine.log.segments) < 2:
        world.send("filler", topic="filler", size=3_000)
    # Pretend that a later checkpoint exists: only then retention may drop a segment.
    engine.store.derived_offset = engine.log.committed_offset
    segments: dict[str, bytes] = {}
    for files in engine.retention.retire_oldest(world.now_ms):
        sync(list(files))
        world.commit()
        for segment in engine.log.segments:
            segments[segment.name] = bytes(engine.mappings[segment.name])
    found["log.bin"] = b"".join(data for _, data in sorted(segments.items()))
    signer = HandleSigner(bytes(range(32)), "broker-0")
    handles = [
        signer.sign(
            group,
            topic,
            slot=one.slot,
            delivery_id=one.delivery_id,
            visible_at_ms=one.visible_at_ms,
        ).handle(one.message_index)
        for group, topic, one in HANDLES
    ]
    return found | {"stored_message.bin": MESSAGE, "receipt_handles.bin": b"\n".join(handles)}


@cache
def timer_history() -> dict[str, bytes]:
    """Write a store with timers in every state, and return its files by golden name."""
    world = TimerWorld(
        FaultyDisk(Random(0)),
        now_ms=START_MS,
        feature_level=FIRST_LEVEL,
        segment_bytes=TIMER_SEGMENT,
    )
    engine = world.engine
    world.topic(queues=2)
    for n in range(6):
        schedule(world, f"m{n}", (n + 2) * 1_000, queue_id=n % 2, keys=("k",))
    schedule(world, "parked", 30 * 24 * 3_600_000)
    schedule(world, "moved", 500_000)
    schedule(world, "gone", 9_000, topic="gone")
    world.cancel(1)
    world.reschedule(7, world.now_ms + 600_000)
    engine.administration.delete_topic("gone", world.now_ms)
    world.commit()
    world.sleep(5_000)
    # Pretend that retention is near: the copies go to another segment.
    while len(engine.log.segments) < 2:
        world.send("filler", topic="filler", size=3_000)
    engine.timers.evacuation._is_due = lambda _now_ms: True
    world.sleep(4_000)
    engine.timers.evacuation._is_due = lambda _now_ms: False
    for files in engine.timers.flusher.flush(
        world.now_ms, engine.timers.recovery.store_uuid, iter_nothing
    ):
        sync(list(files))
    schedule(world, "after", 40_000)
    world.cancel(9)
    for files in engine.timers.flusher.flush(
        world.now_ms, engine.timers.recovery.store_uuid, iter_nothing
    ):
        sync(list(files))
    world.judge()
    disk = world.disk
    return {golden_name: disk.read(name) or b"" for golden_name, name in TIMER_FILES.items()} | {
        "timer_commit_log.bin": b"".join(disk.read(name) or b"" for name in disk.names("log"))
    }


@cache
def two_lives_history() -> dict[str, bytes]:
    """Write a log of two starts, with records that the first history cannot have.

    The second start brings back deliveries that were popped in its future. It also evacuates a
    delayed message that is larger than its segments.
    """
    world = TimerWorld(
        FaultyDisk(Random(0)),
        now_ms=START_MS,
        feature_level=FIRST_LEVEL,
        segment_bytes=FIRST_LIFE_SEGMENT,
    )
    world.group()
    world.schedule("large", delay_ms=30 * 24 * 3_600_000, size=SECOND_LIFE_SEGMENT + 1_000)
    world.send("popped")
    world.now_ms += 3_600_000
    world.pop(1, invisible_ms=30_000)
    world.now_ms -= 3_600_000
    world = TimerWorld(
        world.disk.after_kill(),
        now_ms=world.now_ms,
        feature_level=FIRST_LEVEL,
        segment_bytes=SECOND_LIFE_SEGMENT,
        before=world,
    )
    # The model accepts the intact parts of a message that cannot be copied.
    world.fold.timers.quarantined.add(0)
    while len(world.engine.log.segments) < 2:
        world.send("filler", topic="filler", size=3_000)
    world.engine.timers.evacuation._is_due = lambda _now_ms: True
    world.sleep(4_000)
    disk = world.disk
    names = [name for name in disk.names("log") if not name.endswith("/prepared")]
    return {"two_lives_log.bin": b"".join(disk.read(name) or b"" for name in names)}


def released_history() -> dict[str, bytes]:
    """Write a log with a batch of an ordered queue that an operator releases."""
    world = World(
        FaultyDisk(Random(0)),
        now_ms=START_MS,
        feature_level=FIRST_LEVEL,
        segment_bytes=RELEASED_SEGMENT,
    )
    world.group(is_ordered=True)
    world.send("m0", "m1", "m2")
    world.pop(2, invisible_ms=3_600_000)
    world.release_lock()
    return {"released_log.bin": world.disk.read(world.disk.names("log")[0]) or b""}


def renewed_history() -> dict[str, bytes]:
    """Write a log with clients that renew their deliveries, fall silent and end.

    An operator releases a batch, so the log has a row with a holder.
    """
    world = World(
        FaultyDisk(Random(0)),
        now_ms=START_MS,
        feature_level=FIRST_LEVEL,
        segment_bytes=RENEWED_SEGMENT,
    )
    world.group()
    world.group("fifo", is_ordered=True)
    world.send("m0", "m1", "m2")
    for client_id in ("lives", "falls silent", "ends"):
        world.pop(1, invisible_ms=60_000, client_id=client_id, renews=True)
    world.pop(1, group="fifo", invisible_ms=3_600_000, client_id="hangs", renews=True)
    world.release_lock(group="fifo")
    world.end("ends")
    for _ in range(13):
        world.alive("lives", "hangs")
        world.advance(10_000)
    return {"renewed_log.bin": world.disk.read(world.disk.names("log")[0]) or b""}


def pulled_history() -> dict[str, bytes]:
    """Write a log with pull offsets of a group, and of a group that is deleted."""
    world = World(
        FaultyDisk(Random(0)),
        now_ms=START_MS,
        feature_level=FIRST_LEVEL,
        segment_bytes=PULLED_SEGMENT,
    )
    topic_id = world.topic(queues=2)
    world.send("m0", "m1", "m2")
    for group, offset in (("pulls", 1), ("goes", 2), ("pulls", 3)):
        world.engine.administration.update_pull_offset(
            world.group(group), topic_id, QueueId(0), offset, world.now_ms
        )
        world.commit()
    world.engine.administration.delete_group("goes", world.now_ms)
    world.commit()
    return {"pulled_log.bin": world.disk.read(world.disk.names("log")[0]) or b""}


def forgotten_history() -> dict[str, bytes]:
    """Write a log with two pull offsets. The first one is deleted."""
    world = World(
        FaultyDisk(Random(0)),
        now_ms=START_MS,
        feature_level=FIRST_LEVEL,
        segment_bytes=PULLED_SEGMENT,
    )
    group_id, topic_ids = world.group("pulls"), [world.topic(), world.topic("kept")]
    for topic_id in topic_ids:
        world.engine.administration.update_pull_offset(
            group_id, topic_id, QueueId(0), 0, world.now_ms
        )
    world.engine.administration.forget_pull_offsets(group_id, topic_ids[0], world.now_ms)
    world.commit()
    return {"forgotten_log.bin": world.disk.read(world.disk.names("log")[0]) or b""}


def purged_history() -> dict[str, bytes]:
    """Write a log of feature level 2 with a purge, and a snapshot with the low of the queue."""
    world = World(
        FaultyDisk(Random(0)), now_ms=START_MS, feature_level=2, segment_bytes=PURGED_SEGMENT
    )
    world.group()
    world.send("m0", "m1", "m2", "m3")
    world.pop(1, invisible_ms=3_600_000)
    world.purge(low=3)
    world.checkpoint()
    disk = world.disk
    [snapshot] = disk.names("snapshots")
    return {
        "purged_log.bin": disk.read(disk.names("log")[0]) or b"",
        "purged_snapshot.bin": disk.read(snapshot) or b"",
    }


def secured_history() -> dict[str, bytes]:
    """Write a log of feature level 3 with security items, and a snapshot with them."""
    world = World(
        FaultyDisk(Random(0)), now_ms=START_MS, feature_level=3, segment_bytes=SECURED_SEGMENT
    )
    kinds = "user", "role", "token", "quota", "ban"
    change(world, *(put("kept", "a text", kind=kind) for kind in kinds), MODE_ON)
    change(world, *(put("gone", kind=kind) for kind in kinds))
    change(world, *(delete("gone", kind=kind) for kind in kinds))
    world.checkpoint()
    disk = world.disk
    [snapshot] = disk.names("snapshots")
    return {
        "secured_log.bin": disk.read(disk.names("log")[0]) or b"",
        "secured_snapshot.bin": disk.read(snapshot) or b"",
    }


def audited_history() -> dict[str, bytes]:
    """Write a log of feature level 3 with an audit log and its restatement, and a snapshot."""
    world = World(
        FaultyDisk(Random(0)), now_ms=START_MS, feature_level=3, segment_bytes=SECURED_SEGMENT
    )
    put_topic(world, "orders", 4, after={"queues": 4})
    put_topic(world, "orders", 8, before={"queues": 4}, after={"queues": 8})
    world.engine.fold.record_audit(change_of("Replica:r", result="begun"), world.now_ms)
    world.commit()
    for files in world.engine.retention._restatement.restate(
        world.engine.log.log_end, world.now_ms
    ):
        sync(list(files))
    world.commit()
    world.checkpoint()
    disk = world.disk
    [snapshot] = disk.names("snapshots")
    return {
        "audited_log.bin": disk.read(disk.names("log")[0]) or b"",
        "audited_snapshot.bin": disk.read(snapshot) or b"",
    }


def transacted_history() -> dict[str, bytes]:
    """Write a log of feature level 4 with transactions in each state, and a snapshot with them."""
    world = TransactionWorld(
        FaultyDisk(Random(0)), now_ms=START_MS, feature_level=4, segment_bytes=SECURED_SEGMENT
    )
    world.set_policy(PolicyChange(first_check_ms=1_000, period_ms=2_000, attempts=1))
    for text in ("committed", "rolled back", "delayed", "expired", "recovered"):
        due_at_ms = START_MS + 3_600_000 if text == "delayed" else 0
        half_id = world.half(text, due_at_ms=due_at_ms)
        if text == "rolled back":
            world.roll_back(half_id)
        elif text in {"committed", "delayed"}:
            world.commit_half(half_id)
        else:
            world.advance(1_100)
            world.write_checks()
            world.advance(2_100)
        if text == "recovered":
            world.recover(half_id)
    world.half("open", first_check_ms=3_600_000)
    for _ in world.engine.half_checks.restate(world.engine.log.log_end, world.now_ms):
        pass
    world.commit()
    world.checkpoint()
    disk = world.disk
    [snapshot] = disk.names("snapshots")
    return {
        "transacted_log.bin": disk.read(disk.names("log")[0]) or b"",
        "transacted_snapshot.bin": disk.read(snapshot) or b"",
    }


def keyed_history() -> dict[str, bytes]:
    """Write a log of feature level 4 with dedup keys in each state, and a snapshot with them."""
    world = DedupWorld(
        FaultyDisk(Random(0)), now_ms=START_MS, feature_level=4, segment_bytes=SECURED_SEGMENT
    )
    world.set_policy(PolicyChange(first_check_ms=1_000, period_ms=2_000, attempts=1))
    world.turn_on()
    world.turn_on(topic="debounce", mode=DedupMode.REPLACE, max_wait_ms=3_600_000)
    world.store("plain", key="plain")
    for n in range(2):
        due_at_ms = START_MS + (n + 1) * 60_000
        world.store(f"delayed {n}", key="delayed", topic="debounce", due_at_ms=due_at_ms)
    half = world.store("half", key="half", is_half=True)
    world.advance(1_100)
    world.write_checks()
    world.advance(2_100)
    world.recover(HalfId(half.half_id))
    world.store("freed", key="freed")
    topic = world.engine.catalog.find_topic(TOPIC)
    assert topic is not None
    keys = world.engine.key_inspection
    keys.free(topic, keys.find(topic, b"freed", ""), world.now_ms)
    for _ in world.engine.retention._restatement._restate_keys(
        world.engine.log.log_end, world.now_ms
    ):
        pass
    world.commit()
    world.checkpoint()
    disk = world.disk
    [snapshot] = disk.names("snapshots")
    return {
        "keyed_log.bin": disk.read(disk.names("log")[0]) or b"",
        "keyed_snapshot.bin": disk.read(snapshot) or b"",
    }


def replayed_history() -> dict[str, bytes]:
    """Write a log of feature level 5 with settled dead letters, and a snapshot with them."""
    world = LetterWorld(
        FaultyDisk(Random(0)), now_ms=START_MS, feature_level=5, segment_bytes=SECURED_SEGMENT
    )
    world.topic(TOPIC)
    world.dead("a", "b", "c", "d", max_attempts=2)
    world.replay(0)
    world.pop(1, invisible_ms=1_000)
    world.advance(1_000)
    world.fail(*world.pop(1))
    world.discard(1, 2)
    world.replay(4)
    world.dead("e", "f")
    for kind, tag in ((OperationKind.REPLAY, "none"), (OperationKind.DISCARD, "")):
        world.begin_operation(kind, tag=tag)
        for _ in range(2):
            world.advance(100)
    restatement = world.engine.retention._restatement
    for _ in restatement._restate_letters(world.engine.log.log_end, world.now_ms):
        pass
    for stated in world.engine.catalog.operations.stated_before(
        world.engine.log.log_end, world.now_ms
    ):
        world.engine.fold.append(stated, world.now_ms)
    world.commit()
    world.checkpoint()
    disk = world.disk
    [snapshot] = disk.names("snapshots")
    return {
        "replayed_log.bin": disk.read(disk.names("log")[0]) or b"",
        "replayed_snapshot.bin": disk.read(snapshot) or b"",
    }


def bulk_timer_history() -> dict[str, bytes]:
    """Write a log of feature level 5 with operations on timers, and a snapshot with them."""
    world = TimerBulkWorld(
        FaultyDisk(Random(0)), now_ms=START_MS, feature_level=5, segment_bytes=SECURED_SEGMENT
    )
    for n in range(4):
        world.delay(f"m{n}", world.now_ms + HOUR_MS, keys=(f"k{n}",))
    world.reschedule(1, world.now_ms + TIMERS.max_delay_ms - 1_000)
    world.run_operation(world.begin_timers(RESCHEDULE_TIMERS, shift_ms=60_000))
    world.run_operation(world.begin_timers(CANCEL_TIMERS, key="k0"))
    world.begin_timers(FIRE_TIMERS)
    for stated in world.engine.catalog.operations.stated_before(
        world.engine.log.log_end, world.now_ms
    ):
        world.engine.fold.append(stated, world.now_ms)
    world.commit()
    world.checkpoint()
    disk = world.disk
    [snapshot] = disk.names("snapshots")
    return {
        "bulk_timers_log.bin": disk.read(disk.names("log")[0]) or b"",
        "bulk_timers_snapshot.bin": disk.read(snapshot) or b"",
    }


def packed_history() -> dict[str, bytes]:
    """Write a log with a pack: three stubs, a kept message between them, and deliveries."""
    world = World(
        FaultyDisk(Random(0)), now_ms=START_MS, feature_level=2, segment_bytes=PACKED_SEGMENT
    )
    for n in range(4):
        world.send(f"gone {n}", topic="gone", size=3_000)
        if n == 1:
            world.send("kept", topic="kept")
            world.pop(1, topic="gone", invisible_ms=3_600_000)
    while len(world.engine.log.segments) < 3:
        world.send("filler", topic="filler", size=3_000)
    world.purge("gone")
    assert pack_all(world) == 1
    disk = world.disk
    [name] = [name for name in disk.names("log") if name.endswith(".pack")]
    rest = [name for name in disk.names("log") if name.endswith(".log")]
    return {
        "packed_segment.bin": disk.read(name) or b"",
        "packed_rest.bin": b"".join(disk.read(one) or b"" for one in rest),
    }


PULLED_SEGMENT = PURGED_SEGMENT = 4_096
SECURED_SEGMENT = 8_192
PACKED_SEGMENT = 16_384
RELEASED_SEGMENT = RENEWED_SEGMENT = 4_096
FIRST_LIFE_SEGMENT, SECOND_LIFE_SEGMENT = 32_768, 8_192


def schedule(
    world: TimerWorld,
    text: str,
    delay_ms: int,
    *,
    topic: str = TOPIC,
    queue_id: int = 0,
    keys: tuple[str, ...] = (),
) -> None:
    """Schedule a message of a topic type that `Commands.send` stores at once, as in the files."""
    data = blob(text, keys=keys)
    topic_id, now_ms, engine = world.topic(topic), world.now_ms, world.engine
    engine.timers.commands.schedule(
        engine.catalog.topics[topic_id],
        QueueId(queue_id),
        data,
        crc32(data),
        due_at_ms=now_ms + delay_ms,
        now_ms=now_ms,
        firing_ms=now_ms,
    )
    world.commit()


def iter_nothing() -> Iterator[list[File]]:
    return iter(())


TIMER_SEGMENT = 8_192
TIMER_FILES = {
    "timer_wheel.bin": "timer/wheel",
    "timer_timerlog.bin": "timer/timerlog/00000000000000000000",
    "timer_checkpoint_a.bin": "timer/checkpoint.a",
    "timer_checkpoint_b.bin": "timer/checkpoint.b",
    "timer_state.bin": "timer/state/00000000000000000000",
}
TIMER_NAMES = [*TIMER_FILES, "timer_commit_log.bin"]


NAMES = [
    "checkpoint.bin",
    "index.bin",
    "log.bin",
    "queues.bin",
    "receipt_handles.bin",
    "snapshots.bin",
    "stored_message.bin",
]


def golden(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


def changed_files(written: dict[str, bytes]) -> list[str]:
    """Return the names of the written files that differ from the golden ones.

    A test compares names, since pytest takes minutes to show how two long files differ.
    """
    return [name for name, content in written.items() if content != golden(name)]


def golden_log_disk(name: str) -> FaultyDisk:
    """Return a disk with one file: a golden log of one segment."""
    disk = FaultyDisk(Random(0))
    file = disk.open(f"log/{0:020d}.log", create=True)
    file.write_at(0, [golden(name)])
    file.sync()
    disk.sync_folder(".")
    return disk


@pytest.mark.parametrize("name", NAMES)
def test_the_encoders_write_the_golden_bytes(name: str) -> None:
    assert history()[name] == golden(name)


@pytest.mark.parametrize("name", TIMER_NAMES)
def test_the_encoders_write_the_golden_bytes_of_timers(name: str) -> None:
    assert timer_history()[name] == golden(name)


def golden_timer_disk(*, with_timer_files: bool) -> FaultyDisk:
    disk = FaultyDisk(Random(0))
    data = golden("timer_commit_log.bin")
    files = {
        f"log/{start:020d}.log": data[start : start + TIMER_SEGMENT]
        for start in range(0, len(data), TIMER_SEGMENT)
    }
    if with_timer_files:
        files |= {name: golden(golden_name) for golden_name, name in TIMER_FILES.items()}
    for name, content in files.items():
        file = disk.open(name, create=True)
        file.write_at(0, [content])
        file.sync()
    disk.sync_folder(".")
    return disk


def test_an_engine_continues_with_the_golden_timers() -> None:
    """With their files and without them. No snapshot names the store, so it replays everything."""
    for with_timer_files in (False, True):
        world = TimerWorld(
            golden_timer_disk(with_timer_files=with_timer_files),
            segment_bytes=TIMER_SEGMENT,
            now_ms=START_MS + 9_000,
        )
        world.check()
        states = {n: one.state for n, one in world.timers.timers.items()}
        assert states[1] == CANCELLED
        assert states[8] == DROPPED
        assert {n for n, state in states.items() if state == PENDING} == {6, 7}
        assert world.timers.timers[6].copies == 1
        world.advance(31 * 24 * 3_600_000)
        assert world.texts()[-2:] == ["moved", "parked"]
        world.check()


def test_the_golden_files_of_timers_are_intact() -> None:
    disk = golden_timer_disk(with_timer_files=True)
    a = timer_checkpoint.find(disk.read("timer/checkpoint.a"))
    b = timer_checkpoint.find(disk.read("timer/checkpoint.b"))
    assert a is not None
    assert b is not None
    assert {a.generation, b.generation} == {1, 2}
    newest = max(a, b, key=lambda one: one.generation)
    wheel = TimerWheel(disk, slot_count=TIMERS.wheel_slots)
    wheel.load(
        position_min=0,
        position_max=newest.timer_log_position,
        hand_s=newest.hand_ms // 1000,
        used_count=newest.slots_used,
    )
    kinds = 0
    log = golden("timer_timerlog.bin")
    for at in range(0, newest.timer_log_position, timer_record.SIZE):
        found = timer_record.find(log, at)
        assert found is not None
        kinds |= found.magic & 0xFFFFFF
    assert kinds == (
        timer_record.SCHEDULE
        | timer_record.PARKED
        | timer_record.CANCEL
        | timer_record.RESCHEDULED_IN
        | timer_record.RESCHEDULED_OUT
    )
    table = golden("timer_state.bin")
    entries = [timer_entry.read(bytearray(table), n * timer_entry.SIZE) for n in range(10)]
    assert {entry.state for entry in entries} == set(TimerState) - {
        TimerState.UNUSED,
        TimerState.FORGOTTEN,
    }


def test_the_encoders_write_the_golden_bytes_of_two_starts() -> None:
    assert two_lives_history() == {"two_lives_log.bin": golden("two_lives_log.bin")}


def test_an_engine_continues_with_the_golden_log_of_two_starts() -> None:
    disk, data = FaultyDisk(Random(0)), golden("two_lives_log.bin")
    starts = [0, *range(FIRST_LIFE_SEGMENT, len(data), SECOND_LIFE_SEGMENT)]
    for start, end in zip(starts, [*starts[1:], len(data)], strict=True):
        file = disk.open(f"log/{start:020d}.log", create=True)
        file.write_at(0, [data[start:end]])
        file.sync()
    disk.sync_folder(".")
    world = World(disk, segment_bytes=FIRST_LIFE_SEGMENT, timer=TIMERS, now_ms=START_MS + 10_000)
    timers = world.engine.timers
    entry = timers.index.get(TimerId(0))
    assert entry.state == TimerState.PENDING
    original = timers.bodies.read(TimerId(0), entry)
    assert body_of(original.blob).startswith(b"large"), "its original is whole"
    assert entry.log_offset > FIRST_LIFE_SEGMENT, "its intact parts are in the second segment"
    assert 0 < world.engine.catalog.brought_back_before < FIRST_LIFE_SEGMENT
    assert len(world.engine.catalog.clock_falls) == 1
    assert world.bodies() == [], "brought back, and hidden for its invisible duration"
    world.advance(30_000)
    assert world.bodies() == ["popped"]


def test_the_encoders_write_the_golden_bytes_of_a_release() -> None:
    assert released_history() == {"released_log.bin": golden("released_log.bin")}


def test_an_engine_continues_with_the_golden_log_of_a_release() -> None:
    disk = golden_log_disk("released_log.bin")
    world = World(disk, segment_bytes=RELEASED_SEGMENT, now_ms=START_MS + 1_000)
    assert [(one.body, one.attempt) for one in world.pop()] == [("m0", 2), ("m1", 1), ("m2", 1)]


def test_the_encoders_write_the_golden_bytes_of_pulls() -> None:
    assert pulled_history() == {"pulled_log.bin": golden("pulled_log.bin")}


def test_an_engine_continues_with_the_golden_log_of_pulls() -> None:
    disk = golden_log_disk("pulled_log.bin")
    world = World(disk, segment_bytes=PULLED_SEGMENT, now_ms=START_MS + 1_000)
    key = world.group("pulls"), world.topic(), QueueId(0)
    assert world.engine.catalog.pull_offsets.all == {key: 3}


def test_the_encoders_write_the_golden_bytes_of_a_deleted_pull_offset() -> None:
    assert forgotten_history() == {"forgotten_log.bin": golden("forgotten_log.bin")}


def test_an_engine_continues_with_the_golden_log_of_a_deleted_pull_offset() -> None:
    disk = golden_log_disk("forgotten_log.bin")
    world = World(disk, segment_bytes=PULLED_SEGMENT, now_ms=START_MS + 1_000)
    key = world.group("pulls"), world.topic("kept"), QueueId(0)
    assert world.engine.catalog.pull_offsets.all == {key: 0}


def test_the_encoders_write_the_golden_bytes_of_renewals() -> None:
    assert renewed_history() == {"renewed_log.bin": golden("renewed_log.bin")}


def test_an_engine_continues_with_the_golden_log_of_renewals() -> None:
    disk = golden_log_disk("renewed_log.bin")
    world = World(disk, segment_bytes=RENEWED_SEGMENT, now_ms=START_MS + 131_000)
    assert sorted((one.body, one.attempt) for one in world.pop()) == [("m1", 2), ("m2", 2)]
    table = world.engine.state.table
    holders = {table.client_of(slot).client_id for slot in table.in_use(0, len(table.ids)).tolist()}
    assert holders >= {"lives", "hangs"}
    world.advance(300_000)
    world.advance(1_000)
    assert ("m0", 2) in [(one.body, one.attempt) for one in world.pop()]


def test_the_encoders_write_the_golden_bytes_of_a_purge() -> None:
    assert changed_files(purged_history()) == []


def test_an_engine_continues_with_the_golden_log_of_a_purge() -> None:
    disk = golden_log_disk("purged_log.bin")
    world = World(disk, segment_bytes=PURGED_SEGMENT, now_ms=START_MS + 1_000)
    assert world.bodies() == ["m3"]


def test_the_encoders_write_the_golden_bytes_of_security_items() -> None:
    assert changed_files(secured_history()) == []


def test_an_engine_continues_with_the_golden_log_of_security_items() -> None:
    disk = golden_log_disk("secured_log.bin")
    world = World(disk, segment_bytes=SECURED_SEGMENT, now_ms=START_MS + 1_000)
    version, items = table_of(world.engine)
    assert version == 16
    kinds = "ban", "quota", "role", "token", "user"
    assert sorted(items) == [
        *((kind, "kept") for kind in kinds[:3]),
        ("security", ""),
        *((kind, "kept") for kind in kinds[3:]),
    ]
    assert items["user", "kept"] == (
        b'{"name":"kept","op":"user","user":{"text":"a text"},"version":1}'
    )


def test_the_encoders_write_the_golden_bytes_of_an_audit_log() -> None:
    assert changed_files(audited_history()) == []


def test_an_engine_continues_with_the_golden_audit_log() -> None:
    disk = golden_log_disk("audited_log.bin")
    world = World(disk, segment_bytes=SECURED_SEGMENT, now_ms=START_MS + 1_000)
    records = records_of(world.engine)
    assert [(one["sequence"], one["resource"], one["result"]) for one in records] == [
        (1, "Topic:orders", "ok"),
        (2, "Topic:orders", "ok"),
        (3, "Replica:r", "begun"),
    ]
    assert (records[1]["before"], records[1]["after"]) == ({"queues": 4}, {"queues": 8})


def test_the_encoders_write_the_golden_bytes_of_transactions() -> None:
    assert changed_files(transacted_history()) == []


def test_an_engine_continues_with_the_golden_log_of_transactions() -> None:
    disk = golden_log_disk("transacted_log.bin")
    world = TransactionWorld(disk, segment_bytes=SECURED_SEGMENT, now_ms=START_MS + 10_000)
    rows = [row for rows in world.engine.transaction_table.walk() for row in rows.tolist()]
    assert [TransactionState(row[-1]).name for row in rows] == [
        "COMMITTED",
        "ROLLED_BACK",
        "COMMITTED",
        "EXPIRED",
        "RECOVERED",
        "HALF",
        "HALF",
    ]
    open_rows = [row for row in rows if row[-1] == TransactionState.HALF]
    assert all(row[0] < row[1] for row in open_rows), "both have been appended again"
    recovered, last = [world.engine.transactions.status(HalfId(row[0])) for row in open_rows]
    assert (recovered.message_id, last.message_id) == ("id-recovered", "id-open")
    assert last.time_ms == last.sent_at_ms + 3_600_000
    world.commit_half(recovered.half_id)
    assert world.drain() == ["committed", "recovered"]


def test_the_encoders_write_the_golden_bytes_of_dedup_keys() -> None:
    assert changed_files(keyed_history()) == []


def test_an_engine_continues_with_the_golden_log_of_dedup_keys() -> None:
    disk = golden_log_disk("keyed_log.bin")
    world = DedupWorld(disk, segment_bytes=SECURED_SEGMENT, now_ms=START_MS + 10_000)
    world.note_round()
    assert [row.pin for row in world.rows(topic="debounce")] == [1]
    assert sorted(row.pin < 0 for row in world.rows()) == [False, True]
    assert world.repeat("x", key="plain").message_id == "id-plain"
    recovered = world.repeat("x", key="half", is_half=True)
    assert recovered.message_id == "id-half"
    world.commit_half(HalfId(recovered.half_id))
    world.store("freed again", key="freed")
    world.advance(120_000)
    assert sorted(world.drain()) == ["freed", "freed again", "half", "plain"]
    assert world.drain(topic="debounce") == ["delayed 1"]


def test_the_encoders_write_the_golden_bytes_of_dead_letters() -> None:
    assert changed_files(replayed_history()) == []


def test_an_engine_continues_with_the_golden_log_of_dead_letters() -> None:
    disk = golden_log_disk("replayed_log.bin")
    world = LetterWorld(disk, segment_bytes=SECURED_SEGMENT, now_ms=START_MS + 10_000)
    discarded, replayed = "DISCARDED", "REPLAYED"
    states = [replayed, *[discarded] * 3, replayed, *[discarded] * 3]
    assert world.states() == states
    assert world.letter(4).cause.replays == 1
    operations = list(world.engine.catalog.operations.by_id.values())
    assert [(one.done, one.state) for one in operations] == [
        (0, OperationState.DONE),
        (4, OperationState.DONE),
    ]
    assert world.letter(5).cause.replays == 2


def test_the_encoders_write_the_golden_bytes_of_bulk_changes_of_timers() -> None:
    assert changed_files(bulk_timer_history()) == []


def test_an_engine_continues_with_the_golden_log_of_bulk_changes_of_timers() -> None:
    disk = golden_log_disk("bulk_timers_log.bin")
    world = TimerBulkWorld(disk, segment_bytes=SECURED_SEGMENT, now_ms=START_MS + 10_000)
    shifted, cancelled, fired = world.engine.catalog.operations.by_id.values()
    assert (shifted.done, shifted.failed, shifted.failures) == (3, 1, [(1, "TOO_LATE")])
    assert (cancelled.done, world.state(0)) == (1, TimerState.CANCELLED)
    assert world.due(3) == START_MS + HOUR_MS + 60_000
    assert (fired.is_running, world.run_operation(fired).done) == (True, 3)


def test_the_encoders_write_the_golden_bytes_of_a_pack() -> None:
    assert changed_files(packed_history()) == []


def packed_disk(prefix: str) -> FaultyDisk:
    disk, rest = FaultyDisk(Random(0)), golden(f"{prefix}_rest.bin")
    files = {f"log/{0:020d}.pack": golden(f"{prefix}_segment.bin")}
    for at in range(0, len(rest), PACKED_SEGMENT):
        files[f"log/{at + PACKED_SEGMENT:020d}.log"] = rest[at : at + PACKED_SEGMENT]
    for name, content in files.items():
        file = disk.open(name, create=True)
        file.write_at(0, [content])
        file.sync()
    disk.sync_folder("log")
    return disk


def test_an_engine_continues_with_the_golden_pack() -> None:
    disk = packed_disk("packed")
    world = World(disk, segment_bytes=PACKED_SEGMENT, now_ms=START_MS + 1_000)
    assert world.bodies(topic="kept") == ["kept"]
    assert world.bodies(topic="gone") == []
    check_log(disk)


def floored_history() -> dict[str, bytes]:
    """Write a log with a state floor, and a pack before it: a kept message between two gaps."""
    world = World(
        FaultyDisk(Random(0)), now_ms=START_MS, feature_level=2, segment_bytes=PACKED_SEGMENT
    )
    for n in range(4):
        world.send(f"gone {n}", topic="gone", size=3_000)
        if n == 1:
            world.send("kept", topic="kept")
            world.pop(1, topic="gone", invisible_ms=3_600_000)
    while len(world.engine.log.segments) < 3:
        world.send("filler", topic="filler", size=3_000)
    world.purge("gone")
    world.checkpoint()
    move_floor(world, world.engine.log.segments[0].end)
    assert pack_all(world) == 1
    disk = world.disk
    [name] = [name for name in disk.names("log") if name.endswith(".pack")]
    rest = [name for name in disk.names("log") if name.endswith(".log")]
    return {
        "floored_segment.bin": disk.read(name) or b"",
        "floored_rest.bin": b"".join(disk.read(one) or b"" for one in rest),
    }


def test_the_encoders_write_the_golden_bytes_of_a_state_floor() -> None:
    assert changed_files(floored_history()) == []


def test_an_engine_continues_with_the_golden_state_floor() -> None:
    world = World(packed_disk("floored"), segment_bytes=PACKED_SEGMENT, now_ms=START_MS + 1_000)
    assert world.engine.log.state_floor == PACKED_SEGMENT
    assert world.bodies(topic="kept") == ["kept"]
    assert world.bodies(topic="gone") == []


def golden_disk(*, with_derived_files: bool) -> FaultyDisk:
    disk = FaultyDisk(Random(0))
    data = golden("log.bin")
    files = {
        f"log/{start:020d}.log": data[start : start + SEGMENT]
        for start in range(0, len(data), SEGMENT)
    }
    if with_derived_files:
        files["checkpoint"] = golden("checkpoint.bin")
        checkpoint = store_checkpoint.find(files["checkpoint"])
        assert checkpoint is not None
        for folder in ("queues", "index", "snapshots"):
            name = f"{folder}/{0 if folder != 'snapshots' else checkpoint.derived_offset:020d}"
            files[f"{name}-{checkpoint.derived_offset:020d}"] = golden(f"{folder}.bin")
    for name, content in files.items():
        file = disk.open(name, create=True)
        file.write_at(0, [content])
        file.sync()
    disk.sync_folder(".")
    return disk


def test_the_golden_log_has_every_kind_of_record_and_every_optional_part() -> None:
    checker = check_log(golden_disk(with_derived_files=False))
    timer_checker = check_log(golden_timer_disk(with_timer_files=False))
    renewed_checker = check_log(golden_log_disk("renewed_log.bin"))
    purged_checker = check_log(golden_log_disk("purged_log.bin"))
    audited_checker = check_log(golden_log_disk("audited_log.bin"))
    transacted_checker = check_log(golden_log_disk("transacted_log.bin"))
    check_log(golden_log_disk("keyed_log.bin"))
    replayed_checker = check_log(golden_log_disk("replayed_log.bin"))
    check_log(golden_log_disk("bulk_timers_log.bin"))
    checkers = (
        checker,
        timer_checker,
        renewed_checker,
        purged_checker,
        audited_checker,
        transacted_checker,
        replayed_checker,
    )
    assert {kind for one in checkers for kind in one.kinds} == set(RecordKind) - {RecordKind.FLOOR}
    assert {one.visible_at_ms - START_MS for one in renewed_checker.deliveries.values()} == {
        300_000,
        131_000,
        0,
        3_600_000,
    }
    flags, states, reasons, operations = 0, set(), set(), set()
    view = memoryview(golden("log.bin"))
    at = 0
    while at + record.HEADER_SIZE <= len(view):
        if record.PAD.unpack_from(view, at)[0] == record.PAD_MAGIC:
            at = (at // SEGMENT + 1) * SEGMENT
            continue
        if record.find_damage(view, at, log_offset=LogOffset(at)):
            break
        header = RecordHeader._make(record.HEADER.unpack_from(view, at))
        body = bytes(view[at + record.HEADER_SIZE : at + header.head_size])
        if header.kind == RecordKind.CK:
            flags |= pop_checkpoint.decode(body).flags
        elif header.kind == RecordKind.STATE:
            states.add(body[0])
        elif header.kind == RecordKind.CONFIG:
            operations.add(body.partition(b'"op":"')[2].partition(b'"')[0])
        elif header.kind == RecordKind.MESSAGE and header.flags & message.FLAG_CAUSE:
            reasons.add(message.decode_cause(body).reason)
        at += header.size
    assert flags == (
        pop_checkpoint.FLAG_GAPS
        | pop_checkpoint.FLAG_SUPERSEDES
        | pop_checkpoint.FLAG_ORDERED
        | pop_checkpoint.FLAG_SUSPEND
    )
    assert states == {1, 2, 3, 4}
    assert operations == {b"broker", b"nextId", b"topic", b"group", b"reset", b"deleteTopic"}
    assert reasons == set(Reason) - {Reason.DAMAGED}, "no message in it is damaged"


@pytest.mark.parametrize("with_derived_files", [False, True])
def test_an_engine_continues_with_the_golden_files(with_derived_files: bool) -> None:
    world = World(
        golden_disk(with_derived_files=with_derived_files),
        config=SMALL,
        segment_bytes=SEGMENT,
        now_ms=START_MS + 3_000,
    )
    assert bool(world.report.snapshot) == with_derived_files
    catalog = world.engine.catalog
    assert catalog.find_topic("gone") is None
    assert [one.name for one in catalog.deleted_names.topics.values()] == ["gone"]
    group, fifo = catalog.find_group(GROUP), catalog.find_group("fifo")
    assert group is not None
    assert fifo is not None
    assert (group.max_attempts, group.customized_ms) == (2, (1_000, 5_000))
    assert fifo.exponential == ExponentialRetry(initial_ms=500, max_ms=60_000, multiplier=1.5)
    assert sorted(world.bodies(group="auditor")) == sorted(f"m{n}" for n in range(12))
    assert world.bodies(group="resetter") == [], "retention removed the messages of the reset"
    assert len(world.bodies(group="auditor", topic=f"%DLQ%{GROUP}")) == 3
    assert sum(one.in_flight_count for one in world.engine.inspection.group_progress(fifo)) == 2
    topic = catalog.find_topic(TOPIC)
    assert topic is not None
    assert {one.stored_topic for one in world.find(topic, key="k")} >= {TOPIC}
    assert world.pop(group="fifo", attempt_id="attempt-2") == [], "retention removed the others"
    world.advance(1_000_000)
    again = world.pop(group="fifo", attempt_id="attempt-3")
    assert [one.attempt for one in again] == [2, 1], "one of three was changed and one was acked"
    assert world.ack(again[0]) == [AckResult.APPLIED]


def test_the_golden_message_and_handles_are_read() -> None:
    data = golden("stored_message.bin")
    assert stored_message.message_id_of(data) == "0123"
    assert stored_message.tag_of(data) == "tag"
    assert body_of(data) == b"the body"
    signer = HandleSigner(bytes(range(32)), "broker-0")
    lines = golden("receipt_handles.bin").decode().split("\n")
    for line, (group, topic, fields) in zip(lines, HANDLES, strict=True):
        assert signer.open(line, group, topic) == fields


def make_missing() -> None:
    """Write the golden files that do not exist."""
    FOLDER.mkdir(exist_ok=True)
    made = history() | timer_history() | two_lives_history() | released_history()
    made |= renewed_history() | pulled_history() | forgotten_history() | purged_history()
    made |= packed_history() | floored_history() | secured_history()
    made |= audited_history()
    made |= transacted_history()
    made |= keyed_history()
    made |= replayed_history() | bulk_timer_history()
    for name, data in made.items():
        if not (FOLDER / name).exists():
            (FOLDER / name).write_bytes(data)


if __name__ == "__main__":
    make_missing()
