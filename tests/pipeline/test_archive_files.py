"""Files of an archive: damage on disk, read order, and deletion.

Without a Spark session: the job's tasks run in the test process.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from tests.support.worlds.archiving import NOW_MS, ArchiveWorld
from tests.support.worlds.fake_cluster import FIRST_STORED_AT_MS, FakeCluster
from tests.support.worlds.micro_batches import Stream, read_batch
from tidemill.common.times import utc
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill_pipeline.archive import writing
from tidemill_pipeline.archive.manifest import Archive
from tidemill_pipeline.archive.reading import BATCH_BYTES, first_offset_at, read_range
from tidemill_pipeline.archive.store import SNAPSHOT_ENTRIES, ArchiveStore
from tidemill_pipeline.cli import app
from tidemill_pipeline.errors import AnotherWriter, ArchiveError, BadOption
from tidemill_pipeline.jobs.archive_upkeep import YoungFiles, compact, expire, look_waiting, vacuum
from tidemill_pipeline.jobs.archive_verify import verify

DAY_MS = 86_400_000
HOUR_MS = 3_600_000
FAR_MS = 100_000_000_000_000  # The year 5138, later than any clock.


def put_noise(cluster: FakeCluster, count: int, size: int, *, seed: int = 1) -> None:
    """Store bodies that do not compress."""
    source = random.Random(seed)
    for _ in range(count):
        message = v2.Message(topic=v2.Resource(name="orders"), body=source.randbytes(size))
        message.system_properties.store_timestamp.FromMilliseconds(FIRST_STORED_AT_MS)
        cluster.put(message, "a")


def test_a_batch_of_large_bodies_has_few_of_them(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    """The memory of a reader does not depend on the size of bodies."""
    put_noise(cluster, 40, 1 << 20)
    archive.append()
    store = ArchiveStore(archive.path)
    manifest = store.archive()
    ((key, queue),) = manifest.queues.items()
    batches = list(
        read_range(
            store,
            manifest.holding(key, 0, queue.end),
            key,
            start=0,
            end=queue.end,
            columns=["queue_offset", "body"],
        )
    )
    assert sum(batch.num_rows for batch in batches) == 40
    assert max(batch.nbytes for batch in batches) < 2 * BATCH_BYTES


def test_a_few_large_bodies_behind_many_small_ones_are_no_large_batch(
    cluster: FakeCluster, archive: ArchiveWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The average row of a file does not show a few large bodies."""
    monkeypatch.setattr(writing, "GROUP_ROWS", 100)
    cluster.add("orders", "a", 0, 2_000)
    put_noise(cluster, 40, 1 << 20)
    archive.job(batch_rows=10_000, task_rows=10_000).append()
    ((key, queue),) = archive.manifest().queues.items()
    (file,) = archive.manifest().holding(key, 0, queue.end)
    columns = ["queue_offset", "body"]
    store = ArchiveStore(archive.path)
    batches = list(read_range(store, [file], key, start=0, end=queue.end, columns=columns))
    assert sum(batch.num_rows for batch in batches) == 2_040
    assert max(batch.nbytes for batch in batches) < 2 * BATCH_BYTES


class ExtendedArchiveStore(ArchiveStore):
    """An archive that another process extends before the second read."""

    def __init__(self, path: str, append: Callable[[], object]) -> None:
        super().__init__(path)
        self._append, self._looks = append, 0

    def archive(self) -> Archive:
        self._looks += 1
        if self._looks == 2:
            self._append()
        return super().archive()


@pytest.mark.parametrize("is_gone", [False, True])
def test_messages_archived_during_a_verification_do_not_count_as_beyond_the_end(
    cluster: FakeCluster, archive: ArchiveWorld, *, is_gone: bool
) -> None:
    def append() -> None:
        cluster.add("orders", "a", 0, 20)
        archive.append()

    cluster.add("orders", "a", 0, 100)
    archive.append()
    verified = verify(
        archive.job(store=ExtendedArchiveStore(archive.path, append), store_is_gone=is_gone)
    )
    assert (verified.wrong, verified.closed) == ([], [])
    (queue,) = archive.manifest().queues.values()
    assert (queue.end, queue.sealed) == (120, 100)


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("place", ["middle", "header", "zeros"])
def test_a_body_that_the_disk_changed_is_neither_sealed_nor_handed_out(
    cluster: FakeCluster, archive: ArchiveWorld, place: str
) -> None:
    put_noise(cluster, 20, 2_000)
    archive.append()
    (path,) = archive.files()
    group = pq.ParquetFile(path).metadata.row_group(0)
    columns = [group.column(i) for i in range(group.num_columns)]
    (column,) = [each for each in columns if each.path_in_schema == "body"]
    data = bytearray(path.read_bytes())
    begin, size = column.data_page_offset, column.total_compressed_size
    match place:
        case "middle":
            data[begin + size // 2] ^= 1
        case "header":
            data[begin + 1] ^= 1
        case _:
            data[begin + size // 3 : begin + size // 3 + 128] = bytes(128)
    path.write_bytes(data)
    (wrong,) = archive.verify().wrong
    assert path.name in wrong
    assert archive.sealed() == [("orders", 0, 20)]
    with pytest.raises(ArchiveError, match=path.name):
        archive.read()


def test_a_file_with_a_changed_column_is_not_sealed(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    cluster.add("orders", "a", 0, 20)
    archive.append()
    (path,) = archive.files()
    whole = path.read_bytes()
    group = pq.ParquetFile(path).metadata.row_group(0)
    for column in map(group.column, range(group.num_columns)):
        begin = column.dictionary_page_offset or column.data_page_offset
        data = bytearray(whole)
        # Not every bit of a page header has a meaning. Every bit behind the header does.
        data[begin + column.total_compressed_size - 1] ^= 1
        path.write_bytes(data)
        assert archive.verify().wrong, column.path_in_schema
    path.write_bytes(whole)
    assert archive.verify().wrong == []
    assert archive.sealed() == [("orders", 20, 20)]


def test_verification_finds_a_body_of_another_row_in_intact_pages(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    """Pages and footer have the right checksums."""
    put_noise(cluster, 20, 100)
    archive.append()
    (path,) = archive.files()
    table = pq.read_table(path)
    at = table.schema.get_field_index("body")
    bodies = table["body"].to_pylist()
    bodies[7] = b"another"
    pq.write_table(table.set_column(at, table.schema.field(at), [bodies]), path)
    archive.accept_files()
    (wrong,) = archive.verify().wrong
    assert "offset 7 of queue 0 of orders" in wrong
    with pytest.raises(ArchiveError, match="offset 7"):
        archive.read()


@pytest.mark.parametrize("first", [0, 700])
def test_rows_that_a_footer_hides_are_missed(
    cluster: FakeCluster, archive: ArchiveWorld, first: int
) -> None:
    """If the statistics exclude the range, a reader skips the row group."""
    cluster.add("orders", "a", 0, 778)
    archive.job(batch_rows=1000, task_rows=1000).append()
    assert archive.verify().wrong == []
    (path,) = archive.files()
    data = path.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    last, nowhere = (777).to_bytes(8, "little"), (-1).to_bytes(8, "little", signed=True)
    assert last in data[footer:]
    path.write_bytes(data[:footer] + data[footer:].replace(last, nowhere))
    with pytest.raises(ArchiveError, match="its footer does not match the checksum"):
        archive.read()
    archive.accept_files()
    with pytest.raises(ArchiveError, match=f"it has 0 rows of .* at offsets from {first} to 778"):
        archive.read(startingOffsets=json.dumps({"orders": {"a": {"0": first}}}))


# ---------------------------------------------------------------- deletion of files


def test_a_file_goes_a_day_after_the_entry_that_let_it_go(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    cluster.add("orders", "a", 0, 40)
    archive.append()
    files = archive.files()
    for path in files:
        os.utime(path, (NOW_MS / 1000 - 9 * DAY_MS / 1000,) * 2)
    assert archive.compact() == (len(files), 1)
    assert vacuum(archive.job(now_ms=NOW_MS + DAY_MS // 2)) == 0
    assert all(path.exists() for path in files)
    assert vacuum(archive.job(now_ms=NOW_MS + DAY_MS + HOUR_MS)) == len(files)
    assert len(archive.bodies()[0]) == 40


def test_a_vacuum_reports_young_files_and_the_first_due_time(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    """Count released files and files without an entry."""
    cluster.add("orders", "a", 0, 40)
    archive.append()
    assert look_waiting(archive.job()) == YoungFiles(files=0, first_due_at_ms=None)

    def vacuum_output() -> str:
        return CliRunner().invoke(app, ["archive-vacuum", "--to", archive.path]).output

    assert vacuum_output() == "0 files deleted\n"
    files = archive.files()
    compact(archive.job(now_ms=FAR_MS))
    due_at_ms = max(archive.manifest().released_at_ms.values()) + DAY_MS
    assert vacuum_output() == (
        f"0 files deleted; {len(files)} files wait for a day, the first of them until"
        f" {utc(due_at_ms)}\n"
    )
    orphan = files[0].with_name("RUN-orphan.parquet")
    shutil.copy(files[0], orphan)
    os.utime(orphan, (NOW_MS / 1000,) * 2)
    both = YoungFiles(files=len(files) + 1, first_due_at_ms=NOW_MS + DAY_MS)
    assert look_waiting(archive.job(now_ms=NOW_MS + DAY_MS - HOUR_MS)) == both
    alone = YoungFiles(files=len(files), first_due_at_ms=due_at_ms)
    assert look_waiting(archive.job(now_ms=NOW_MS + DAY_MS)) == alone
    assert vacuum(archive.job(now_ms=NOW_MS + DAY_MS)) == 1
    assert look_waiting(archive.job(now_ms=due_at_ms - HOUR_MS)) == alone
    assert vacuum(archive.job(now_ms=due_at_ms)) == len(files)


# ---------------------------------------------------------------- order


def offsets(archive: ArchiveWorld) -> list[int]:
    return [row["queue_offset"] for row in archive.read()]


def test_a_compaction_around_a_large_file_keeps_the_order_and_ends(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:

    def append() -> None:
        archive.job(batch_rows=10**6, task_rows=10**6).append()

    cluster.add("orders", "a", 0, 50)
    append()
    put_noise(cluster, 60, 5_000)
    append()
    cluster.add("orders", "a", 0, 50)
    append()
    before = len(archive.manifest().files)
    removed, made = compact(archive.job(), bytes_max=400_000)
    assert 1 < removed < before
    assert made < removed
    assert offsets(archive) == list(range(160))
    spans = [
        [(span.start, span.end) for span in file.spans]
        for file in archive.manifest().files.values()
    ]
    assert all(high - low <= 60 for each in spans for low, high in each), "none is around another"
    assert archive.verify().wrong == []
    assert compact(archive.job(), bytes_max=400_000) == (0, 0)


def test_well_compressed_files_are_compacted_once(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    for _ in range(4):
        cluster.add("orders", "a", 0, 50, body_size=20_000)
        archive.append()
    before = len(archive.manifest().files)
    assert before >= 4
    # A million before compression; a tenth of that on the disk.
    assert compact(archive.job(), bytes_max=1_000_000) == (before, 1)
    assert compact(archive.job(), bytes_max=1_000_000) == (0, 0)
    assert len(archive.bodies()[0]) == 200


def test_a_clock_that_went_back_an_hour_does_not_change_the_order(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    for hour in (1, 2, 1, 2, 3):
        cluster.add("orders", "a", 0, 10, stored_at_ms=FIRST_STORED_AT_MS + hour * HOUR_MS)
    archive.append()
    assert offsets(archive) == list(range(50))
    archive.compact()
    assert offsets(archive) == list(range(50))
    store = ArchiveStore(archive.path)
    (key,) = store.archive().queues
    late_ms = FIRST_STORED_AT_MS + 2 * HOUR_MS
    assert first_offset_at(store, store.archive(), key, late_ms) == 10


def test_two_topics_of_a_name_are_not_mixed_by_a_compaction(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    cluster.add("orders", "a", 0, 40)
    archive.append()
    cluster.delete("orders")
    cluster.add("orders", "a", 0, 40, body_size=20)
    archive.append()
    before = archive.bodies()
    archive.compact()
    assert len(archive.manifest().files) == 2
    assert archive.bodies() == before
    assert archive.compact() == (0, 0)


# ---------------------------------------------------------------- bodies that are packed


def by_offset(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: row["queue_offset"])


def test_a_packed_body_is_the_same_by_both_roads(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    texts = [b"plain text" * 9, b"not packed at all", b"more" * 50]
    for number, text in enumerate(texts):
        body = text if number == 1 else gzip.compress(text)
        message = v2.Message(topic=v2.Resource(name="orders"), body=body)
        encoding = v2.IDENTITY if number == 1 else v2.GZIP
        message.system_properties.body_encoding = encoding
        cluster.put(message, "a")
    packed = [
        message.body for message in cluster.brokers["a"].queues["orders", 0].messages if message
    ]
    archive.append()
    cluster.add("orders", "a", 0, 1)
    for mode in ("archive", "auto"):
        rows = by_offset(archive.read(readMode=mode))
        assert [row["body"] for row in rows][:3] == texts
        raw = archive.read(readMode=mode, bodyEncoding="raw")
        assert [row["body"] for row in by_offset(raw)][:3] == packed


# ---------------------------------------------------------------- options


def test_a_job_that_is_to_archive_a_part_is_refused(archive: ArchiveWorld) -> None:
    with pytest.raises(BadOption, match="remove startingOffsets or startingTimestamp and filter"):
        archive.job(startingOffsets="latest", filter="a")


# ---------------------------------------------------------------- the manifest


class CountingStore(ArchiveStore):
    """An archive store that counts reads of the manifest."""

    reads = 0

    def _read(self, path: str) -> str:
        text = super()._read(path)
        CountingStore.reads += 1
        return text


def test_a_manifest_is_read_from_its_last_snapshot_on_and_each_entry_once(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    entries = SNAPSHOT_ENTRIES + 10
    job = archive.job()
    cluster.add("orders", "a", 0, 1)
    job.append()
    for _ in range(entries - 1):
        job.commit("append")
    whole = archive.manifest()
    assert whole.next_number == entries
    CountingStore.reads = 0
    store = CountingStore(archive.path)
    assert store.archive() == whole
    assert CountingStore.reads == 11, "a snapshot, and ten entries"
    cluster.add("orders", "a", 0, 1)
    archive.job(store=store).append()
    assert CountingStore.reads == 12, "and the one that it wrote itself"
    # The same without the snapshot.
    for path in (Path(archive.path) / "manifest").glob("*.snapshot.json"):
        path.unlink()
    assert archive.manifest() == store.archive()


class FullStore(ArchiveStore):
    """An archive store without room for a snapshot."""

    def _put(self, path: str, text: bytes) -> None:
        if path.endswith(".snapshot.json"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        super()._put(path, text)


def test_a_snapshot_that_cannot_be_written_takes_nothing_with_it(
    cluster: FakeCluster, archive: ArchiveWorld, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.add("orders", "a", 0, 1)
    archive.append()
    for _ in range(SNAPSHOT_ENTRIES - 2):
        archive.job().commit("append")
    assert caplog.text == ""
    cluster.delete("orders")
    done = archive.job(store=FullStore(archive.path)).append()
    assert len(done.over) == 1, "the report names it once"
    assert "cannot write a snapshot of the manifest: [Errno 28] No space" in caplog.text
    assert archive.manifest().next_number == SNAPSHOT_ENTRIES
    archive.job().commit("append")
    assert list((Path(archive.path) / "manifest").glob("*.snapshot.json"))


def test_another_archive_at_the_same_place_is_not_taken_for_the_one_before(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    cluster.add("orders", "a", 0, 3)
    archive.append()
    store = ArchiveStore(archive.path)
    (before,) = store.archive().queues.values()
    assert before.end == 3
    shutil.rmtree(archive.path)
    cluster.delete("orders")
    for end in (1, 2):
        cluster.add("orders", "a", 0, 1)
        archive.append()
        (now,) = store.archive().queues.values()
        assert now.end == end
    shutil.rmtree(archive.path)
    assert store.archive().queues == {}


@pytest.mark.parametrize("mode", ["archive", "auto"])
def test_a_folder_that_is_away_is_an_error_and_nothing_is_read_twice_when_it_is_back(
    cluster: FakeCluster, tmp_path: Path, mode: str
) -> None:
    to, away = tmp_path / "archive", tmp_path / "away"
    given = {"topic": "orders", "archivePath": str(to), "readMode": mode, "failOnDataLoss": "false"}
    cluster.add("orders", "a", 0, 30)
    with pytest.raises(ArchiveError, match="there is no archive at"):
        read_batch(cluster, **given)
    job = ArchiveWorld(cluster, to).job()
    job.append()
    stream = Stream(cluster, **given)
    assert len(stream.run()) == 30
    to.rename(away)
    for reader in (stream.run, lambda: read_batch(cluster, **given)):
        with pytest.raises(ArchiveError, match="the volume is not mounted"):
            reader()
    # A continuous archiver does not create a second archive below the folder.
    with pytest.raises(ArchiveError, match="the volume is not mounted"):
        job.append()
    assert not to.exists()
    away.rename(to)
    assert job.append().rows == 0
    assert stream.run() == []
    assert len(read_batch(cluster, **given)) == 30


class StoppedStore(ArchiveStore):
    """An archive store that still has the manifest of the time when its process was stopped."""

    is_stopped = False

    def archive(self) -> Archive:
        return self._archive if self.is_stopped and self._archive else super().archive()


def test_entries_before_a_snapshot_are_deleted_and_their_numbers_are_not_given_again(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    store = StoppedStore(archive.path)
    stopped = archive.job(store=store)
    cluster.add("orders", "a", 0, 1)
    stopped.append()
    store.is_stopped = True
    other = archive.job()
    cluster.add("orders", "a", 0, 1)
    other.append()
    for _ in range(SNAPSHOT_ENTRIES + 9):
        other.commit("append")
    before = archive.bodies()
    # A job of a later year regards the files of today as old.
    assert vacuum(archive.job(now_ms=2 * NOW_MS)) == SNAPSHOT_ENTRIES - 1
    assert archive.bodies() == before
    # The next number of the stopped process is free again.
    with pytest.raises(AnotherWriter):
        stopped.commit("append")
    assert archive.bodies() == before
    assert archive.append().rows == 0


def test_verify_all_reads_sealed_ranges_again(cluster: FakeCluster, archive: ArchiveWorld) -> None:
    cluster.add("orders", "a", 0, 30, body_size=500)
    archive.append()
    first = verify(archive.job())
    assert (first.wrong, first.unread) == ([], 0)
    again = verify(archive.job())
    assert (again.wrong, again.unread) == ([], 30)
    assert verify(archive.job(), is_all=True).unread == 0
    path = archive.files()[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert verify(archive.job()).wrong == [], "it was sealed"
    (wrong,) = verify(archive.job(), is_all=True).wrong
    assert path.name in wrong
    # Released entries do not have files.
    expire(archive.job(), before_ms=2**50)
    assert verify(archive.job(), is_all=True).wrong == []
