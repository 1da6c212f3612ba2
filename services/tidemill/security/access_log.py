"""The refused calls and the accesses of one process: a ring in memory, and a line in its log each.

The first refusal of a caller, call, resource and cause is written at once. Later ones of the same
second are counted, and the next line has their number. So a client that repeats a refused call
costs one line per second. Accesses have one line per minute.

This module has no I/O and no clock: the process writes the lines and calls `tick` each second.
"""

from __future__ import annotations

import json
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Generator, Mapping
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, final

from tidemill.security.audit_results import AuditResult

REFUSAL: Final = "refusal"
ACCESS: Final = "access"
KINDS: Final = (REFUSAL, ACCESS)

RING_RECORDS_MAX: Final = 10_000  # about 4 MB; beyond it the oldest record is dropped
PERIODS_MS: Final[Mapping[str, int]] = {REFUSAL: 1_000, ACCESS: 60_000}
# Callers, calls, resources and causes with a line in the current period, by kind. Beyond it, the
# oldest one is forgotten with its unwritten count, so its next refusal is written at once.
CALLERS_MAX: Final = 10_000
PERIODS_A_TICK: Final = 1_000  # ended in half a millisecond; the others end in later ticks
LINES_PER_S_MAX: Final = 200  # of a process; beyond it records are only counted
TEXT_CHARS_MAX: Final = 512  # of each field, which may come from a client
RECORDS_A_SLICE: Final = 256  # compared in half a millisecond
_UNPRINTABLE: Final = re.compile(r"[^ -~]")  # A client names resources as it likes.


RecordKey: TypeAlias = tuple[str, str, str, str, str]


class AccessRecord(NamedTuple):
    """A refused call or an access."""

    kind: str
    user: str  # "": unknown
    via: str
    address: str
    call: str
    resource: str
    action: str
    result: str  # ok, refused, would_refuse
    code: int
    reason: str
    claimed_user: str = ""
    client_id: str = ""  # as the client shows it

    @property
    def key(self) -> RecordKey:
        """The kind, the caller, the call, the resource and the cause, which share a line.

        The cause of a missing right is the action: the reason has the address, and all clients of a
        user share a line.
        """
        return key_of(
            self.kind,
            self.user or unverified_caller(self.address, self.claimed_user),
            self.call,
            self.resource,
            "" if self.kind == ACCESS else self.action or self.reason,
        )


def key_of(kind: str, caller: str, call: str, resource: str, cause: str) -> RecordKey:
    """Return the key of a record with short texts."""
    return (
        kind,
        caller[:TEXT_CHARS_MAX],
        call[:TEXT_CHARS_MAX],
        resource[:TEXT_CHARS_MAX],
        cause[:TEXT_CHARS_MAX],
    )


def unverified_caller(address: str, claimed_user: str) -> str:
    """Return the text that stands for a caller without a verified user."""
    return f"{address} {claimed_user}"


class RingRecord(NamedTuple):
    """A record of the ring: its number and its JSON object."""

    sequence: int
    fields: dict[str, Any]


class RingPage(NamedTuple):
    """Records, the newest first, and whether older ones match too."""

    records: list[RingRecord]
    has_more: bool


class FilterRequest(Protocol):
    """The filter as fields of a request."""

    kind: str
    user: str
    resource: str
    action: str
    result: str
    client_id: str
    from_ms: int
    to_ms: int


class RecordFilter(NamedTuple):
    """The wanted records; an empty field matches all."""

    kind: str = ""
    user: str = ""
    resource: str = ""
    action: str = ""
    result: str = ""
    client_id: str = ""
    from_ms: int = 0
    to_ms: int = 0  # exclusive; 0: no end

    @classmethod
    def of(cls, request: FilterRequest) -> RecordFilter:
        """Return the filter of a request of another process."""
        return cls(
            kind=request.kind,
            user=request.user,
            resource=request.resource,
            action=request.action,
            result=request.result,
            client_id=request.client_id,
            from_ms=request.from_ms,
            to_ms=request.to_ms,
        )

    def matches(self, fields: Mapping[str, Any]) -> bool:
        """Whether a record is wanted. A resource may end with `*`."""
        return (
            (not self.kind or fields["kind"] == self.kind)
            and (not self.user or self.user in (fields.get("user"), fields.get("claimedUser")))
            and (not self.resource or self._is_resource(fields.get("resource", "")))
            and (not self.action or self._is_action(fields.get("action", "")))
            and (not self.result or fields.get("result") == self.result)
            and (not self.client_id or self._is_client(fields))
            and self.matches_time(fields["atMs"])
        )

    def matches_time(self, at_ms: int) -> bool:
        """Whether a record of this time is wanted."""
        return at_ms >= self.from_ms and (not self.to_ms or at_ms < self.to_ms)

    def _is_action(self, action: str) -> bool:
        """Whether an action is wanted. A refusal may have alternatives, such as `Get or List`."""
        return self.action.lower() in action.lower().split(" or ")

    def _is_client(self, fields: Mapping[str, Any]) -> bool:
        """Whether the wanted client made a call, or is the resource of a change."""
        return (
            fields.get("clientId") == self.client_id
            or fields.get("resource") == f"Client:{self.client_id}"
        )

    def _is_resource(self, resource: str) -> bool:
        if self.resource.endswith("*"):
            return resource.startswith(self.resource[:-1])
        return resource == self.resource


@final
class _Period:
    """The time with one line of a caller, a call, a resource and a cause."""

    __slots__ = ("count", "ends_ms", "record")

    def __init__(self, record: AccessRecord, ends_ms: int) -> None:
        self.record = record  # that has the line
        self.ends_ms = ends_ms
        self.count = 0  # later records, which have no line yet


@final
class AccessLog:
    """The ring of one process, with the limits of its lines."""

    def __init__(
        self,
        process: str,
        wall_ms: Callable[[], int],
        monotonic_ms: Callable[[], int],
        write: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        """`write` writes the JSON object of a record to the log of the process."""
        self._process = process
        self._wall_ms = wall_ms
        self._monotonic_ms = monotonic_ms
        self._write = write
        # Plain tuples of numbers and bytes, which the garbage collector does not visit.
        self._ring: deque[tuple[int, int, bytes]] = deque(maxlen=RING_RECORDS_MAX)
        # Later processes of this name begin higher: none writes a thousand lines per second.
        self._sequence = wall_ms()
        # By kind, the oldest first. An ordered dictionary removes the oldest one in constant time.
        self._periods: dict[str, OrderedDict[RecordKey, _Period]] = {
            kind: OrderedDict() for kind in KINDS
        }
        self._line_count = 0  # of the current second
        self._second_ends_ms = 0
        self.unwritten_count = 0  # records over the limit of lines, since the last line about them
        self.counts = Counter(dict.fromkeys(KINDS, 0))

    def count_repeated(self, key: RecordKey) -> bool:
        """Count a record if its caller has a line in this period; else return False.

        It is faster than `note`, because it needs no record.
        """
        period = self._periods[key[0]].get(key)
        if period is None or self._monotonic_ms() >= period.ends_ms:
            return False
        period.count += 1
        self.counts[key[0]] += 1
        return True

    def note(self, record: AccessRecord) -> None:
        """Write a record, or count it if its caller has a line in this period."""
        key = record.key
        if self.count_repeated(key):
            return
        self.counts[record.kind] += 1
        record = record._replace(
            call=key[2],
            resource=key[3],
            reason=record.reason[:TEXT_CHARS_MAX],
            client_id=record.client_id[:TEXT_CHARS_MAX],
        )
        ended = self._periods[record.kind].pop(key, None)
        count = 1 if ended is None else 1 + ended.count
        self._begin(key, record, count, self._monotonic_ms())

    def _begin(self, key: RecordKey, record: AccessRecord, count: int, now_ms: int) -> None:
        periods = self._periods[record.kind]
        if len(periods) >= CALLERS_MAX:
            _, forgotten = periods.popitem(last=False)
            self.unwritten_count += forgotten.count
        periods[key] = _Period(record, now_ms + PERIODS_MS[record.kind])
        self._add(record, count, now_ms)

    def tick(self) -> None:
        """Write the counted records of periods that have ended. Call it once per second."""
        now_ms = self._monotonic_ms()
        for periods in self._periods.values():
            for _ in range(min(len(periods), PERIODS_A_TICK)):
                key = next(iter(periods))
                if periods[key].ends_ms > now_ms:
                    break
                period = periods.pop(key)
                if period.count:
                    self._begin(key, period.record, period.count, now_ms)
        if self.unwritten_count and now_ms >= self._second_ends_ms:
            count, self.unwritten_count = self.unwritten_count, 0
            self._add(
                AccessRecord(
                    REFUSAL,
                    user="",
                    via="",
                    address="",
                    call="",
                    resource="",
                    action="",
                    result=AuditResult.REFUSED,
                    code=0,
                    reason=f"{count} records over the limit of {LINES_PER_S_MAX} lines per second",
                ),
                count,
                now_ms,
            )

    def _add(self, record: AccessRecord, count: int, now_ms: int) -> None:
        if now_ms >= self._second_ends_ms:
            self._line_count, self._second_ends_ms = 0, now_ms + 1_000
        self._line_count += 1
        if self._line_count > LINES_PER_S_MAX:
            self.unwritten_count += count
            return
        self._sequence += 1
        at_ms = self._wall_ms()
        fields = _fields(record, self._process, self._sequence, at_ms, count)
        self._ring.append((self._sequence, at_ms, json.dumps(fields).encode()))
        self._write(fields)

    def find_page(
        self, wanted: RecordFilter, *, before: int, limit: int
    ) -> Generator[None, None, RingPage]:
        """Return the newest records below a sequence (0: all); yield between slices."""
        found: list[RingRecord] = []
        for number, (sequence, at_ms, encoded) in enumerate(reversed(list(self._ring)), 1):
            if (before and sequence >= before) or not wanted.matches_time(at_ms):
                continue
            fields = json.loads(encoded)
            if wanted.matches(fields):
                if len(found) == limit:
                    return RingPage(found, has_more=True)
                found.append(RingRecord(sequence, fields))
            if number % RECORDS_A_SLICE == 0:
                yield
        return RingPage(found, has_more=False)


def _fields(
    record: AccessRecord, process: str, sequence: int, at_ms: int, count: int
) -> dict[str, Any]:
    """Return the JSON object of a record, as the API shows it."""
    fields: dict[str, Any] = {
        "id": f"{process}:{sequence}",
        "atMs": at_ms,
        "kind": record.kind,
        "user": record.user[:TEXT_CHARS_MAX],
        "via": record.via[:TEXT_CHARS_MAX],
        "claimedUser": record.claimed_user[:TEXT_CHARS_MAX],
        "clientId": record.client_id[:TEXT_CHARS_MAX],
        "from": record.address[:TEXT_CHARS_MAX],
        "process": process,
        "call": record.call[:TEXT_CHARS_MAX],
        "resource": record.resource[:TEXT_CHARS_MAX],
        "action": record.action,
        "result": record.result,
        "code": record.code,
        "reason": record.reason[:TEXT_CHARS_MAX],
        "count": count,
    }
    return {
        name: _UNPRINTABLE.sub("?", value) if isinstance(value, str) else value
        for name, value in fields.items()
        if value not in {"", 0}
    }
