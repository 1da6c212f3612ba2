"""The manifest of an archive: entries in order, and what they make together.

Pure. An entry is a file of its own, `manifest/00000000000000000012.json`, whose number nobody else
can take; the fold of all of them is the archive (`snapshot.py` has what a fold has come to). A data
file that no entry names is not part of it, so a process that is killed before its entry leaves
nothing behind that a reader would see.

A queue is archived in ranges of offsets that follow each other without gap or overlap; the end of
the last is where the next batch begins. An entry that does not follow is refused by the fold.
"""

from __future__ import annotations

import json
import zlib
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple, TypeAlias, final, get_args

from tidemill_pipeline.errors import ArchiveError
from tidemill_pipeline.offsets import Incarnation, SourceQueue

VERSION: Final = 1  # of an entry and of a snapshot
_CRC: Final = ',"crc":'  # The checksum of the text before it follows, and ends the text.
HOUR_MS: Final = 3_600_000  # One folder holds an hour; sealed ranges of an hour are joined.

Kind = Literal["append", "seal", "compact", "expire", "vacuum"]


def with_crc(text: str) -> str:
    """Return the text of a JSON object with its CRC-32 as the last member, `crc`."""
    return f"{text[:-1]}{_CRC}{zlib.crc32(text.encode())}}}"


def read_checked(text: str, *, what: str) -> dict[str, Any]:
    """Return the members of a text that `with_crc` wrote, without version and checksum.

    Raises ArchiveError for a damaged text and for another version. Raises ValueError, KeyError,
    TypeError or AttributeError for a text that is not such an object.
    """
    members: dict[str, Any] = json.loads(text)
    version, crc = members.pop("v"), members.pop("crc", None)
    if crc is not None and with_crc(text.rpartition(_CRC)[0] + "}") != text:
        raise ArchiveError("the file is damaged: its checksum does not match its content")
    if version != VERSION:
        raise ArchiveError(
            f"the archive has {what} of version {version}, but this program reads only version"
            f" {VERSION}"
        )
    if crc is None:
        raise ArchiveError("the file is damaged: it has no checksum")
    return members


class QueueKey(NamedTuple):
    """One queue, for as long as its offsets mean the same, as it is written."""

    namespace: str
    topic: str
    broker: str
    queue_id: int
    incarnation: str

    @classmethod
    def of(cls, namespace: str, queue: SourceQueue) -> QueueKey:
        """Return the key of a queue."""
        return cls(namespace, queue.topic, queue.broker, queue.queue_id, str(queue.incarnation))

    @property
    def queue(self) -> SourceQueue:
        """Return the queue, as others than an archive know it."""
        incarnation = Incarnation.of(self.incarnation)
        return SourceQueue(self.topic, self.broker, self.queue_id, incarnation)

    def __str__(self) -> str:
        return f"queue {self.queue_id} of {self.topic} at {self.broker}"


QueueMarks: TypeAlias = tuple[tuple[QueueKey, int], ...]  # an offset of each queue
ClosedRanges: TypeAlias = tuple[tuple[QueueKey, int, int], ...]  # ranges of queues


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedRange:
    """What one batch archived of one queue: a row of the manifest; once sealed, all of an hour."""

    key: QueueKey
    start: int
    end: int
    rows: int
    bytes: int  # of bodies
    min_store_ms: int
    max_store_ms: int
    crc_xor: int  # of body_crc32 of all rows
    # Offsets that were gone before they could be archived.
    lost: int = 0
    last_offset: int = -1  # of the last row; -1: no rows
    last_store_ms: int = -1  # of the last row; -1: no rows

    @property
    def is_lost(self) -> bool:
        """Say whether nothing of it could be archived."""
        return self.lost == self.end - self.start

    @property
    def hour(self) -> int:
        """Return the hour that its last message was stored in."""
        return self.max_store_ms // HOUR_MS


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FileSpan:
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
    spans: tuple[FileSpan, ...]
    footer_crc: int  # CRC-32 of the footer, which has no checksum of its own


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestEntry:
    """One commit."""

    number: int
    kind: Kind
    at_ms: int
    run: str
    schema_version: int
    ranges: tuple[ArchivedRange, ...] = ()
    files: tuple[DataFile, ...] = ()
    # Paths that count no more; of vacuum: that are deleted, and may never count again.
    removed: tuple[str, ...] = ()
    # Of seal: what is sealed of each queue ends there. Of expire: what is left begins there.
    marks: QueueMarks = ()
    # Of seal: what no broker had any more to compare with. The files agree with the manifest.
    # Of append: queues that are over. Such a range is where the queue ends, and has no offset:
    # what stood behind it was lost, and nobody can say how much that was.
    closed: ClosedRanges = ()

    def as_json(self) -> str:
        """Return the text of its file."""
        text = json.dumps({"v": VERSION, **asdict(self)}, sort_keys=True, separators=(",", ":"))
        return with_crc(text)

    @classmethod
    def from_json(cls, text: str) -> ManifestEntry:
        """Read the text of a file. Raises ArchiveError for what is no entry."""
        try:
            found = read_checked(text, what="a manifest entry")
            if found["kind"] not in get_args(Kind):
                raise ArchiveError(f"a manifest entry has the unknown kind {found['kind']}")
            return cls(
                **found
                | {
                    "ranges": tuple(_range(each) for each in found["ranges"]),
                    "files": tuple(data_file(each) for each in found["files"]),
                    "removed": tuple(found["removed"]),
                    "marks": tuple((QueueKey(*key), at) for key, at in found["marks"]),
                    "closed": tuple(
                        (QueueKey(*key), start, end) for key, start, end in found["closed"]
                    ),
                }
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArchiveError(f"an entry of the manifest cannot be read: {error}") from error


def _range(found: Mapping[str, Any]) -> ArchivedRange:
    return ArchivedRange(**{**found, "key": QueueKey(*found["key"])})


def data_file(found: Mapping[str, Any]) -> DataFile:
    """Read a data file as `asdict` wrote it."""
    spans = tuple(FileSpan(**{**each, "key": QueueKey(*each["key"])}) for each in found["spans"])
    return DataFile(**{**found, "spans": spans})


@final
@dataclass(slots=True)
class ArchivedQueue:
    """What is archived of one queue: from `start`, before `end`, sealed before `sealed`."""

    ranges: list[ArchivedRange] = field(default_factory=list)
    start: int = 0
    end: int = 0
    sealed: int = 0
    closed: list[tuple[int, int]] = field(default_factory=list)  # sealed, and never compared
    # Of what was let go of: the last range with rows, by which another store is known.
    last: ArchivedRange | None = None

    @property
    def has_ended(self) -> bool:
        """Say whether it was written down that the queue is there no more."""
        return (self.end, self.end) in self.closed

    @property
    def needed_from(self) -> int:
        """Return from where on it is needed: behind what is sealed, or what was let go of."""
        return max(self.sealed, self.start)

    def unsealed(self) -> list[ArchivedRange]:
        """Return the ranges that are to be compared with the broker."""
        return [each for each in self.ranges if each.start >= self.sealed]

    def last_before(self, at: int) -> ArchivedRange | None:
        """Return the last range with rows before an offset, if there is one, or was."""
        there = [*([self.last] if self.last is not None else []), *self.ranges]
        return next((each for each in reversed(there) if each.end <= at and each.rows), None)

    def lost_between(self, start: int, end: int) -> list[ArchivedRange]:
        """Return the ranges that have offsets there, and of which something was lost."""
        return [each for each in self.ranges if each.lost and each.start < end and each.end > start]

    def seal(self, at: int) -> None:
        """Seal what lies before an offset; of it the ranges of an hour become one.

        Nothing asks for less: what is sealed goes by its hour. So a manifest that is read whole has
        as many ranges as hours, however many batches there were.
        """
        self.sealed = max(self.sealed, at)
        joined: list[ArchivedRange] = []
        for each in self.ranges:
            last = joined[-1] if joined else None
            is_same = (
                last is not None
                and each.end <= self.sealed
                and each.hour == last.hour
                and bool(each.rows) == bool(last.rows)
            )
            if last is not None and is_same:
                joined[-1] = _joined(last, each)
            else:
                joined.append(each)
        self.ranges = joined


def _joined(first: ArchivedRange, second: ArchivedRange) -> ArchivedRange:
    return ArchivedRange(
        key=first.key,
        start=first.start,
        end=second.end,
        rows=first.rows + second.rows,
        bytes=first.bytes + second.bytes,
        min_store_ms=min(first.min_store_ms, second.min_store_ms),
        max_store_ms=max(first.max_store_ms, second.max_store_ms),
        crc_xor=first.crc_xor ^ second.crc_xor,
        lost=first.lost + second.lost,
        last_offset=second.last_offset,
        last_store_ms=second.last_store_ms,
    )


@final
@dataclass(slots=True)
class Archive:
    """The fold of all entries. It may be shared: see `ArchiveStore.archive`."""

    next_number: int = 0
    # Of one name, one after the other, in the order in which they came.
    queues: dict[QueueKey, ArchivedQueue] = field(default_factory=dict)
    files: dict[str, DataFile] = field(default_factory=dict)
    # Files that count no more, and since when: who planned before may still be reading them.
    released_at_ms: dict[str, int] = field(default_factory=dict)
    # Files that a vacuum deletes, and the number of its entry.
    deleted_by: dict[str, int] = field(default_factory=dict)
    # Invariant: the spans of a queue do not overlap, in order of offsets: (start, end, path).
    _spans: dict[QueueKey, list[tuple[int, int, str]]] = field(default_factory=dict)

    def check(self, entry: ManifestEntry) -> None:
        """Raise ArchiveError where an entry does not follow."""
        if entry.number != self.next_number:
            raise ArchiveError(
                f"the manifest has entry {entry.number} where {self.next_number} should be: a file"
                " of it is missing"
            )
        ends: dict[QueueKey, int] = {}
        for each in entry.ranges:
            queue = self.queues.get(each.key)
            end = ends.get(each.key, each.start if queue is None else queue.end)
            if each.start != end or each.end <= each.start:
                raise ArchiveError(
                    f"{each.key}: a range from {each.start} to {each.end} does not follow what ends"
                    f" at {end}"
                )
            ends[each.key] = each.end
        for path in entry.removed:
            if (path in self.files) == (entry.kind == "vacuum"):
                why = "counts" if path in self.files else "is not there"
                raise ArchiveError(f"entry {entry.number} removes {path}, which {why}")
        for file in entry.files:
            if file.path in self.deleted_by or file.path in self.released_at_ms:
                raise ArchiveError(
                    f"entry {entry.number} names {file.path}, which was deleted meanwhile"
                )
        for key, _ in entry.marks:
            if key not in self.queues and key not in ends:
                raise ArchiveError(f"entry {entry.number} marks {key}, which is not there")

    def apply(self, entry: ManifestEntry) -> None:
        """Take an entry in. Raises ArchiveError where it does not follow, and changes nothing."""
        self.check(entry)
        for each in entry.ranges:
            self._append(each)
        for path in entry.removed:
            if entry.kind == "vacuum":
                self.released_at_ms.pop(path, None)
                self.deleted_by[path] = entry.number
            else:
                self._release(path, entry.at_ms)
        for file in entry.files:
            self.put(file)
        for key, start, end in entry.closed:
            self.queues[key].closed.append((start, end))
        for key, at in entry.marks:
            queue = self.queues[key]
            if entry.kind == "seal":
                queue.seal(at)
            elif entry.kind == "expire":
                queue.start = max(queue.start, at)
                queue.last = queue.last_before(queue.start)
                queue.ranges = [each for each in queue.ranges if each.end > queue.start]
                queue.closed = [
                    each for each in queue.closed if each[1] > queue.start or each[0] == each[1]
                ]
        self.next_number += 1

    def _append(self, added: ArchivedRange) -> None:
        queue = self.queues.get(added.key)
        if queue is None:
            queue = self.queues[added.key] = ArchivedQueue(
                start=added.start, end=added.start, sealed=added.start
            )
        queue.ranges.append(added)
        queue.end = added.end

    def put(self, file: DataFile) -> None:
        """Take a file in."""
        self.files[file.path] = file
        for span in file.spans:
            insort(self._spans.setdefault(span.key, []), (span.start, span.end, file.path))

    def _release(self, path: str, at_ms: int) -> None:
        for span in self.files.pop(path).spans:
            spans = self._spans[span.key]
            del spans[bisect_left(spans, (span.start, span.end, path))]
        self.released_at_ms[path] = at_ms

    def holding(self, key: QueueKey, start: int, end: int) -> list[DataFile]:
        """Return the files that have rows of a queue between two offsets, in order of offsets."""
        spans = self._spans.get(key, [])
        # The span before the first that begins at `start` or later may reach over it.
        first = max(0, bisect_left(spans, (start,)) - 1)
        holding: dict[str, DataFile] = {}
        for span_start, span_end, path in spans[first:]:
            if span_start >= end:
                break
            if span_end > start:
                holding.setdefault(path, self.files[path])
        return list(holding.values())


def fold(entries: Iterable[ManifestEntry]) -> Archive:
    """Return what entries make together."""
    archive = Archive()
    for entry in entries:
        archive.apply(entry)
    return archive


def sealing(archive: Archive, passed: Iterable[ArchivedRange]) -> QueueMarks:
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


def by_incarnation(files: Iterable[DataFile]) -> list[list[DataFile]]:
    """Return files by what may be together in one: of each broker group one incarnation of a topic.

    A row says its queue's name and not its incarnation, so those of two could not be told apart.
    """
    together: list[tuple[dict[tuple[str, str], str], list[DataFile]]] = []
    for file in files:
        own = {(each.key.topic, each.key.broker): each.key.incarnation for each in file.spans}
        for known, fitting in together:
            if all(known.get(name, own[name]) == own[name] for name in own):
                known.update(own)
                fitting.append(file)
                break
        else:
            together.append((own, [file]))
    return [fitting for _, fitting in together]


def expiring(
    archive: Archive, *, before_ms: int, namespace: str, topics: Iterable[str]
) -> tuple[QueueMarks, tuple[str, ...]]:
    """Return where queues begin when what was stored before `before_ms` goes, and which files go.

    Whole ranges go, from the first on, and files of which nothing is left. Where a queue ends stays
    known, and so do the times of its last range. Topics are those of one namespace; without any all
    queues are meant.
    """
    wanted = {(namespace, topic) for topic in topics}
    marks: dict[QueueKey, int] = {}
    for key, queue in archive.queues.items():
        if wanted and (key.namespace, key.topic) not in wanted:
            continue
        for each in queue.ranges:
            if each.max_store_ms >= before_ms:
                break
            marks[key] = each.end
    gone = tuple(
        path
        for path, file in sorted(archive.files.items())
        if all(
            span.end <= marks.get(span.key, archive.queues[span.key].start) for span in file.spans
        )
    )
    return tuple(sorted(marks.items())), gone


def renumbered(entry: ManifestEntry, number: int) -> ManifestEntry:
    """Return an entry as another one in order."""
    return replace(entry, number=number)
