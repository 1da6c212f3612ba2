"""The commands of the link, one row each, as the proxy sees them.

A row says how requests get into a frame, and what the replies of a frame resolve to. Most commands
are a message that names its request id, and are asked with `BrokerLink.ask`. The two that every
message needs travel as columns, many requests a message, and have functions of their own.

A new command is a field in either frame (broker.proto), a row here, and a row at the broker
(`broker/server/link/commands.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

FRAME_BYTES = 8 << 20  # of all requests in it: a stall of some ms, far below what the broker takes
ROW_BYTES = 64  # at most, of what stands beside a blob, or is an ack
ACKS_PER_FRAME_MAX = 4_096  # and the rest of the last request: some 20 ms of the broker's time

# What became of an append: its queue offset and 0, or its timer id and when it will be delivered.
# A plain tuple, since every send makes one.
Appended: TypeAlias = tuple[int, int]
# One request as it waits for its frame; the request id is its first.
Row: TypeAlias = tuple[Any, ...]

UNKNOWN_ACK: Final = pb.ACK_RESULT_UNSPECIFIED  # No broker answers this.


class HasRequestId(Protocol):
    """A request message of the link."""

    request_id: int


Request = TypeVar("Request", bound=HasRequestId)
Result = TypeVar("Result")


# Rows are keys of dictionaries, and there is one of each: they are compared by identity.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinkCommand(Generic[Request, Result]):
    """One kind of request."""

    name: str  # under which it is counted
    request_field: str  # of RequestFrame
    reply_field: str  # of ReplyFrame
    # What it means for the caller that the link is lost before the reply has come.
    when_lost: str
    # Adds the rows that leave to a frame.
    pack: Callable[[pb.RequestFrame, Sequence[Row]], None]
    # Returns what a field of a reply frame holds, as request ids and what they resolve to.
    unpack: Callable[[Any], Iterable[tuple[int, Result]]]
    # How many of the rows that wait have room in a frame with so many bytes left, and how many
    # bytes these take. Any one has room in an empty frame.
    cut: Callable[[Sequence[Row], int], tuple[int, int]]
    # What one row counts of those that are worth a frame before the last one is answered.
    weight: int = 0
    # Whether asking again does no harm, when nobody knows what became of the first time.
    may_repeat: bool = False
    # What the reply tells of one that was asked again, where it may differ from what it says.
    when_repeated: Callable[[Result], Result] | None = None


def _asked(
    name: str,
    request_field: str,
    reply_field: str,
    _request: type[Request],
    unpack: Callable[[Any], Iterable[tuple[int, Result]]],
    *,
    when_lost: str,
    may_repeat: bool = False,
) -> LinkCommand[Request, Result]:
    """Return a command whose requests are messages of their own."""

    def pack(frame: pb.RequestFrame, rows: Sequence[Row]) -> None:
        getattr(frame, request_field).extend([message for _, message in rows])

    return LinkCommand(
        name=name,
        request_field=request_field,
        reply_field=reply_field,
        when_lost=when_lost,
        cut=_cut_messages,
        pack=pack,
        unpack=unpack,
        may_repeat=may_repeat,
    )


def _cut_messages(rows: Sequence[Row], room_bytes: int) -> tuple[int, int]:
    taken_bytes = 0
    for count, (_, message) in enumerate(rows):
        size = message.ByteSize() + ROW_BYTES
        if taken_bytes + size > room_bytes:
            return count, taken_bytes
        taken_bytes += size
    return len(rows), taken_bytes


def _messages(_reply: type[Result]) -> Callable[[Iterable[Any]], Iterable[tuple[int, Result]]]:
    """Return the replies of a command, which are messages that name their request."""
    return lambda replies: [(reply.request_id, reply) for reply in replies]


def _ids(request_ids: Iterable[int]) -> Iterable[tuple[int, None]]:
    """Return the replies of a command that has nothing to tell but its success."""
    return zip(request_ids, repeat(None))


# ---------------------------------------------------------------- columns


def _pack_appends(frame: pb.RequestFrame, rows: Sequence[Row]) -> None:
    ids, topics, queues, crcs, blobs = zip(*rows, strict=True)
    columns = frame.appends
    columns.request_ids.extend(ids)
    columns.topic_ids.extend(topics)
    columns.queue_ids.extend(queues)
    columns.crcs.extend(crcs)
    columns.blobs.extend(blobs)


def _unpack_appends(columns: pb.AppendResults) -> Iterable[tuple[int, Appended]]:
    offsets = columns.queue_offsets
    dues = columns.due_at_ms or repeat(0, len(offsets))
    return zip(columns.request_ids, zip(offsets, dues, strict=True), strict=True)


def _cut_appends(rows: Sequence[Row], room_bytes: int) -> tuple[int, int]:
    taken_bytes = 0
    for count, (_, _, _, _, blob) in enumerate(rows):
        size = len(blob) + ROW_BYTES
        if taken_bytes + size > room_bytes:
            return count, taken_bytes
        taken_bytes += size
    return len(rows), taken_bytes


def _pack_acks(frame: pb.RequestFrame, rows: Sequence[Row]) -> None:
    ids, groups, topics, slots, deliveries, indexes, instants = zip(*rows, strict=True)
    columns = frame.acks
    columns.request_ids.extend(ids)
    columns.group_ids.extend(groups)
    columns.topic_ids.extend(topics)
    columns.slots.extend(slots)
    columns.delivery_ids.extend(deliveries)
    columns.indexes.extend(indexes)
    columns.visible_at_ms.extend(instants)


def _unpack_acks(columns: pb.AckResults) -> Iterable[tuple[int, list[int]]]:
    results: dict[int, list[int]] = {}
    for request_id, result in zip(columns.request_ids, columns.results, strict=True):
        results.setdefault(request_id, []).append(result)
    return results.items()


def _acks_of_both(results: list[int]) -> list[int]:
    """Return what became of acks that were asked twice: one that is gone may be settled.

    A broker knows of a delivery whose time is up no more whether it was. Its time is up at once
    where the clock of the new master is ahead.
    """
    return [UNKNOWN_ACK if result == pb.ACK_RESULT_GONE else result for result in results]


def _cut_acks(rows: Sequence[Row], room_bytes: int) -> tuple[int, int]:
    end = min(ACKS_PER_FRAME_MAX, room_bytes // ROW_BYTES, len(rows))
    # Those of one request travel together.
    while 0 < end < len(rows) and rows[end][0] == rows[end - 1][0]:
        end += 1
    return end, end * ROW_BYTES


# ---------------------------------------------------------------- the table

_UNKNOWN: Final = "the outcome is unknown"
_HARMLESS: Final = f"{_UNKNOWN}, and asking again does no harm"

APPEND: Final[LinkCommand[Any, Appended]] = LinkCommand(
    name="append",
    request_field="appends",
    reply_field="appends",
    when_lost=f"{_UNKNOWN}, and sending again may store the message twice",
    pack=_pack_appends,
    unpack=_unpack_appends,
    cut=_cut_appends,
    weight=1,
)
ACK: Final[LinkCommand[Any, list[int]]] = LinkCommand(
    name="ack",
    request_field="acks",
    reply_field="acks",
    when_lost=_HARMLESS,
    pack=_pack_acks,
    unpack=_unpack_acks,
    cut=_cut_acks,
    weight=1,
    may_repeat=True,
    when_repeated=_acks_of_both,
)
POP: Final = _asked(
    "pop",
    "pops",
    "pops",
    pb.PopRequest,
    _messages(pb.PopReply),
    when_lost=f"{_UNKNOWN}: what was taken comes back when its invisible duration ends",
    may_repeat=True,
)
CHANGE_INVISIBLE: Final = _asked(
    "change_invisible",
    "changes",
    "changes",
    pb.ChangeInvisibleRequest,
    _messages(pb.ChangeInvisibleReply),
    when_lost=f"{_UNKNOWN}: the handle may have been replaced",
)
DEAD_LETTER: Final = _asked(
    "dead_letter",
    "dead_letters",
    "dead_letters",
    pb.DeadLetterRequest,
    _messages(pb.DeadLetterReply),
    when_lost=f"{_UNKNOWN}: the message may have been moved",
)
ENSURE: Final = _asked(
    "ensure",
    "ensures",
    "ensures",
    pb.EnsureRequest,
    _messages(pb.EnsureReply),
    when_lost=_HARMLESS,
    may_repeat=True,
)
CANCEL_TIMER: Final = _asked(
    "cancel_timer",
    "timer_cancels",
    "cancelled_timers",
    pb.RecallRequest,
    _ids,
    when_lost=_HARMLESS,
    may_repeat=True,
)
FOUND: Final = _asked(
    "found", "founds", "founded", pb.FoundClusterRequest, _ids, when_lost=_HARMLESS, may_repeat=True
)

NOTIFICATION: Final = _asked(
    "notification",
    "notifications",
    "notifications",
    pb.NotificationRequest,
    _messages(pb.NotificationReply),
    when_lost="it took nothing, and is asked again",
)

COMMANDS: Final[Collection[LinkCommand[Any, Any]]] = (
    APPEND,
    ACK,
    POP,
    CHANGE_INVISIBLE,
    DEAD_LETTER,
    ENSURE,
    CANCEL_TIMER,
    FOUND,
    NOTIFICATION,
)
