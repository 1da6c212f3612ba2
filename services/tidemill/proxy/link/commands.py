"""The commands of the link at the proxy, one row each.

A row packs requests into a frame and unpacks the replies of a frame. Most commands have one message
per request, with a request id, and are sent with `BrokerLink.ask`. Append and ack, which every
message needs, travel as columns with many requests per message, and have functions of their own.

A new command needs a field in both frames (broker.proto), a row here, and a row at the broker
(`broker/server/link/commands.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

FRAME_BYTES = 8 << 20  # of all requests: some ms of work, and far below the limit of the broker
ROW_BYTES = 64  # upper bound of the fields beside a blob, and of an ack
ACKS_PER_FRAME_MAX = 4_096  # plus the last request: about 20 ms of the broker's time

# The result of an append: queue offset and 0, or timer id and due time. If the message repeats a
# dedup key, both are of the first message, which the last item describes. A plain tuple, since
# every send makes one.
Appended: TypeAlias = tuple[int, int, pb.RepeatedKey | None]
# One request that waits for a frame. Its first item is the request id.
Row: TypeAlias = tuple[Any, ...]

UNKNOWN_ACK: Final = pb.ACK_RESULT_UNSPECIFIED  # No broker sends this.


class HasRequestId(Protocol):
    """A request message of the link."""

    request_id: int


Request = TypeVar("Request", bound=HasRequestId)
Result = TypeVar("Result")


# Commands are keys of dictionaries. Each exists once, so they are compared by identity.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinkCommand(Generic[Request, Result]):
    """One kind of request."""

    name: str  # in metrics
    request_field: str  # of RequestFrame
    reply_field: str  # of ReplyFrame
    # The consequence for the caller if the link is lost before the reply arrives.
    when_lost: str
    # Adds rows to a frame.
    pack: Callable[[pb.RequestFrame, Sequence[Row]], None]
    # Returns the request ids and results in a field of a reply frame.
    unpack: Callable[[Any], Iterable[tuple[int, Result]]]
    # Returns how many of the waiting rows fit into the given number of bytes, and how many bytes
    # they take. Every row fits into an empty frame.
    cut: Callable[[Sequence[Row], int], tuple[int, int]]
    # The weight of a row in the decision to send a frame while another one is unanswered.
    weight: int = 0
    # Whether the request may be sent again if the outcome of the first time is unknown.
    may_repeat: bool = False
    # Corrects the result of a repeated request, which may differ from that of the first time.
    when_repeated: Callable[[Result], Result] | None = None


def _message_command(
    name: str,
    request_field: str,
    reply_field: str,
    _request: type[Request],
    unpack: Callable[[Any], Iterable[tuple[int, Result]]],
    *,
    when_lost: str,
    may_repeat: bool = False,
) -> LinkCommand[Request, Result]:
    """Return a command with one message per request."""

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
    """Return an unpack function for replies that are messages with a request id."""
    return lambda replies: [(reply.request_id, reply) for reply in replies]


def _ids(request_ids: Iterable[int]) -> Iterable[tuple[int, None]]:
    """Unpack replies that only state success."""
    return zip(request_ids, repeat(None))


# ---------------------------------------------------------------- columns


def _pack_appends(frame: pb.RequestFrame, rows: Sequence[Row]) -> None:
    ids, topics, queues, crcs, blobs, key_versions = zip(*rows, strict=True)
    columns = frame.appends
    columns.request_ids.extend(ids)
    columns.topic_ids.extend(topics)
    columns.queue_ids.extend(queues)
    columns.crcs.extend(crcs)
    columns.blobs.extend(blobs)
    if any(key_versions):
        columns.key_versions.extend(key_versions)


def _unpack_appends(columns: pb.AppendResults) -> Iterable[tuple[int, Appended]]:
    offsets = columns.queue_offsets
    dues = columns.due_at_ms or repeat(0, len(offsets))
    if not columns.repeats:
        return zip(columns.request_ids, zip(offsets, dues, repeat(None)), strict=True)
    repeats = {one.request_id: one for one in columns.repeats}
    firsts = map(repeats.get, columns.request_ids)
    return zip(columns.request_ids, zip(offsets, dues, firsts, strict=True), strict=True)


def _cut_appends(rows: Sequence[Row], room_bytes: int) -> tuple[int, int]:
    taken_bytes = 0
    for count, (_, _, _, _, blob, _) in enumerate(rows):
        size = len(blob) + ROW_BYTES
        if taken_bytes + size > room_bytes:
            return count, taken_bytes
        taken_bytes += size
    return len(rows), taken_bytes


def _pack_acks(frame: pb.RequestFrame, rows: Sequence[Row]) -> None:
    ids, groups, topics, slots, deliveries, indexes, instants, owners = zip(*rows, strict=True)
    columns = frame.acks
    columns.request_ids.extend(ids)
    columns.group_ids.extend(groups)
    columns.topic_ids.extend(topics)
    columns.slots.extend(slots)
    columns.delivery_ids.extend(deliveries)
    columns.indexes.extend(indexes)
    columns.visible_at_ms.extend(instants)
    if any(owners):
        columns.owners.extend(owners)


def _unpack_acks(columns: pb.AckResults) -> Iterable[tuple[int, list[int]]]:
    results: dict[int, list[int]] = {}
    for request_id, result in zip(columns.request_ids, columns.results, strict=True):
        results.setdefault(request_id, []).append(result)
    return results.items()


def _acks_of_both(results: list[int]) -> list[int]:
    """Return the results of acks that were sent twice: a missing delivery may be settled.

    The broker forgets an expired delivery, settled or not. A delivery may expire at once if the
    clock of a new master is ahead.
    """
    return [UNKNOWN_ACK if result == pb.ACK_RESULT_GONE else result for result in results]


def _cut_acks(rows: Sequence[Row], room_bytes: int) -> tuple[int, int]:
    end = min(ACKS_PER_FRAME_MAX, room_bytes // ROW_BYTES, len(rows))
    # The rows of one request travel in one frame.
    while 0 < end < len(rows) and rows[end][0] == rows[end - 1][0]:
        end += 1
    return end, end * ROW_BYTES


# ---------------------------------------------------------------- the table

_UNKNOWN: Final = "the outcome is unknown"
_HARMLESS: Final = f"{_UNKNOWN}; repeating the request does no harm"

APPEND: Final[LinkCommand[Any, Appended]] = LinkCommand(
    name="append",
    request_field="appends",
    reply_field="appends",
    when_lost=f"{_UNKNOWN}; sending again may store the message twice",
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
POP: Final = _message_command(
    "pop",
    "pops",
    "pops",
    pb.PopRequest,
    _messages(pb.PopReply),
    when_lost=f"{_UNKNOWN}; popped messages return when their invisible duration ends",
    may_repeat=True,
)
CHANGE_INVISIBLE: Final = _message_command(
    "change_invisible",
    "changes",
    "changes",
    pb.ChangeInvisibleRequest,
    _messages(pb.ChangeInvisibleReply),
    when_lost=f"{_UNKNOWN}; the receipt handle may have been replaced",
    may_repeat=True,
)
DEAD_LETTER: Final = _message_command(
    "dead_letter",
    "dead_letters",
    "dead_letters",
    pb.DeadLetterRequest,
    _messages(pb.DeadLetterReply),
    when_lost=f"{_UNKNOWN}; the message may have been moved",
    may_repeat=True,
)
ENSURE: Final = _message_command(
    "ensure",
    "ensures",
    "ensures",
    pb.EnsureRequest,
    _messages(pb.EnsureReply),
    when_lost=_HARMLESS,
    may_repeat=True,
)
CANCEL_TIMER: Final = _message_command(
    "cancel_timer",
    "timer_cancels",
    "cancelled_timers",
    pb.RecallRequest,
    _ids,
    when_lost=_HARMLESS,
    may_repeat=True,
)
HALF: Final = _message_command(
    "half",
    "halves",
    "halves",
    pb.HalfRequest,
    _messages(pb.HalfReply),
    when_lost=f"{_UNKNOWN}; a half message without a decision expires after its last check",
)
END_TRANSACTION: Final = _message_command(
    "end_transaction",
    "transaction_ends",
    "ended_transactions",
    pb.EndTransactionRequest,
    _ids,
    when_lost=_HARMLESS,
    may_repeat=True,
)
LOOK_UP_KEY: Final = _message_command(
    "look_up_key",
    "key_lookups",
    "key_lookups",
    pb.KeyLookup,
    _messages(pb.KeyLookupReply),
    when_lost=_HARMLESS,
    may_repeat=True,
)
FOUND: Final = _message_command(
    "found", "founds", "founded", pb.FoundClusterRequest, _ids, when_lost=_HARMLESS, may_repeat=True
)

NOTIFICATION: Final = _message_command(
    "notification",
    "notifications",
    "notifications",
    pb.NotificationRequest,
    _messages(pb.NotificationReply),
    when_lost="the request took no messages and is repeated",
)

COMMANDS: Final[Collection[LinkCommand[Any, Any]]] = (
    APPEND,
    ACK,
    POP,
    CHANGE_INVISIBLE,
    DEAD_LETTER,
    ENSURE,
    CANCEL_TIMER,
    HALF,
    END_TRANSACTION,
    LOOK_UP_KEY,
    FOUND,
    NOTIFICATION,
)
