"""A check finds each damaged byte, names the concerned messages, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random

import pytest

from tests.support.disk.faulty_disk import BLOCK, FaultyDisk
from tests.support.disk.offline_world import BusyFile, BusySource, Life, finish
from tests.support.seeds import seeds
from tests.support.worlds.engine_world import GROUP, TOPIC, World
from tests.support.worlds.timer_world import DAY_MS, TIMERS, TimerWorld
from tidemill.broker.engine.layout import block_file, store_checkpoint, timer_entry
from tidemill.broker.engine.layout.record import HEADER_SIZE
from tidemill.broker.engine.store.disk import ReadFailed
from tidemill.broker.engine.store.segment import CorruptStore
from tidemill.broker.engine.upkeep.checkpoint import CHECKPOINT_FILE, NEXT_CHECKPOINT_FILE
from tidemill.broker.offline import block_files, source
from tidemill.broker.offline.check import CheckReport, NoStore, check
from tidemill.broker.offline.check_timers import newest_checkpoint
from tidemill.broker.offline.findings import DAMAGE_DESCRIPTIONS, OF_THE_LOG, Damage, Finding
from tidemill.broker.offline.source import ReadOnlyDisk

SEGMENT = 64 << 10
FLIPS = 40  # of each file
TOPICS = ("orders", "returns")


def world_of_all() -> TimerWorld:
    """Make a world with files of each kind, some older than the begin of the log."""
    world = TimerWorld(
        FaultyDisk(Random(0)), segment_bytes=SEGMENT, retention_bytes=3 * SEGMENT, timer=TIMERS
    )
    world.group()
    for n in range(120):
        world.send(f"m{n}", topic=TOPICS[n % 2], size=1_800)
        if n % 20 == 19:
            world.checkpoint()
    for n in range(300):
        world.schedule(f"t{n}", delay_ms=DAY_MS + n * 1_000, size=20)
    world.ack(*world.pop(8, invisible_ms=60_000)[:3])
    world.now_ms += 20_000
    world.background()
    world.checkpoint()
    world.retire()
    world.send("the last", topic="orders")
    assert world.engine.log.min_offset > 0
    return world


@cache
def disk_of_all() -> FaultyDisk:
    disk = world_of_all().disk.after_kill()
    TimerWorld(disk, now_ms=world_of_all().now_ms, segment_bytes=SEGMENT, timer=TIMERS)
    return disk


def checked(disk: FaultyDisk) -> CheckReport:
    return finish(check(disk, TIMERS))


def all_files() -> list[str]:
    """Return the files with content. The next checkpoint file has none yet."""
    return [name for name in disk_of_all().all_names() if name != NEXT_CHECKPOINT_FILE]


def contents(disk: FaultyDisk) -> dict[str, bytes | None]:
    return {name: disk.read(name) for name in disk.all_names()}


def test_the_world_has_files_of_all_kinds() -> None:
    folders = {name.rpartition("/")[0] for name in all_files()}
    assert folders == {
        "",
        "log",
        "queues",
        "index",
        "snapshots",
        "timer",
        "timer/state",
        "timer/timerlog",
    }
    assert "timer/wheel" in all_files()


def test_a_check_of_a_sound_store_finds_and_changes_nothing() -> None:
    disk = disk_of_all()
    before = contents(disk)
    operations = len(disk.operations)
    report = checked(disk)
    assert report.findings == []
    assert report.is_sound
    assert report.record_count > 300
    assert contents(disk) == before
    assert len(disk.operations) == operations, "nothing is written or synced"


def counting_bytes(disk: FaultyDisk, name: str) -> list[range]:
    """Return the bytes of a file that have a meaning."""
    data = disk.read(name)
    assert data is not None
    if name.startswith("log/"):
        start = int(name[4:-4])
        checkpoint = store_checkpoint.find(disk.read("checkpoint"))
        assert checkpoint is not None
        pad = data.find(b"TMPD")
        end = min(checkpoint.durable_offset - start, pad + 8 if pad >= 0 else len(data))
        return [range(max(end, 0))]
    for kind in block_files.KINDS:
        if name.startswith(kind.folder):
            header = block_file.decode_header(memoryview(data), kind.magic)
            rows = list(block_file.rows_of(header.directory))
            end = block_file.HEADER_SIZE + len(rows) * block_file.ROW_SIZE
            blocks = [range(r.position, r.position + r.items * kind.item_size) for r in rows]
            return [range(end), *blocks]
    if name.startswith("timer/timerlog/"):
        begin = int(name.rpartition("/")[2])
        timers = newest_checkpoint(disk)
        assert timers is not None
        return [range(min(len(data), max(timers.timer_log_position - begin, 0)))]
    if name.startswith("timer/state/"):
        size = timer_entry.SIZE  # The last three bytes of an entry mean nothing.
        return [range(at, at + size - 3) for at in range(0, len(data), size)]
    return [range(len(data))]


@pytest.mark.parametrize("name", all_files())
def test_a_check_finds_each_flipped_bit(name: str) -> None:
    random = Random(name)
    places = [one for one in counting_bytes(disk_of_all(), name) if one]
    if not places:
        return  # No byte of this file is known to be durable.
    for _ in range(FLIPS):
        disk = disk_of_all().after_kill()
        at = random.choice(random.choice(places))
        disk.damage(name, at, bits=1 << random.randrange(8))
        report = checked(disk)
        found = [one for one in report.findings if one.file == name]
        assert found, f"byte {at}"
        assert not report.is_sound
        assert any(
            one.position <= at < one.position + one.size or (one.size == 0) for one in found
        ), f"byte {at}: {found}"


@pytest.mark.parametrize("name", all_files())
def test_a_check_reports_an_unreadable_page_and_continues(name: str) -> None:
    places = [one for one in counting_bytes(disk_of_all(), name) if one]
    if not places:
        return
    random = Random(name)
    page = random.choice(random.choice(places)) // BLOCK
    disk = disk_of_all().after_kill()
    disk.spoil(name, page)
    other = "snapshots" if name.startswith("log/") else "log"
    disk.damage(disk.names(other)[-1] if other == "snapshots" else disk.names(other)[0], 100)
    report = checked(disk)
    (finding,) = [one for one in report.findings if one.damage is Damage.UNREADABLE]
    assert (finding.file, finding.position, finding.size) == (name, page * BLOCK, BLOCK)
    assert any(one.file.startswith(other) for one in report.findings), "the check continues"


def test_a_check_reports_an_unreadable_log_end_over_which_no_start_goes() -> None:
    disk = disk_of_all().after_kill()
    name = disk.names("log")[-1]
    disk.spoil(name, counting_bytes(disk_of_all(), name)[0][-1] // BLOCK)
    findings = [one for one in checked(disk).findings if one.damage is Damage.UNREADABLE]
    assert [one.stops_start for one in findings] == [True]
    with pytest.raises(CorruptStore, match="cannot be read"):
        TimerWorld(disk, now_ms=world_of_all().now_ms, segment_bytes=SEGMENT, timer=TIMERS)


def test_too_many_unreadable_pages_end_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "UNREADABLE_MAX", 3)
    disk = disk_of_all().after_kill()
    disk.spoil(disk.names("log")[0], 0, 1, 2, 3)
    with pytest.raises(ReadFailed, match="3 pages are unreadable, the last one at byte 12288"):
        checked(disk)


def test_a_failed_read_names_the_file_and_the_byte(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    file = ReadOnlyDisk(tmp_path).open("log")  # A folder can be opened but not read.
    with pytest.raises(ReadFailed, match="reading log at byte 4096: Is a directory"):
        file.read_at(4096, 1)
    file.close()
    with pytest.raises(ReadFailed, match="reading log: Is a directory"):
        ReadOnlyDisk(tmp_path).read("log")


@pytest.mark.parametrize("name", all_files())
def test_a_check_finds_a_missing_file(name: str) -> None:
    disk = disk_of_all().after_kill()
    disk.remove(name)
    found = {one.damage for one in checked(disk).findings}
    if name.startswith(("timer/checkpoint", "snapshots/")):
        return  # A start uses the files that exist.
    if name.startswith("log/") and not counting_bytes(disk_of_all(), name)[0]:
        return
    assert found, name


@pytest.mark.parametrize("name", all_files())
def test_only_a_missing_file_that_a_start_rebuilds_is_a_note(name: str) -> None:
    disk = disk_of_all().after_kill()
    disk.remove(name)
    is_rebuilt = not name.startswith("log/") and name != CHECKPOINT_FILE
    if name == disk_of_all().names("timer/timerlog")[0]:
        is_rebuilt = False  # The slots of the wheel that refer to it look damaged.
    report = checked(disk)
    assert report.is_sound == (is_rebuilt or not report.findings), name
    if is_rebuilt and report.findings:
        # Beside a damaged log, it may have had what the log has lost.
        disk.damage(disk.names("log")[0], 1_000)
        assert not checked(disk).is_sound


@pytest.mark.parametrize("name", all_files())
def test_a_check_finds_a_cut_file(name: str) -> None:
    disk = disk_of_all().after_kill()
    places = counting_bytes(disk, name)
    last = max((one[-1] for one in places if one), default=0)
    if not last:
        return  # No byte of this file is known to be durable.
    disk.cut(name, last)
    report = checked(disk)
    assert any(one.file == name for one in report.findings)
    assert not report.is_sound


def test_every_kind_of_damage_has_a_meaning_and_a_remedy() -> None:
    assert DAMAGE_DESCRIPTIONS.keys() == set(Damage)
    assert all(all(meaning) for meaning in DAMAGE_DESCRIPTIONS.values())
    assert set(Damage) > OF_THE_LOG


def test_a_check_reports_a_folder_without_a_store() -> None:
    with pytest.raises(NoStore):
        checked(FaultyDisk(Random(0)))


# ---------------------------------------------------------------- concerned messages


def place_of(world: World, topic: str, offset: int) -> tuple[str, int]:
    """Return file and byte of the record of a message."""
    log_offset, _, _ = world.engine.catalog.queue(world.topic(topic), 0).entry(offset)  # type: ignore[arg-type]  # 0 is a queue's id.
    start = world.engine.log.segment_start(log_offset)
    return f"log/{start:020d}.log", log_offset - start


def small_world() -> TimerWorld:
    world = TimerWorld(FaultyDisk(Random(0)), segment_bytes=SEGMENT, timer=TIMERS)
    for n in range(6):
        world.send(f"m{n}", size=200)
    for n in range(3):
        world.schedule(f"t{n}", due_at_ms=world.now_ms + DAY_MS + n)
    return world


def damaged(
    world: World, topic: str, offset: int, position: int, *, derived: bool
) -> tuple[Finding, CheckReport]:
    """Damage a byte of a message's record; return the findings."""
    name, begin = place_of(world, topic, offset)
    if derived:
        world.checkpoint()
        world.now_ms += 20_000
        world.background()
    world.restart()
    world.disk.damage(name, begin + position)
    report = checked(world.disk)
    (finding,) = [one for one in report.findings if one.damage in OF_THE_LOG]
    assert (finding.file, finding.position) == (name, begin)
    return finding, report


@pytest.mark.parametrize("derived", [True, False])
@pytest.mark.parametrize("position", [0, 4, 8, 20, 40, 50, 60, HEADER_SIZE + 16 + 70, 250])
def test_a_check_names_a_damaged_message(position: int, *, derived: bool) -> None:
    world = small_world()
    finding, _ = damaged(world, TOPIC, 2, position, derived=derived)
    (affected,) = finding.affected
    assert (affected.topic, affected.queue_id, affected.queue_offset) == (TOPIC, 0, 2)
    is_head = position < HEADER_SIZE + 16
    assert finding.damage is (Damage.HOLE if is_head else Damage.RECORD)
    if position != HEADER_SIZE + 16 + 70:
        assert affected.message_id == "id-m2"
    assert finding.stops_start is not derived
    restarts = World(world.disk.after_kill(), config=world.config) if derived else None
    assert restarts is not None or not derived


def test_a_start_fails_over_the_damage_that_the_check_predicts() -> None:
    for derived in (True, False):
        world = small_world()
        finding, _ = damaged(world, TOPIC, 2, 250, derived=derived)
        try:
            world.restart()
            has_started = True
        except CorruptStore:
            has_started = False
        assert finding.stops_start is not has_started


def test_the_remedy_of_damage_that_prevents_the_start_requires_no_reader() -> None:
    remedies = {
        derived: damaged(small_world(), TOPIC, 2, 250, derived=derived)[0].remedy
        for derived in (True, False)
    }
    assert "each consumer group that reads it" in remedies[True]
    assert "reads it" not in remedies[False]
    assert all("store mend DIR --from BACKUP" in one for one in remedies.values())


def test_a_log_that_ends_before_the_damage_is_a_store_of_its_own() -> None:
    """As docs/backup-and-restore.md describes it for a broker without a backup."""
    world = TimerWorld(FaultyDisk(Random(0)), segment_bytes=SEGMENT, timer=TIMERS)
    sent = [*(f"m{n}" for n in range(200)), "the last"]
    for body in sent[:-1]:
        world.send(body, size=1_000)
    world.checkpoint()
    world.schedule("kept", delay_ms=DAY_MS)
    world.send("the last", "damaged", "lost")
    world.schedule("lost", delay_ms=DAY_MS)
    disk = world.disk.after_kill()
    name = disk.names("log")[-1]
    data = disk.read(name)
    assert data is not None
    disk.damage(name, data.index(b"damaged"))
    (finding,) = [one for one in checked(disk).findings if one.damage in OF_THE_LOG]
    assert finding.stops_start
    for other in disk.all_names():
        if not other.startswith("log/"):
            disk.remove(other)
    disk.zero(finding.file, finding.position, SEGMENT)
    saved = TimerWorld(disk, segment_bytes=SEGMENT, timer=TIMERS, now_ms=world.now_ms)
    assert saved.drain() == sent
    saved.advance(2 * DAY_MS)
    assert saved.drain(group="another") == [*sent, "kept"]


@pytest.mark.parametrize("position", [8, 150])
def test_a_check_names_a_damaged_delayed_message_and_its_timer(position: int) -> None:
    world = small_world()
    due_at_ms = world.now_ms + DAY_MS + 1
    finding, _ = damaged(world, "%SYS%TIMER", 1, position, derived=True)
    (affected,) = finding.affected
    assert affected.timer is not None
    assert (affected.timer.timer_id, affected.timer.due_at_ms) == (1, due_at_ms)
    assert (affected.timer.topic, affected.timer.state) == (TOPIC, "PENDING")


def test_a_check_names_the_messages_of_a_missing_segment() -> None:
    world = World(FaultyDisk(Random(0)), segment_bytes=SEGMENT)
    for n in range(100):
        world.send(f"m{n}", size=1_800)
    world.checkpoint()
    name, _ = place_of(world, TOPIC, 50)
    offsets = [n for n in range(100) if place_of(world, TOPIC, n)[0] == name]
    world.disk.remove(name)
    (finding,) = checked(world.disk).findings
    assert (finding.damage, finding.stops_start) == (Damage.SEGMENT_MISSING, True)
    assert [one.queue_offset for one in finding.affected] == offsets


# ---------------------------------------------------------------- beside a running broker


@pytest.mark.parametrize("seed", seeds("checked stores", 30))
def test_a_check_finds_nothing_beside_a_running_broker(seed: int) -> None:
    life = Life(seed)
    life.live(life.random.choice((5, 60, 300)))
    acts = life.random.choice((0.2, 1, 5))
    source = BusySource(life.world.disk, lambda: life.live_about(acts))
    assert finish(check(source, life.world.config.timer)).findings == []
    assert life.world.report is not None
    assert GROUP in life.world.engine.catalog.group_ids


@pytest.mark.parametrize("seed", seeds("checked timers", 10))
def test_a_check_finds_nothing_while_timers_change(seed: int) -> None:
    random = Random(seed)
    world = TimerWorld(
        FaultyDisk(Random(seed)),
        segment_bytes=SEGMENT,
        retention_bytes=3 * SEGMENT,
        checkpoint_log_bytes=SEGMENT // 2,
        timer=TIMERS,
    )

    def act() -> None:
        for _ in range(random.randint(0, 20)):
            world.schedule("t", delay_ms=random.choice((500, 60_000, DAY_MS)), size=500)
        if random.random() < 0.3:
            world.sleep(random.choice((100, 1_000, 11_000)))
        world.background(random.randint(1, 20))

    for _ in range(20):
        act()
    assert finish(check(BusySource(world.disk, act), TIMERS)).findings == []


class OneFile(BusySource):
    """A disk on which something happens after each read of one file."""

    def __init__(self, disk: FaultyDisk, name: str, act: Callable[[], None]) -> None:
        super().__init__(disk, act)
        self._name = name

    def open(self, name: str) -> BusyFile:
        file = super().open(name)
        if name != self._name:
            file.act = lambda: None
        return file

    def read(self, name: str) -> bytes | None:
        return self._disk.read(name)


def test_a_segment_that_is_dropped_during_the_check_is_not_damage() -> None:
    large = 2 << 20  # more than is read at once
    world = World(FaultyDisk(Random(0)), segment_bytes=large, checkpoint_log_bytes=large)
    for n in range(80):
        world.send(f"m{n}", size=60_000)
    world.checkpoint()
    first = world.disk.names("log")[0]

    def retire() -> None:
        if first in world.disk.names("log"):
            world.retire()

    report = finish(check(OneFile(world.disk, first, retire), TIMERS))
    assert first not in world.disk.names("log")
    assert report.findings == []


@pytest.mark.parametrize("folder", ["queues", "index", "snapshots"])
def test_a_file_that_is_deleted_during_the_check_is_not_damage(folder: str) -> None:
    world = World(FaultyDisk(Random(0)), segment_bytes=SEGMENT)
    world.send("m0")
    world.checkpoint()
    (name,) = world.disk.names(folder)

    def drop() -> None:
        if name in world.disk.names(folder):
            world.disk.cut(name, 40)
            world.disk.remove(name)

    found = finish(check(OneFile(world.disk, name, drop), TIMERS)).findings
    assert name not in [one.file for one in found]
