"""Trace of a message: its events in the logs of all broker groups.

    cursor: broker ":" position ":" index ":" end of the log ":" id of the log, for each broker
            group with unread log, with a comma between them

The first call fixes the end of each log, so that the calls come to an end while brokers continue to
write. A client may have invented its cursor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, NamedTuple, final

from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import BrokerGroupClient, Brokers
from tidemill.admin.json.messages import MessageEventView, MessageTraceView
from tidemill.common.errors import BrokerGroupUnreachable, MessageNotFound, ServiceError
from tidemill.security.acl import Action
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb

if TYPE_CHECKING:
    from tidemill.admin.http.request_access import RequestAccess

LOG_BYTES_MAX: Final = 64 << 20  # per call, over all broker groups
LOG_BYTES_PER_REQUEST: Final = 8 << 20  # a broker reads them within the request timeout
EVENTS_MAX: Final = 10_000  # per call: a message may be popped by very many consumer groups
CURSOR_CHARS_MAX: Final = 4_096  # of about 70 broker groups; a whole URL has at most 64 KiB
_ONE_CURSOR: Final = "[A-Za-z0-9._-]{1,64}:[0-9]{1,19}:[0-9]{1,10}:[0-9]{1,19}:[A-Za-z0-9._-]{1,64}"
CURSOR_PATTERN: Final = f"^({_ONE_CURSOR}(,{_ONE_CURSOR})*)?$"
_POSITION_MAX: Final = 2**63 - 1
_INDEX_MAX: Final = 2**32 - 1


class TraceCursor(NamedTuple):
    """The read position in the log of a broker group, and the end of the trace."""

    position: int
    event_index: int  # of the next event of the record at `position`
    end: int
    log_id: str


async def trace(
    cluster: Brokers,
    message_id: str,
    cursor: str,
    access: RequestAccess,
    *,
    is_gone: Callable[[], Awaitable[bool]],
) -> MessageTraceView:
    """Continue to read the logs of all broker groups; raise MessageNotFound without any record.

    Stop between two pages if the client `is_gone`. A message whose topic the user may not read
    looks like a missing one, also to a call with an invented cursor.
    """
    if access.is_limited:
        first = _TraceReader(message_id, None, access)
        await first.read_page(cluster)
        if not first.events:
            raise first.missing()
    reader = _TraceReader(message_id, _decode(cursor) if cursor else None, access)
    while True:
        before = reader.cursors
        await reader.read_page(cluster)
        if reader.is_full or not reader.open_cursors or reader.cursors == before or await is_gone():
            break
    if not (reader.events or reader.damaged or cursor or reader.open_cursors):
        raise reader.missing()
    return reader.result()


@final
class _TraceReader:
    """The results of one call: events, and the cursor of each log."""

    def __init__(
        self, message_id: str, cursors: dict[str, TraceCursor] | None, access: RequestAccess
    ) -> None:
        self._message_id = message_id
        self._access = access
        self.cursors = cursors  # None before the first page
        self.events: list[MessageEventView] = []
        self.unreachable: list[str] = []
        self.damaged: Counter[str] = Counter()
        self._read_bytes = 0

    @property
    def open_cursors(self) -> dict[str, TraceCursor]:
        """The cursors of reachable logs with unread bytes."""
        cursors = self.cursors or {}
        return {name: each for name, each in cursors.items() if name not in self.unreachable}

    @property
    def is_full(self) -> bool:
        """Whether this call has read enough."""
        return self._read_bytes >= LOG_BYTES_MAX or len(self.events) >= EVENTS_MAX

    async def read_page(self, cluster: Brokers) -> None:
        """Read one page of each log that has unread bytes."""
        found = await cluster.ask_all(self._ask)
        before, self.cursors = self.cursors or {}, dict(self.cursors or {})
        asked = {answer.broker for answer in found.answers}
        # A broker group in the cursor that is not a member cannot be read either.
        missing = [*found.unreachable, *(name for name in before if name not in asked)]
        self.unreachable += [
            name for name in dict.fromkeys(missing) if name not in self.unreachable
        ]
        for broker, reply in found.answers:
            if reply is not None:
                self._add(broker, reply, before.get(broker))

    async def _ask(self, member: BrokerGroupClient) -> pb.ReadEventsReply | None:
        request = pb.ReadEventsRequest(
            message_id=self._message_id, log_bytes_max=LOG_BYTES_PER_REQUEST
        )
        if self.cursors is None:
            request.from_message = True
        elif member.name in self.open_cursors:
            cursor = self.cursors[member.name]
            request.from_position, request.from_index = cursor.position, cursor.event_index
            request.until_position, request.log_id = cursor.end, cursor.log_id
        else:
            return None
        return await member.client.call(calls.READ_EVENTS, request)

    def _add(self, broker: str, reply: pb.ReadEventsReply, before: TraceCursor | None) -> None:
        assert self.cursors is not None, "a page was read"
        self.events += [one for one in _events_of(broker, reply) if _is_shown(self._access, one)]
        if reply.damaged_bytes:
            self.damaged[broker] += reply.damaged_bytes
        # Clients may change a cursor, so the end of the log bounds its end.
        end = reply.log_end if before is None else min(before.end, reply.log_end)
        cursor = TraceCursor(reply.next_position, reply.next_index, end, reply.log_id)
        begin = before.position if before else cursor.position
        if before is None and reply.events:
            begin = reply.events[0].position  # The first page begins at the message.
        self._read_bytes += cursor.position - begin
        self.cursors[broker] = cursor
        if cursor.position >= cursor.end:
            del self.cursors[broker]

    def missing(self) -> ServiceError:
        """Return the error of a message without a record."""
        if self.unreachable:
            return BrokerGroupUnreachable(
                f"{', '.join(self.unreachable)} cannot be reached, and no other broker group has"
                f" message {self._message_id}; retry later"
            )
        return MessageNotFound(f"no broker group has a record of message {self._message_id}")

    def result(self) -> MessageTraceView:
        """Return the events, and the cursor of the next call."""
        cursors = self.open_cursors
        return MessageTraceView(
            events=self.events,
            cursor=_encode(cursors) or None,
            read_bytes=self._read_bytes,
            left_bytes=sum(cursor.end - cursor.position for cursor in cursors.values()),
            damaged_bytes=dict(self.damaged) or None,
            unreachable=self.unreachable or None,
        )


def _is_shown(access: RequestAccess, event: MessageEventView) -> bool:
    """Whether the user may read the topic of an event, its origin, and its consumer group."""
    topics = {event.topic, event.origin_topic or event.topic}
    group = event.consumer_group
    return all(access.allows_topic(Action.GET, topic) for topic in topics) and (
        not group or access.allows_group(Action.GET, group)
    )


def _events_of(broker: str, reply: pb.ReadEventsReply) -> list[MessageEventView]:
    return [
        MessageEventView(
            event=pb.EventKind.Name(event.kind).removeprefix("EVENT_KIND_").lower(),
            at_ms=event.at_ms,
            broker=broker,
            position=event.position,
            index=event.index,
            topic=event.topic,
            queue_id=event.queue_id,
            queue_offset=event.queue_offset,
            consumer_group=event.consumer_group or None,
            attempt=event.attempt or None,
            due_at_ms=event.due_at_ms or None,
            client_id=event.client_id or None,
            reason=event.reason or None,
            origin_topic=event.origin_topic or None,
            body_size=event.body_size or None,
        )
        for event in reply.events
    ]


def _encode(cursors: dict[str, TraceCursor]) -> str:
    return ",".join(":".join(map(str, (name, *cursor))) for name, cursor in cursors.items())


def _decode(text: str) -> dict[str, TraceCursor]:
    """Return the positions in a cursor of the form CURSOR_PATTERN."""
    cursors = {}
    for each in text.split(","):
        name, position, index, end, log_id = each.split(":")
        cursors[name] = TraceCursor(
            min(int(position), _POSITION_MAX),
            min(int(index), _INDEX_MAX),
            min(int(end), _POSITION_MAX),
            log_id,
        )
    return cursors
