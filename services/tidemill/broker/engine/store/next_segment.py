"""The segment that follows the active one, made ready before the log needs it.

A filled file makes each later sync two to three times cheaper than a growing one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import final

from tidemill.broker.engine.layout import record
from tidemill.broker.engine.store.disk import Disk, File
from tidemill.broker.engine.store.segment import FOLDER, PREPARED, Segment, segment_name

_TEMPORARY = f"{FOLDER}/{PREPARED}"


@final
class NextSegment:
    """Makes segments: beforehand where there was time, else at once."""

    def __init__(self, disk: Disk, *, segment_bytes: int, start: Callable[[], int]) -> None:
        """`start` says where the next segment begins as the log stands."""
        self._disk = disk
        self._segment_bytes = segment_bytes
        self._start = start
        self._ready: Segment | None = None
        self._is_durable = False  # its name

    @property
    def is_ready(self) -> bool:
        """Whether one is there for the log to take."""
        return self._ready is not None

    def take(self) -> Segment:
        """Return the segment that begins where the log ends; its name is durable."""
        segment, self._ready = self._ready, None
        if segment is None:
            # Nobody prepared it in time: an unfilled file is slower to sync, and right.
            file = self._disk.open(segment_name(self._start()), create=True)
            file.resize(self._segment_bytes)
            file.sync()
            self._disk.folder(FOLDER).sync()
            return Segment(self._start(), self._segment_bytes, file)
        if not self._is_durable:
            # Else what is synced into it could be lost with its name.
            self._disk.folder(FOLDER).sync()
        assert segment.start == self._start(), "segments are contiguous"
        return segment

    def prepare(self, *, slice_bytes: int) -> Iterator[list[File]]:
        """Make it ready: created, filled, durable, and under its own name.

        Yields after each slice the files to sync before the next one.
        """
        start = self._start()
        file = self._disk.open(_TEMPORARY, create=True)
        zeros = bytes(slice_bytes)
        for at in range(0, self._segment_bytes, slice_bytes):
            size = min(slice_bytes, self._segment_bytes - at)
            file.write_at(at, [zeros[:size]])
            yield [file]
            if self._start() != start:
                break
        if self._start() != start:  # The log was faster.
            file.close()
            self._disk.delete(_TEMPORARY)
            return
        yield from self._install(file, start)

    def may_reuse(self, segment: Segment) -> bool:
        """Whether the file of a segment that the log has given up would do as the next one."""
        is_of_size = segment.size == self._segment_bytes
        return self._ready is None and is_of_size and segment.pad_at is not None

    def reuse(self, segment: Segment) -> Iterator[list[File]]:
        """Make the file of a segment that the log has given up the next one."""
        assert segment.pad_at is not None, "somebody has looked"
        # What it holds stays readable by nobody: every record in it names another position. A pad
        # does not: behind a lost record it would pass for the end of the next use. Until the name
        # is gone, durably, it is the end of this one.
        self._disk.rename(segment.name, _TEMPORARY)
        file = self._disk.open(_TEMPORARY)
        yield [self._disk.folder(FOLDER)]
        erased = bytes(min(record.PAD.size, self._segment_bytes - segment.pad_at))
        file.write_at(segment.pad_at, [erased])
        yield [file]
        yield from self._install(file, self._start())

    def _install(self, file: File, start: int) -> Iterator[list[File]]:
        """Give `file` the name of the segment that begins at `start`, durably; keep it ready."""
        source, file.name = file.name, segment_name(start)
        self._disk.rename(source, file.name)
        # The log may roll before the name is durable, and must then find the file and not make it.
        self._ready = Segment(start, self._segment_bytes, file)
        self._is_durable = False
        yield [self._disk.folder(FOLDER)]
        self._is_durable = True

    def discard(self) -> None:
        """Delete what is ready: the log no longer ends where it would begin."""
        segment, self._ready = self._ready, None
        if segment is not None:
            segment.close()
            self._disk.delete(segment.name)
            self._disk.folder(FOLDER).sync()

    def close(self) -> None:
        """Close its file; nothing is written."""
        if self._ready is not None:
            self._ready.close()
