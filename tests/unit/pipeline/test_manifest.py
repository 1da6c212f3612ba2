"""The manifest: entries follow each other, or are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tidemill.pipeline.archive.manifest import (
    DataFile,
    Entry,
    QueueKey,
    Range,
    Span,
    expiring,
    fold,
    sealing,
)
from tidemill.pipeline.errors import ArchiveError

KEY = QueueKey("", "orders", "broker-a", 0, "log/1")
OTHER = KEY._replace(queue_id=1)


def a_range(start: int, end: int, *, key: QueueKey = KEY, at_ms: int = 0) -> Range:
    return Range(
        key=key, start=start, end=end, rows=end - start, bytes=10, min_store_ms=at_ms,
        max_store_ms=at_ms, crc_xor=start,
    )  # fmt: skip


def a_file(path: str, start: int, end: int, *, key: QueueKey = KEY) -> DataFile:
    span = Span(key=key, start=start, end=end, rows=end - start)
    return DataFile(path=path, bytes=100, rows=end - start, max_store_ms=0, spans=(span,))


def entry(number: int, *ranges: Range, **more: object) -> Entry:
    made = Entry(number=number, kind="append", at_ms=1, run="r", schema_version=1, ranges=ranges)
    return replace(made, **more)  # type: ignore[arg-type]  # Fields by name.


def test_an_entry_is_read_as_it_was_written() -> None:
    written = entry(3, a_range(0, 5), files=(a_file("a", 0, 5),), removed=("b",), marks=((KEY, 4),))
    assert Entry.from_json(written.as_json()) == written


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
def test_what_does_not_follow_is_refused(second: Entry) -> None:
    with pytest.raises(ArchiveError):
        fold([entry(0, a_range(3, 5)), second])


def test_only_what_is_verified_without_a_gap_is_sealed() -> None:
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
                0, a_range(0, 5, at_ms=10), a_range(5, 9, at_ms=20),
                a_range(0, 4, key=OTHER, at_ms=30), files=files,
            )
        ]
    )  # fmt: skip
    marks, gone = expiring(archive, before_ms=20, topics=())
    assert (marks, gone) == (((KEY, 5),), ("a",))
    archive.apply(entry(1, kind="expire", marks=marks, removed=gone))
    assert archive.queues[KEY].start == 5
    assert archive.queues[KEY].end == 9
    assert expiring(archive, before_ms=20, topics=()) == ((), ())
    assert expiring(archive, before_ms=99, topics=["payments"]) == ((), ())
