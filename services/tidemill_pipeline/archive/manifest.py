"""The manifest of an archive: entries in order, and their fold.

Pure. Each entry is a file, `manifest/00000000000000000012.json`. Only one process can take its
number. The archive is the fold of all entries; `snapshot.py` stores a fold. A data file that no
entry names is not part of the archive. A process that is killed before its entry therefore leaves
nothing that a reader sees.

A queue is archived in ranges of offsets without gaps and overlaps. The next batch begins at the end
of the last range. The fold rejects an entry that does not follow.
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
    """A queue in the manifest: one incarnation of it in one namespace."""

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
        """Return the queue without its namespace."""
        incarnation = Incarnation.of(self.incarnation)
        return SourceQueue(self.topic, self.broker, self.queue_id, incarnation)

    def __str__(self) -> str:
        return f"queue {self.queue_id} of {self.topic} at {self.broker}"


QueueMarks: TypeAlias = tuple[tuple[QueueKey, int], ...]  # an offset of each queue
ClosedRanges: TypeAlias = tuple[tuple[QueueKey, int, int], ...]  # ranges of queues


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedRange:
    """Offsets of one queue that one batch archived; after sealing, those of one hour."""

    key: QueueKey
    start: int
    end: int
    rows: int
    bytes: int  # of bodies
    min_store_ms: int
    max_store_ms: int
    crc_xor: int  # exclusive or of body_crc32 of all rows
    lost: int = 0  # offsets that were lost before they were archived
    last_offset: int = -1  # of the last row; -1: no rows
    last_store_ms: int = -1  # of the last row; -1: no rows

    @property
    def is_lost(self) -> bool:
        """Return whether all offsets were lost."""
        return self.lost == self.end - self.start

    @property
    def hour(self) -> int:
        """Return the hour in which the last message was stored."""
        return self.max_store_ms // HOUR_MS


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FileSpan:
    """Offsets between which a file has all archived rows of a queue."""

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
    # Files that the entry removes. A vacuum deletes them, so that no later entry may name them.
    removed: tuple[str, ...] = ()
    # Seal: the end of the sealed offsets. Expire: the first remaining offset.
    marks: QueueMarks = ()
    # Seal: ranges that no broker has any more, so that only files and manifest were compared.
    # Append: an empty range at the end of each queue that no longer exists. The number of messages
    # that were lost after this end is unknown.
    closed: ClosedRanges = ()

    def as_json(self) -> str:
        """Return the text of the entry's file."""
        text = json.dumps({"v": VERSION, **asdict(self)}, sort_keys=True, separators=(",", ":"))
        return with_crc(text)

    @classmethod
    def from_json(cls, text: str) -> ManifestEntry:
        """Read the text of a file. Raises ArchiveError for a text that is not an entry."""
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
            raise ArchiveError(f"cannot read a manifest entry: {error}") from error


def _range(found: Mapping[str, Any]) -> ArchivedRange:
    return ArchivedRange(**{**found, "key": QueueKey(*found["key"])})


def data_file(found: Mapping[str, Any]) -> DataFile:
    """Return a data file from the mapping that `asdict` made."""
    spans = tuple(FileSpan(**{**each, "key": QueueKey(*each["key"])}) for each in found["spans"])
    return DataFile(**{**found, "spans": spans})


@final
@dataclass(slots=True)
class ArchivedQueue:
    """The archived offsets of one queue: `start` to `end`, sealed up to `sealed`."""

    ranges: list[ArchivedRange] = field(default_factory=list)
    start: int = 0
    end: int = 0
    sealed: int = 0
    closed: list[tuple[int, int]] = field(default_factory=list)  # sealed without a broker
    last: ArchivedRange | None = None  # the last expired range with rows; it identifies the store

    @property
    def has_ended(self) -> bool:
        """Return whether the manifest records that the queue no longer exists."""
        return (self.end, self.end) in self.closed

    @property
    def needed_from(self) -> int:
        """Return the first offset that the broker must keep: neither sealed nor expired."""
        return max(self.sealed, self.start)

    def unsealed(self) -> list[ArchivedRange]:
        """Return the ranges that are not yet compared with the broker."""
        return [each for each in self.ranges if each.start >= self.sealed]

    def last_before(self, at: int) -> ArchivedRange | None:
        """Return the last range with rows before an offset, also an expired one."""
        known = [*([self.last] if self.last is not None else []), *self.ranges]
        return next((each for each in reversed(known) if each.end <= at and each.rows), None)

    def lost_between(self, start: int, end: int) -> list[ArchivedRange]:
        """Return the ranges with lost offsets that overlap the given range."""
        return [each for each in self.ranges if each.lost and each.start < end and each.end > start]

    def seal(self, at: int) -> None:
        """Seal the offsets before `at`, and join the sealed ranges of each hour.

        Sealed ranges expire by the hour. A fold then has one range per hour, not one per batch.
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
    """The fold of all entries. Callers may share it: see `ArchiveStore.archive`."""

    next_number: int = 0
    # In order of creation: the last key of a name is its current incarnation.
    queues: dict[QueueKey, ArchivedQueue] = field(default_factory=dict)
    files: dict[str, DataFile] = field(default_factory=dict)
    # Removed files with the time of removal. Readers with an earlier plan may still read them.
    released_at_ms: dict[str, int] = field(default_factory=dict)
    # Files that a vacuum deletes, with the number of its entry.
    deleted_by: dict[str, int] = field(default_factory=dict)
    # Invariant: the spans of a queue do not overlap, in order of offsets: (start, end, path).
    _spans: dict[QueueKey, list[tuple[int, int, str]]] = field(default_factory=dict)

    def check(self, entry: ManifestEntry) -> None:
        """Raise ArchiveError if an entry does not follow."""
        if entry.number != self.next_number:
            raise ArchiveError(
                f"the manifest has entry {entry.number} after entry {self.next_number - 1}: a file"
                " of the manifest is missing; restore it from a copy"
            )
        ends: dict[QueueKey, int] = {}
        for each in entry.ranges:
            queue = self.queues.get(each.key)
            end = ends.get(each.key, each.start if queue is None else queue.end)
            if each.start != end or each.end <= each.start:
                raise ArchiveError(
                    f"{each.key}: the range from {each.start} to {each.end} does not begin at the"
                    f" archived end {end}"
                )
            ends[each.key] = each.end
        for path in entry.removed:
            if (path in self.files) == (entry.kind == "vacuum"):
                why = "is in use" if path in self.files else "does not exist"
                raise ArchiveError(f"entry {entry.number} removes {path}, which {why}")
        for file in entry.files:
            if file.path in self.deleted_by or file.path in self.released_at_ms:
                raise ArchiveError(
                    f"entry {entry.number} names {file.path}, which was deleted meanwhile"
                )
        for key, _ in entry.marks:
            if key not in self.queues and key not in ends:
                raise ArchiveError(f"entry {entry.number} marks {key}, which does not exist")

    def apply(self, entry: ManifestEntry) -> None:
        """Apply an entry. If it does not follow, raise ArchiveError and change nothing."""
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
        """Add a file."""
        self.files[file.path] = file
        for span in file.spans:
            insort(self._spans.setdefault(span.key, []), (span.start, span.end, file.path))

    def _release(self, path: str, at_ms: int) -> None:
        for span in self.files.pop(path).spans:
            spans = self._spans[span.key]
            del spans[bisect_left(spans, (span.start, span.end, path))]
        self.released_at_ms[path] = at_ms

    def holding(self, key: QueueKey, start: int, end: int) -> list[DataFile]:
        """Return the files with rows of a queue between two offsets, in order of offsets."""
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
    """Return the fold of entries."""
    archive = Archive()
    for entry in entries:
        archive.apply(entry)
    return archive


def sealing(archive: Archive, passed: Iterable[ArchivedRange]) -> QueueMarks:
    """Return the offset up to which each queue can be sealed after these ranges passed.

    A queue is sealed without gaps: up to the first range that did not pass.
    """
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
    """Return files in groups that may be merged: one incarnation of each topic and broker group.

    A row has the name of its queue but not the incarnation, so a file must not mix two of them.
    """
    groups: list[tuple[dict[tuple[str, str], str], list[DataFile]]] = []
    for file in files:
        own = {(each.key.topic, each.key.broker): each.key.incarnation for each in file.spans}
        for known, members in groups:
            if all(known.get(name, own[name]) == own[name] for name in own):
                known.update(own)
                members.append(file)
                break
        else:
            groups.append((own, [file]))
    return [members for _, members in groups]


def expiring(
    archive: Archive, *, before_ms: int, namespace: str, topics: Iterable[str]
) -> tuple[QueueMarks, tuple[str, ...]]:
    """Return the new first offsets and the expired files for messages stored before `before_ms`.

    Only whole ranges expire, beginning with the first, and files without remaining rows. The end of
    a queue and its last range stay known. `topics` are those of one namespace; none: all queues.
    """
    chosen = {(namespace, topic) for topic in topics}
    marks: dict[QueueKey, int] = {}
    for key, queue in archive.queues.items():
        if chosen and (key.namespace, key.topic) not in chosen:
            continue
        for each in queue.ranges:
            if each.max_store_ms >= before_ms:
                break
            marks[key] = each.end
    expired = tuple(
        path
        for path, file in sorted(archive.files.items())
        if all(
            span.end <= marks.get(span.key, archive.queues[span.key].start) for span in file.spans
        )
    )
    return tuple(sorted(marks.items())), expired


def renumbered(entry: ManifestEntry, number: int) -> ManifestEntry:
    """Return a copy of an entry with another number."""
    return replace(entry, number=number)
