"""The manifest: entries follow each other, or are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tidemill_pipeline.archive import snapshot
from tidemill_pipeline.archive.manifest import (
    ArchivedRange,
    DataFile,
    FileSpan,
    ManifestEntry,
    QueueKey,
    expiring,
    fold,
    sealing,
    with_crc,
)
from tidemill_pipeline.errors import ArchiveError

KEY = QueueKey("", "orders", "broker-a", 0, "log/1")
OTHER = KEY._replace(queue_id=1)


def a_range(start: int, end: int, *, key: QueueKey = KEY, at_ms: int = 0) -> ArchivedRange:
    return ArchivedRange(
        key=key,
        start=start,
        end=end,
        rows=end - start,
        bytes=10,
        min_store_ms=at_ms,
        max_store_ms=at_ms,
        crc_xor=start,
        last_offset=end - 1,
        last_store_ms=at_ms,
    )


def a_file(path: str, start: int, end: int, *, key: QueueKey = KEY) -> DataFile:
    span = FileSpan(key=key, start=start, end=end, rows=end - start)
    return DataFile(
        path=path, bytes=100, rows=end - start, max_store_ms=0, spans=(span,), footer_crc=4711
    )


def entry(number: int, *ranges: ArchivedRange, **more: object) -> ManifestEntry:
    made = ManifestEntry(
        number=number, kind="append", at_ms=1, run="r", schema_version=1, ranges=ranges
    )
    return replace(made, **more)  # type: ignore[arg-type]  # Fields by name.


def test_an_entry_is_read_as_it_was_written() -> None:
    written = entry(3, a_range(0, 5), files=(a_file("a", 0, 5),), removed=("b",), marks=((KEY, 4),))
    assert ManifestEntry.from_json(written.as_json()) == written


# Golden texts: the manifest on disk has this form. A change of them needs a new version.
ENTRY_TEXT = (
    '{"at_ms":1,"closed":[],"files":[{"bytes":100,"footer_crc":4711,"max_store_ms":0,"path":"a"'
    ',"rows":5,"spans":[{"end":5,"key":["","orders","broker-a",0,"log/1"],"rows":5,"start":0}]}'
    '],"kind":"append","marks":[],"number":0,"ranges":[{"bytes":10,"crc_xor":0,"end":5,"key":["'
    '","orders","broker-a",0,"log/1"],"last_offset":4,"last_store_ms":0,"lost":0,"max_store_ms"'
    ':0,"min_store_ms":0,"rows":5,"start":0}],"removed":[],"run":"r","schema_version":1,"v":1,"'
    'crc":1800450615}'
)
SNAPSHOT_TEXT = (
    '{"v":1,"next":3,"queues":[[["","orders","broker-a",0,"log/1"],0,9,5,[[0,5]],[[0,5,5,10,0,0'
    ',0,0,4,0],[5,9,4,10,0,0,5,0,8,0]]]],"files":[["b",100,9,0,[[0,0,9,9]],4711]],"letGo":{"a":'
    '1},"deleted":{},"crc":1398356031}'
)


def entries() -> list[ManifestEntry]:
    return [
        entry(0, a_range(0, 5), files=(a_file("a", 0, 5),)),
        entry(1, kind="seal", marks=((KEY, 5),), closed=((KEY, 0, 5),)),
        entry(2, a_range(5, 9), files=(a_file("b", 0, 9),), removed=("a",)),
    ]


def test_entries_and_snapshots_have_a_fixed_form() -> None:
    assert entries()[0].as_json() == ENTRY_TEXT
    assert ManifestEntry.from_json(ENTRY_TEXT) == entries()[0]
    archive = fold(entries())
    assert snapshot.as_json(archive) == SNAPSHOT_TEXT
    assert snapshot.from_json(SNAPSHOT_TEXT) == archive


def test_an_entry_needs_its_version_checksum_and_kind() -> None:
    for changed in (
        ENTRY_TEXT.replace('"at_ms":1,', '"at_ms":2,'),
        ENTRY_TEXT[: ENTRY_TEXT.index(',"crc"')] + "}",
        ENTRY_TEXT.replace('"v":1', '"v":3'),
    ):
        with pytest.raises(ArchiveError, match="the file is damaged"):
            ManifestEntry.from_json(changed)
    with pytest.raises(ArchiveError, match="a manifest entry of version 2"):
        ManifestEntry.from_json(resigned(ENTRY_TEXT.replace('"v":1', '"v":2')))
    with pytest.raises(ArchiveError, match="unknown kind seel"):
        ManifestEntry.from_json(resigned(ENTRY_TEXT.replace("append", "seel")))


def resigned(text: str) -> str:
    """Return a changed text with the checksum that it needs."""
    return with_crc(text.rpartition(',"crc":')[0] + "}")


def test_sealed_ranges_of_an_hour_become_one() -> None:
    hour = 3_600_000
    stored = [0, 1, hour, hour + 5, 2 * hour]
    ranges = [a_range(i * 10, i * 10 + 10, at_ms=at_ms) for i, at_ms in enumerate(stored)]
    archive = fold([entry(0, *ranges), entry(1, kind="seal", marks=((KEY, 40),))])
    queue = archive.queues[KEY]
    assert [(each.start, each.end, each.rows) for each in queue.ranges] == [
        (0, 20, 20),
        (20, 40, 20),
        (40, 50, 10),
    ]
    assert queue.ranges[0].crc_xor == ranges[0].crc_xor ^ ranges[1].crc_xor
    assert queue.unsealed() == ranges[4:]


def test_an_entry_that_does_not_follow_changes_nothing() -> None:
    archive = fold([entry(0, a_range(0, 5), files=(a_file("a", 0, 5),))])
    before = snapshot.as_json(archive)
    with pytest.raises(ArchiveError):
        archive.apply(entry(1, a_range(5, 9), removed=("a", "nothing")))
    assert snapshot.as_json(archive) == before


def test_ranges_follow_each_other() -> None:
    archive = fold([entry(0, a_range(3, 5), files=(a_file("a", 3, 5),)), entry(1, a_range(5, 9))])
    queue = archive.queues[KEY]
    assert (queue.start, queue.end, queue.sealed) == (3, 9, 3)
    assert [file.path for file in archive.holding(KEY, 4, 5)] == ["a"]
    assert archive.holding(KEY, 5, 9) == []


@pytest.mark.parametrize(
    "second",
    [
        entry(1, a_range(6, 9)),  # a gap
        entry(1, a_range(4, 9)),  # an overlap
        entry(2, a_range(5, 9)),  # an entry is missing
        entry(1, a_range(5, 5)),  # nothing
        entry(1, removed=("b",)),
        entry(1, kind="seal", marks=((OTHER, 4),)),
    ],
)
def test_an_entry_with_a_gap_is_rejected(second: ManifestEntry) -> None:
    with pytest.raises(ArchiveError):
        fold([entry(0, a_range(3, 5)), second])


def test_only_verified_ranges_without_a_gap_are_sealed() -> None:
    first, second, third = a_range(0, 5), a_range(5, 9), a_range(9, 12)
    archive = fold([entry(0, first, second, third)])
    assert sealing(archive, [third, first]) == ((KEY, 5),)
    archive.apply(entry(1, kind="seal", marks=((KEY, 5),)))
    assert archive.queues[KEY].unsealed() == [second, third]
    assert sealing(archive, [third, second]) == ((KEY, 12),)


def test_whole_ranges_expire_and_files_go_with_their_last_one() -> None:
    files = (a_file("a", 0, 5), a_file("b", 5, 9), a_file("c", 0, 4, key=OTHER))
    archive = fold(
        [
            entry(
                0,
                a_range(0, 5, at_ms=10),
                a_range(5, 9, at_ms=20),
                a_range(0, 4, key=OTHER, at_ms=30),
                files=files,
            )
        ]
    )
    marks, gone = expiring(archive, before_ms=20, namespace="", topics=())
    assert (marks, gone) == (((KEY, 5),), ("a",))
    archive.apply(entry(1, kind="expire", marks=marks, removed=gone))
    assert archive.queues[KEY].start == 5
    assert archive.queues[KEY].end == 9
    assert expiring(archive, before_ms=20, namespace="", topics=()) == ((), ())
    assert expiring(archive, before_ms=99, namespace="", topics=["payments"]) == ((), ())
    # When all of it is gone its end is known still, and when what stood there was stored.
    last = archive.queues[KEY].last_before(9)
    assert last is not None
    marks, gone = expiring(archive, before_ms=99, namespace="", topics=["orders"])
    archive.apply(entry(2, kind="expire", marks=marks, removed=gone))
    assert archive.queues[KEY].ranges == []
    assert archive.queues[KEY].last_before(9) == last
    assert snapshot.from_json(snapshot.as_json(archive)).queues == archive.queues
    archive.apply(entry(3, a_range(9, 12, at_ms=100)))
    assert archive.queues[KEY].last_before(12) == archive.queues[KEY].ranges[-1]
