"""The segment after the active one, prepared before the log needs it.

A sync of a filled file is two to three times cheaper than that of a growing one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import final

from tidemill.broker.engine.store.disk import Disk, File
from tidemill.broker.engine.store.segment import FOLDER, PREPARED, Segment, segment_name

_TEMPORARY = f"{FOLDER}/{PREPARED}"


@final
class NextSegment:
    """Creates segments: in advance if there is time, else on demand."""

    def __init__(self, disk: Disk, *, segment_bytes: int, start: Callable[[], int]) -> None:
        """`start` returns the begin of the next segment."""
        self._disk = disk
        self._segment_bytes = segment_bytes
        self._start = start
        self._ready: Segment | None = None
        self._is_durable = False  # the file name of the ready segment

    @property
    def is_ready(self) -> bool:
        """Whether a segment is ready for the log."""
        return self._ready is not None

    def take(self) -> Segment:
        """Return the segment at the end of the log. Its name is durable."""
        segment, self._ready = self._ready, None
        if segment is None:
            # It was not prepared in time. An unfilled file is slower to sync, and correct.
            file = self._disk.open(segment_name(self._start()), create=True)
            file.resize(self._segment_bytes)
            file.sync()
            self._disk.folder(FOLDER).sync()
            return Segment(self._start(), self._segment_bytes, file)
        if not self._is_durable:
            # Otherwise a power cut could lose the name with its synced content.
            self._disk.folder(FOLDER).sync()
        assert segment.start == self._start(), "segments are contiguous"
        return segment

    def prepare(self, *, slice_bytes: int) -> Iterator[list[File]]:
        """Prepare the segment: create it, fill it, sync it, and give it its name.

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
        if self._start() != start:  # The log has passed this offset.
            file.close()
            self._disk.delete(_TEMPORARY)
            return
        yield from self._install(file, start)

    def _install(self, file: File, start: int) -> Iterator[list[File]]:
        """Give `file` the name of the segment at `start`, durably, and make it ready."""
        source, file.name = file.name, segment_name(start)
        self._disk.rename(source, file.name)
        # The log may need the file before its name is durable. It must find it and not create
        # another.
        self._ready = Segment(start, self._segment_bytes, file)
        self._is_durable = False
        yield [self._disk.folder(FOLDER)]
        self._is_durable = True

    def discard(self) -> None:
        """Delete the ready segment: the log has another end now."""
        segment, self._ready = self._ready, None
        if segment is not None:
            segment.close()
            self._disk.delete(segment.name)
            self._disk.folder(FOLDER).sync()

    def close(self) -> None:
        """Close and delete the ready segment.

        A start searches every segment behind the log end for records, and then deletes it. The
        search takes longer than the deletion. If the file stays, nothing is lost.
        """
        segment, self._ready = self._ready, None
        if segment is not None:
            segment.close()
            with contextlib.suppress(OSError):
                self._disk.delete(segment.name)
