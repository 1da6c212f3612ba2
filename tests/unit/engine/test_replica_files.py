"""A replica's log and state on its disk: the master's bytes, and cuts that survive power cuts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from random import Random

import pytest

from tests.support.disk.faulty_disk import FaultyDisk, PowerCut
from tests.support.seeds import seeds
from tests.support.worlds.engine_world import SMALL
from tidemill.broker.engine.layout import durable_mark, replica_state, truncate_intent
from tidemill.broker.engine.layout.durable_mark import NO_BOOT_ID, DurableMark
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.record import RecordKind
from tidemill.broker.engine.layout.replica_state import ReplicaState
from tidemill.broker.engine.layout.truncate_intent import LogCut
from tidemill.broker.engine.replica.known_end import KnownEnd
from tidemill.broker.engine.replica.opening import FreshIdentity, open_replica_engine
from tidemill.broker.engine.replica.replica_engine import MustBeEmptied, ReplicaEngine
from tidemill.broker.engine.replica.replica_files import (
    ADDRESSES,
    IDENTITY,
    INTENT,
    STATES,
    ReplicaFiles,
    damaged_state,
    find_addresses,
    find_cut,
    save_addresses,
)
from tidemill.broker.engine.replication.epoch_journal import EpochEntry
from tidemill.broker.engine.replication.messages import Data
from tidemill.broker.engine.store.segment import CorruptStore, Hole

SEGMENT = 4096
CONFIG = replace(SMALL, segment_bytes=SEGMENT)
FRESH = FreshIdentity(bytes(range(16)), bytes(range(32)))


def open_log(disk: FaultyDisk) -> ReplicaEngine:
    """Open a replica's store. Nothing is confirmed, so no record is applied."""
    return open_replica_engine(disk, CONFIG, now_ms=0, fresh=FRESH)[0]


def logs(count: int = 2) -> list[ReplicaEngine]:
    return [open_log(FaultyDisk(Random(number))) for number in range(count)]


def disk_of(log: ReplicaEngine) -> FaultyDisk:
    disk = log.engine.disk
    assert isinstance(disk, FaultyDisk)
    return disk


def sync(log: ReplicaEngine) -> None:
    log_offset, files = log.engine.log.begin_sync()
    for file in files:
        file.sync()
    log.engine.log.note_synced(log_offset)


def append(log: ReplicaEngine, count: int, random: Random) -> list[bytes]:
    """Let a master append and sync records that no engine must understand."""
    bodies = [random.randbytes(random.randint(1, 900)) for _ in range(count)]
    for body in bodies:
        log.engine.log.append(RecordKind.STATE, body, 0)
    log.engine.log.write()
    sync(log)
    return bodies


def bodies_in(log: ReplicaEngine) -> list[bytes]:
    found = list(log.engine.log.walk_between(0, log.log_end))
    assert not any(isinstance(one, Hole) for one in found)
    return [bytes(one.body) for one in found if not isinstance(one, Hole)]


def follow(source: ReplicaEngine, target: ReplicaEngine, size_max: int) -> None:
    while (frame := source.frame_at(target.log_end, size_max)) is not None:
        target.append(frame)


def frames_of(log: ReplicaEngine, size_max: int) -> Iterator[Data]:
    at = 0
    while (frame := log.frame_at(at, size_max)) is not None:
        yield frame
        at = frame.end


@pytest.mark.parametrize("size_max", [1, 700, 5_000, 1 << 20])
def test_a_follower_writes_the_same_bytes_into_the_same_files(size_max: int) -> None:
    random, (source, target) = Random(size_max), logs()
    bodies: list[bytes] = []
    for _ in range(30):
        bodies += append(source, random.randint(1, 9), random)
        follow(source, target, size_max)
        assert 0 <= target.log_end - source.log_end < 8, (
            "remaining bytes without room for a pad are skipped"
        )
    sync(target)
    assert target.durable_offset == target.log_end
    assert source.digest(5, source.log_end) == target.digest(5, source.log_end)
    names = [segment.name for segment in source.engine.log.segments]
    assert len(names) > 10
    again = open_log(disk_of(target).after_power_cut())
    assert bodies_in(again) == bodies
    assert again.log_end == target.log_end
    assert [segment.name for segment in again.engine.log.segments] == names


def test_a_frame_ends_with_a_record_and_its_pad() -> None:
    (log,) = logs(1)
    append(log, 40, Random(1))
    frames = list(frames_of(log, 1))
    ends = {frame.end for frame in frames}
    segment_ends = {segment.end for segment in log.engine.log.segments[:-1]}
    assert segment_ends < ends
    assert {frame.offset for frame in frames} >= segment_ends, (
        "the next frame begins with a segment"
    )
    for size_max in (500, 2_000):
        frames = list(frames_of(log, size_max))
        assert {frame.end for frame in frames} <= ends
        largest = max(size_max, 1_000) + 1_000  # with the pad of a segment
        assert max(len(frame.data) for frame in frames) <= largest


def wherever_the_power_goes(
    prepare: Callable[[FaultyDisk], Callable[[], object]], *, at_least: int, seed: int = 0
) -> Iterator[tuple[ReplicaEngine, bool]]:
    """Run the prepared work with a power cut at each of its operations in turn.

    Yields the store after the restart, and whether the work was complete.
    """
    operations, is_done = 0, False
    while not is_done:
        disk = FaultyDisk(Random(1_000 * seed + operations))
        do = prepare(disk)
        disk.cut_at = len(disk.operations) + operations
        try:
            do()
            is_done = True
        except PowerCut:
            operations += 1
        yield _opened_with_power_cuts(disk.after_power_cut()), is_done
    assert operations > at_least


def _opened_with_power_cuts(disk: FaultyDisk) -> ReplicaEngine:
    """Open a store after a power cut, with another one at each operation of the start in turn."""
    for operations in range(200):
        disk.cut_at = len(disk.operations) + operations
        try:
            log = open_log(disk)
        except PowerCut:
            disk = disk.after_power_cut()
            continue
        disk.cut_at = None
        return log
    raise AssertionError("a start comes to its end")


def test_a_cut_is_complete_or_has_not_begun() -> None:
    kept, outcomes = 11, set[str]()
    (log,) = logs(1)
    before = append(log, 30, Random(7))
    cut, before_end = list(frames_of(log, 1))[kept].offset, log.log_end
    segment = log.engine.log.segment_of(LogOffset(cut))
    assert segment.start < cut < segment.end - SEGMENT // 2, "more bytes and more files are cut"

    def prepare(disk: FaultyDisk) -> Callable[[], object]:
        log = open_log(disk)
        append(log, 30, Random(7))
        return lambda: log.truncate(cut)

    for again, is_done in wherever_the_power_goes(prepare, at_least=8):
        found = bodies_in(again)
        assert found in (before, before[:kept])
        outcomes.add("kept" if found == before else "cut")
        if is_done or found != before:
            assert again.log_end == cut
            assert disk_of(again).read(INTENT) is None
            assert again.cut is not None
            assert again.cut.size_bytes == before_end - cut, "the cut is reported all the same"
            _check_that_nothing_comes_back(again, before[:kept], size=len(before[kept]))
    assert outcomes == {"kept", "cut"}


def _check_that_nothing_comes_back(log: ReplicaEngine, kept: list[bytes], *, size: int) -> None:
    """Write as many bytes after the cut as were there before: no old record may follow them."""
    log.engine.log.append(RecordKind.STATE, b"n" * size, 0)
    log.engine.log.write()
    sync(log)
    again = open_log(disk_of(log).after_power_cut())
    assert bodies_in(again) == [*kept, b"n" * size]


def test_a_torn_tail_of_several_segments_is_cut() -> None:
    """The remaining files must be contiguous, or a start would stop."""
    random, (source, target) = Random(2), logs()
    bodies = append(source, 40, random)
    follow(source, target, 2_000)
    sync(target)
    torn = list(frames_of(source, 1))[3]
    assert len(target.engine.log.segments) > 4
    disk_of(target).damage(target.engine.log.segments[0].name, torn.offset + 50)
    again = _opened_with_power_cuts(disk_of(target))
    assert again.log_end == torn.offset
    assert bodies_in(again) == bodies[:3]
    follow(source, again, 2_000)
    assert bodies_in(again) == bodies


def test_records_after_a_cut_match_the_master() -> None:
    random, (source, target) = Random(3), logs()
    append(source, 25, random)
    follow(source, target, 2_000)
    cut = source.log_end
    append(target, 20, random)
    append(source, 22, random)
    before = target.log_end
    target.truncate(cut)
    assert target.log_end == target.durable_offset == cut
    assert target.cut is not None
    expected = LogCut(cut, target.epoch_seen, before - cut, 20, 0)
    assert target.cut == expected, "none of the cut records was confirmed"
    follow(source, target, 2_000)
    sync(target)
    assert source.digest(0, source.log_end) == target.digest(0, source.log_end)


def test_a_sync_that_began_before_a_cut_proves_nothing_after_it() -> None:
    random, (source, target) = Random(4), logs()
    append(source, 6, random)
    follow(source, target, 2_000)
    log_offset, files = target.engine.log.begin_sync()
    cut = list(frames_of(source, 1))[2].offset
    target.truncate(cut)
    follow(source, target, 2_000)
    for file in files:
        file.sync()
    target.engine.log.note_synced(log_offset)
    assert target.durable_offset == cut


def test_the_oldest_segment_stays_when_all_of_its_records_are_cut() -> None:
    def prepare(disk: FaultyDisk) -> Callable[[], object]:
        target = open_log(disk)
        target.start_at(SEGMENT)
        target.append(Data(0, SEGMENT, b"no record" * 9, 0, 0, SEGMENT, SEGMENT))
        sync(target)
        return lambda: target.truncate(SEGMENT)

    for again, _ in wherever_the_power_goes(prepare, at_least=4):
        assert (again.log_min, again.log_end) == (SEGMENT, SEGMENT)


def test_the_confirm_offset_is_at_most_the_end_of_a_cut_log() -> None:
    """Only after an unclean election: confirmed records that are not applied yet are cut."""
    random, (source, target) = Random(5), logs()
    append(source, 4, random)
    follow(source, target, 2_000)
    target.confirm(target.log_end)
    cut = list(frames_of(source, 1))[2].offset
    confirmed_bytes = target.log_end - cut
    target.truncate(cut)
    assert target.confirm_offset == cut
    assert target.cut is not None
    assert target.cut.confirmed_bytes == confirmed_bytes, "the lost records"


def test_a_replica_that_applied_cut_records_begins_with_an_empty_store() -> None:
    random, (source, target) = Random(5), logs()
    append(source, 4, random)
    follow(source, target, 2_000)
    target.engine.log.applied_offset = LogOffset(target.log_end)
    with pytest.raises(MustBeEmptied):
        target.truncate(0)
    cut = find_cut(disk_of(target))
    assert cut is not None, "the next start reports the cut"
    assert (cut.offset, cut.size_bytes) == (0, target.log_end)
    assert cut.confirmed_bytes == target.confirm_offset
    assert disk_of(target).read(INTENT) is None
    assert target.log_end == source.log_end


@pytest.mark.parametrize("seed", seeds("replica files", 8))
def test_the_state_is_the_last_one_or_the_one_before(seed: int) -> None:
    # The state has several sectors and all of them change, so a write can be torn.
    before, after = (
        tuple(EpochEntry(epoch, start) for epoch in range(1, 90)) for start in (7, 1 << 40)
    )

    def prepare(disk: FaultyDisk) -> Callable[[], object]:
        log = open_log(disk)
        log.save_epoch_seen(90)
        log.save_journal(before)
        return lambda: log.save_journal(after)

    for again, is_done in wherever_the_power_goes(prepare, at_least=2, seed=seed):
        assert again.journal in ((after,) if is_done else (before, after))
        assert again.epoch_seen == 90
        assert again.files.store_uuid == FRESH.store_uuid
        again.save_epoch_seen(91)
        assert open_log(disk_of(again).after_power_cut()).epoch_seen == 91


@pytest.mark.parametrize("syncs_first", [False, True])
def test_a_state_that_is_saved_during_a_sync_leaves_one_of_both(syncs_first: bool) -> None:
    # The state has several sectors and all of them change, so a write can be torn.
    journals = [
        tuple(EpochEntry(epoch, start + epoch) for epoch in range(1, 90))
        for start in (7, 1 << 40, 2 << 40)
    ]

    def prepare(disk: FaultyDisk) -> Callable[[], object]:
        log = open_log(disk)
        log.save_journal(journals[0])
        files = ReplicaFiles(disk, bytes(16), KnownEnd(disk, NO_BOOT_ID))

        def save() -> None:
            file = files.write_confirm(0)
            files.save_journal(journals[1], confirm_offset=0)
            if syncs_first:
                file.sync()
                files.end_sync()
            files.save_journal(journals[2], confirm_offset=0)
            files.end_sync()

        return save

    found = set()
    for seed in range(3):
        for again, is_done in wherever_the_power_goes(prepare, at_least=4, seed=seed):
            found.add(journals.index(again.journal))
            assert not is_done or again.journal == journals[2]
    assert found == {0, 1, 2}


def test_a_store_with_a_damaged_state_does_not_open() -> None:
    (log,) = logs(1)
    for epoch in (4, 5):
        log.save_epoch_seen(epoch)
    for name in STATES:
        disk_of(log).damage(name, 30)
    with pytest.raises(CorruptStore, match="which epochs"):
        open_log(disk_of(log))


def test_a_store_with_a_missing_state_does_not_open() -> None:
    (log,) = logs(1)
    append(log, 1, Random(0))
    for name in STATES:
        if disk_of(log).read(name) is not None:
            disk_of(log).delete(name)
    with pytest.raises(CorruptStore, match="which epochs"):
        open_log(disk_of(log))


def test_a_replica_with_a_missing_log_does_not_start_as_a_new_one() -> None:
    """It has acked the records of that log."""
    (log,) = logs(1)
    append(log, 1, Random(0))
    for files in log.engine.checkpoints.write_file(LogOffset(0), min_offset=LogOffset(0)):
        for file in files:
            file.sync()
    disk = disk_of(log).after_kill()
    for name in disk.names("log"):
        disk.delete(name)
    with pytest.raises(CorruptStore, match="no segment"):
        open_log(disk)


def test_the_saved_confirm_offset_is_never_above_the_durable_offset() -> None:
    random, (source, target) = Random(0), logs()
    append(source, 3, random)
    follow(source, target, 2_000)
    for is_durable in (False, True):
        target.confirm(target.log_end)
        target.save_epoch_seen(1 + is_durable)
        again = open_log(disk_of(target).after_kill())
        assert again.confirm_offset == (target.log_end if is_durable else 0)
        sync(target)


def test_a_power_cut_anywhere_in_a_first_start_is_harmless() -> None:
    def prepare(disk: FaultyDisk) -> Callable[[], object]:
        return lambda: open_log(disk).save_epoch_seen(1)

    for again, is_done in wherever_the_power_goes(prepare, at_least=5):
        assert again.epoch_seen in ((1,) if is_done else (0, 1))
        known = disk_of(again).read(IDENTITY)
        assert disk_of(open_log(disk_of(again).after_power_cut())).read(IDENTITY) == known


def test_a_torn_tail_of_the_masters_records_is_cut_and_not_damage() -> None:
    """The durable offset in these records is that of the master's disk."""
    random, (source, target) = Random(5), logs()
    for _ in range(4):
        append(source, 1, random)
    follow(source, target, 1)
    second = source.frame_at(0, 1)
    assert second is not None
    disk_of(target).damage(target.engine.log.segments[0].name, second.end + 60)
    again = open_log(disk_of(target))
    assert len(bodies_in(again)) == 1
    assert again.log_end == second.end


def test_the_formats_of_state_intent_and_mark_are_unchanged() -> None:
    state = ReplicaState(3, 7, 1_000, ((1, 0), (7, 900)))
    data = replica_state.encode(state)
    assert data.hex() == GOLDEN_STATE
    assert replica_state.find(data) == state
    assert replica_state.find(data[:-1]) is None
    assert replica_state.find(data[:20] + b"\xff" + data[21:]) is None
    cut = LogCut(4_096, epoch=7, size_bytes=900, records=3, confirmed_bytes=100)
    assert truncate_intent.encode(cut).hex() == GOLDEN_INTENT
    assert truncate_intent.find(bytes.fromhex(GOLDEN_INTENT)) == cut
    data = bytes.fromhex(GOLDEN_INTENT)
    assert truncate_intent.find(data[:-1]) is None
    assert truncate_intent.find(data[:-1] + b"\xff") is None
    assert len(STATES) == 2
    mark = DurableMark(3, 1_000, 7, bytes(range(16)), is_doubtful=True)
    data = durable_mark.encode(mark)
    assert data.hex() == GOLDEN_MARK
    assert durable_mark.find(data) == mark
    assert durable_mark.find(data[:-1]) is None
    assert durable_mark.find(data[:20] + b"\xff" + data[21:]) is None


def test_broken_bytes_before_the_durable_mark_are_damage() -> None:
    """After a power cut, and without an intact record after them."""
    random, (source, target) = Random(5), logs()
    append(source, 4, random)
    follow(source, target, 1)
    sync(target)
    assert target.files.request_mark(target.durable_offset)
    for file in target.begin_sync():
        file.sync()
    disk = disk_of(target).after_power_cut()
    disk.damage(target.engine.log.segments[0].name, target.log_end - 1)
    with pytest.raises(CorruptStore, match="checksum mismatch"):
        open_log(disk)


def test_a_cut_without_a_power_cut_is_doubtful_until_the_doubt_is_cleared() -> None:
    random, (source, target) = Random(5), logs()
    append(source, 4, random)
    boot_id = bytes([1] * 16)
    disk = disk_of(target)
    for is_doubtful in (False, True, True):
        target = open_replica_engine(disk, CONFIG, now_ms=0, fresh=FRESH, boot_id=boot_id)[0]
        assert target.files.known_end.is_doubtful is is_doubtful
        if not is_doubtful:
            follow(source, target, 1)
        disk = disk_of(target).after_kill()
        if not is_doubtful:
            disk.damage(target.engine.log.segments[0].name, target.log_end - 1)
    target.files.known_end.clear_doubt()
    disk = disk_of(target).after_power_cut()
    assert not open_log(disk).files.known_end.is_doubtful


@pytest.mark.parametrize("is_same_boot", [True, False])
def test_a_damaged_copy_of_the_state_is_named_and_makes_the_replica_doubtful(
    is_same_boot: bool,
) -> None:
    boots = [bytes([1] * 16), bytes([1] * 16) if is_same_boot else bytes([2] * 16)]
    first = open_replica_engine(
        FaultyDisk(Random(1)), CONFIG, now_ms=0, fresh=FRESH, boot_id=boots[0]
    )[0]
    append(first, 1, Random(0))  # The start of a replica without a log saves its state anyway.
    for epoch in (4, 5):
        first.save_epoch_seen(epoch)
    disk = disk_of(first).after_kill()
    newest = STATES[first.files._state.generation % 2]
    disk.damage(newest, 30)
    again, report = open_replica_engine(disk, CONFIG, now_ms=0, fresh=FRESH, boot_id=boots[1])
    assert again.epoch_seen == 4
    # After a power cut, a torn copy was never durable.
    assert again.files.known_end.is_doubtful is is_same_boot
    assert report.damaged_file == newest
    assert damaged_state(disk) == "", "the start has written it again"
    again.files.known_end.clear_doubt()
    third, report = open_replica_engine(
        disk_of(again).after_kill(), CONFIG, now_ms=0, fresh=FRESH, boot_id=boots[1]
    )
    assert (third.epoch_seen, report.damaged_file) == (4, "")
    assert not third.files.known_end.is_doubtful


def test_no_damaged_address_of_a_replica_is_used() -> None:
    disk = disk_of(logs(1)[0])
    addresses = [(0, "10.0.0.1:10911"), (1, "[::1]:10911")]
    save_addresses(disk, addresses)
    assert find_addresses(disk) == dict(addresses)
    data = disk.read(ADDRESSES)
    assert data is not None
    for at in range(len(data)):
        for changed in (data[:at], data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]):
            file = disk.open(ADDRESSES)
            file.resize(len(changed))
            file.write_at(0, [changed])
            file.close()
            assert find_addresses(disk) == {}


def test_a_missing_log_is_doubtful() -> None:
    """Also without a checkpoint that mentions it: the files were deleted."""
    random, (source, target) = Random(5), logs()
    append(source, 1, random)
    follow(source, target, 1_000)
    sync(target)
    target.files.close(target.durable_offset)
    disk = disk_of(target).after_power_cut()
    for name in disk.names("log"):
        disk.remove(name)
    assert open_log(disk).files.known_end.is_doubtful


@pytest.mark.parametrize("seed", seeds("replica files", 8))
def test_the_mark_is_lowered_before_a_cut(seed: int) -> None:
    random, source = Random(5), logs(1)[0]
    append(source, 6, random)
    cut = next(islice(frames_of(source, 1), 3, None)).offset

    def prepare(disk: FaultyDisk) -> Callable[[], object]:
        target = open_log(disk)
        follow(source, target, 1)
        sync(target)
        target.files.close(target.durable_offset)
        target.files.request_mark(target.durable_offset)
        return lambda: target.truncate(cut)

    for again, is_done in wherever_the_power_goes(prepare, at_least=4, seed=seed):
        assert again.log_end in ((cut,) if is_done else (cut, source.log_end))
        assert not again.files.known_end.is_doubtful


GOLDEN_MARK = (
    "544d444dd84972e60000000300000000000003e80000000000000007000102030405060708090a0b0c0d0e0f01"
)
GOLDEN_STATE = (
    "544d525340e0e18b00000003000000000000000700000000000003e8000000020000000000000001"
    "000000000000000000000000000000070000000000000384"
)

GOLDEN_INTENT = (
    "544d5443525a707b00000000000010000000000000000007"
    "000000000000038400000000000000030000000000000064"
)
