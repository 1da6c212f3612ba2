"""Freed bytes: the space of the log's files that returned to the disk, by how it returned.

The owner compares the files with those of the last call, at least before each count of live bytes.
A count precedes each deletion of a segment, so a pack and its later deletion are told apart. A
start begins again at 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import final

from tidemill.broker.engine.store.commit_log import CommitLog


class Freeing(StrEnum):
    """How the space of a file returned."""

    DELETED = "deleted"  # the oldest segment was removed
    PACKED = "packed"  # a pack with live messages replaced the segment
    EMPTIED = "emptied"  # a pack without a live message replaced the segment


@final
class FreedBytes:
    """The bytes that returned since the start."""

    def __init__(self, log: CommitLog) -> None:
        self._log = log
        self._sizes: dict[int, int] = {}  # of the files at the last call, by their begin
        self.counts: Counter[Freeing] = Counter()

    def note(self, live_bytes_in: Callable[[int], int]) -> None:
        """Compare the files with those of the last call."""
        log = self._log
        sizes: dict[int, int] = {one.start: one.file_size for one in (*log.held, *log.segments)}
        for start, before in self._sizes.items():
            freed = before - sizes.get(start, 0)
            if not freed or start >= log.log_end:
                continue  # A replica cuts the end of its log: its records come again.
            if start not in sizes:
                how = Freeing.DELETED
            else:
                how = Freeing.PACKED if live_bytes_in(start) else Freeing.EMPTIED
            self.counts[how] += freed
        self._sizes = sizes
