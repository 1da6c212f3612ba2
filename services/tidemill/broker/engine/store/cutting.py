"""Removal of the end of a log, so that no part of it ever comes back."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.broker.engine.store.disk import Disk, File, ReadFailed
from tidemill.broker.engine.store.mappings import Mappings
from tidemill.broker.engine.store.segment import BLOCK_BYTES, FOLDER, Segment

ERASE_BYTES = 1 << 20  # bytes of one write


def drop_segments_from(disk: Disk, views: Mappings, segments: list[Segment], end: int) -> None:
    """Delete the segments that begin at `end` or later, durably; never the oldest segment.

    Delete the last one first: a power cut in between must not leave a hole.
    """
    behind = [one for one in reversed(segments[1:]) if one.start >= end]
    for segment in behind:
        segments.remove(segment)
        segment.close()
        views.forget(segment.name)
        disk.delete(segment.name)
    if behind:
        disk.folder(FOLDER).sync()


def erase(file: File, begin: int, end: int) -> None:
    """Write zeros between two bytes of a segment; a sync makes them durable.

    The file keeps its size: a power cut in between must not leave a segment that looks cut. Ranges
    that are zero already stay unwritten. Writing them would allocate space, and a start on a full
    disk would fail.
    """
    for at in range(begin, end, ERASE_BYTES):
        for first, size in _written(file, at, min(ERASE_BYTES, end - at)):
            file.write_at(first, [bytes(size)])


def _written(file: File, begin: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a file, in blocks, that are not all zeros or cannot be read."""
    try:
        data = file.read_at(begin, size)
    except ReadFailed:
        yield begin, size
        return
    if not data.strip(b"\0"):
        return
    first, at, end = begin, begin, begin + size
    while at < end:
        stop = min((at // BLOCK_BYTES + 1) * BLOCK_BYTES, end)
        if not data[at - begin : stop - begin].strip(b"\0"):
            if first < at:
                yield first, at - first
            first = stop
        at = stop
    if first < end:
        yield first, end - first
