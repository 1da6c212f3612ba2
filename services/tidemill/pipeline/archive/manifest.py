"""The manifest of an archive: entries in order, and what they make together.

Pure. An entry is a file of its own, `manifest/00000000000000000012.json`, whose number nobody else
can take; the fold of all of them is the archive. A data file that no entry names is not part of it,
so a process that is killed before its entry leaves nothing behind that a reader would see.

A queue is archived in ranges of offsets that follow each other without gap or overlap; the end of
the last is where the next batch begins. An entry that does not follow is refused by the fold.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple, TypeAlias, final

from tidemill.pipeline.errors import ArchiveError

VERSION: Final = 1  # of an entry

Kind = Literal["append", "seal", "compact", "expire"]


class QueueKey(NamedTuple):
    """One queue, for as long as its offsets mean the same: see `offsets.QueueEnds.incarnation`."""

    namespace: str
    topic: str
    broker: str
    queue_id: int
    incarnation: str

    def __str__(self) -> str:
        return f"queue {self.queue_id} of {self.topic} at {self.broker}"


Marks: TypeAlias = tuple[tuple[QueueKey, int], ...]  # an offset of each queue


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """What one batch archived of one queue: a row of the manifest."""

    key: QueueKey
    start: int
    end: int
    rows: int
    bytes: int  # of bodies
    min_store_ms: int
    max_store_ms: int
    crc_xor: int  # of body_crc32 of all rows
    # Offsets that were gone before they could be archived; rows lie behind them.
    lost: int = 0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What one file has of one queue: rows between these offsets, and none of others."""

    key: QueueKey
    start: int
    end: int
    rows: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A Parquet file, sorted by broker group, queue and offset."""

    path: str  # below the archive
    bytes: int
    rows: int
    max_store_ms: int
    spans: tuple[Span, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One commit."""

    number: int
    kind: Kind
    at_ms: int
    run: str
    schema_version: int
    ranges: tuple[Range, ...] = ()
    files: tuple[DataFile, ...] = ()
    removed: tuple[str, ...] = ()  # paths that count no more
    # Of seal: what is sealed of each queue ends there. Of expire: what is left begins there.
    marks: Marks = ()

    def as_json(self) -> str:
        """Return the text of its file."""
        return json.dumps({"v": VERSION, **asdict(self)}, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Entry:
        """Read the text of a file. Raises ArchiveError for what is no entry."""
        try:
            found = json.loads(text)
            version = found.pop("v")
            if version != VERSION:
                raise ArchiveError(
                    f"the archive has a manifest of version {version}, and this program reads"
                    f" version {VERSION}"
                )
            return cls(
                **found
                | {
                    "ranges": tuple(_range(each) for each in found["ranges"]),
                    "files": tuple(data_file(each) for each in found["files"]),
                    "removed": tuple(found["removed"]),
                    "marks": tuple((QueueKey(*key), at) for key, at in found["marks"]),
                }
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ArchiveError(f"an entry of the manifest cannot be read: {error}") from error


def _range(found: Mapping[str, Any]) -> Range:
    return Range(**{**found, "key": QueueKey(*found["key"])})


def data_file(found: Mapping[str, Any]) -> DataFile:
    """Read a data file as `asdict` wrote it."""
    spans = tuple(Span(**{**each, "key": QueueKey(*each["key"])}) for each in found["spans"])
    return DataFile(**{**found, "spans": spans})


@final
@dataclass(slots=True)
class ArchivedQueue:
    """What is archived of one queue: from `start`, before `end`, sealed before `sealed`."""

    ranges: list[Range] = field(default_factory=list)
    start: int = 0
    end: int = 0
    sealed: int = 0

    def unsealed(self) -> list[Range]:
        """Return the ranges that are to be compared with the broker."""
        return [each for each in self.ranges if each.start >= self.sealed]


@final
@dataclass(slots=True)
class Archive:
    """The fold of all entries."""

    next_number: int = 0
    queues: dict[QueueKey, ArchivedQueue] = field(default_factory=dict)
    files: dict[str, DataFile] = field(default_factory=dict)
    ever_removed: set[str] = field(default_factory=set)

    def apply(self, entry: Entry) -> None:
        """Take an entry in. Raises ArchiveError where it does not follow."""
        if entry.number != self.next_number:
            raise ArchiveError(
                f"the manifest has entry {entry.number} where {self.next_number} should be: a file"
                " of it is missing"
            )
        for each in entry.ranges:
            self._append(each)
        for path in entry.removed:
            if self.files.pop(path, None) is None:
                raise ArchiveError(f"entry {entry.number} removes {path}, which is not there")
            self.ever_removed.add(path)
        for file in entry.files:
            self.files[file.path] = file
        for key, at in entry.marks:
            queue = self.queues.get(key)
            if queue is None:
                raise ArchiveError(f"entry {entry.number} marks {key}, which is not there")
            if entry.kind == "seal":
                queue.sealed = max(queue.sealed, at)
            else:
                queue.start = max(queue.start, at)
                queue.ranges = [each for each in queue.ranges if each.end > queue.start]
        self.next_number += 1

    def _append(self, added: Range) -> None:
        queue = self.queues.get(added.key)
        if queue is None:
            queue = self.queues[added.key] = ArchivedQueue(
                start=added.start, end=added.start, sealed=added.start
            )
        if added.start != queue.end or added.end <= added.start:
            raise ArchiveError(
                f"{added.key}: a range from {added.start} to {added.end} does not follow what ends"
                f" at {queue.end}"
            )
        queue.ranges.append(added)
        queue.end = added.end

    def holding(self, key: QueueKey, start: int, end: int) -> list[DataFile]:
        """Return the files that have rows of a queue between two offsets, in order of offsets."""
        found = [
            (span.start, file)
            for file in self.files.values()
            for span in file.spans
            if span.key == key and span.start < end and span.end > start
        ]
        return [file for _, file in sorted(found, key=lambda each: each[0])]


def fold(entries: Iterable[Entry]) -> Archive:
    """Return what entries make together."""
    archive = Archive()
    for entry in entries:
        archive.apply(entry)
    return archive


def sealing(archive: Archive, passed: Iterable[Range]) -> Marks:
    """Return how far each queue is sealed when these ranges have passed, without a gap."""
    by_key: dict[QueueKey, dict[int, int]] = {}
    for each in passed:
        by_key.setdefault(each.key, {})[each.start] = each.end
    marks = []
    for key, ends in sorted(by_key.items()):
        at = max(archive.queues[key].sealed, archive.queues[key].start)
        while at in ends:
            at = ends[at]
        if at > archive.queues[key].sealed:
            marks.append((key, at))
    return tuple(marks)


def settled(archive: Archive, passed: Iterable[Range], first: Mapping[QueueKey, int]) -> Marks:
    """Return up to where a broker need not keep each queue any more, for the archive's sake.

    That is what is sealed, and what has passed behind a range that nobody can compare any more:
    one of which the broker, where queues begin at `first`, has let something go. Else it would keep
    all that follows for ever.
    """
    compared = {(each.key, each.start) for each in passed}
    marks = []
    for key, low in sorted(first.items()):
        queue = archive.queues[key]
        at = queue.sealed
        for each in queue.ranges:
            if each.end <= at:
                continue
            if (key, each.start) not in compared and each.start >= low:
                break
            at = each.end
        marks.append((key, at))
    return tuple(marks)


def expiring(
    archive: Archive, *, before_ms: int, topics: Iterable[str]
) -> tuple[Marks, tuple[str, ...]]:
    """Return where queues begin when what was stored before `before_ms` goes, and which files go.

    Whole ranges go, from the first on, and files of which nothing is left; so the last range of a
    queue stays until another follows, and a reader always knows where to go on.
    """
    wanted = set(topics)
    marks: dict[QueueKey, int] = {}
    for key, queue in archive.queues.items():
        if wanted and key.topic not in wanted:
            continue
        for each in queue.ranges:
            if each.max_store_ms >= before_ms:
                break
            marks[key] = each.end
    gone = tuple(
        path
        for path, file in sorted(archive.files.items())
        if all(span.end <= marks.get(span.key, archive.queues[span.key].start)
               for span in file.spans)
    )  # fmt: skip
    return tuple(sorted(marks.items())), gone


def renumbered(entry: Entry, number: int) -> Entry:
    """Return an entry as another one in order."""
    return replace(entry, number=number)
