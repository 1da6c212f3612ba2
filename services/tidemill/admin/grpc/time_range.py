"""Reads of the messages of a time range, queue by queue, in pages.

The position after a page is its `scroll_id`: the broker group, the queue and the next offset.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import TYPE_CHECKING, Final, NamedTuple, Self, final

from tidemill.admin.cluster import calls
from tidemill.admin.grpc.calls import millis_of
from tidemill.admin.grpc.topic_calls import status_everywhere
from tidemill.common.errors import (
    BadRequest,
    BrokerGroupNotFound,
    BrokerGroupUnreachable,
    QueueNotFound,
)
from tidemill.message import limits, stored_message
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.admin.cluster.brokers import BrokerAnswers
    from tidemill.admin.grpc.calls import AdminCall
    from tidemill.admin.grpc.message_pages import MessagePage
    from tidemill.stubs.apache.rocketmq.v2 import admin_pb2 as admin

READS_MAX: Final = 64  # of queues, for one page; a rare tag then needs several pages
# Of one read with tags: a small page with a rare tag then needs no more calls than a large one.
READ_MESSAGES_MAX: Final = 256
READ_BYTES_MAX: Final = 1 << 20  # of one read of a queue; its last message may exceed it
SCROLL_CHARS_MAX: Final = 512
_OFFSET_MAX: Final = (1 << 63) - 1


class TimeRange(NamedTuple):
    """A range of store times in ms, with both ends. None: no limit."""

    begin_ms: int | None
    end_ms: int | None

    @classmethod
    def of(cls, request: admin.ListMessageRequest) -> Self:
        """Return the range of a request. Raises BadRequest."""
        begin = end = None
        if request.HasField("begin_timestamp"):
            begin = millis_of(request.begin_timestamp, "begin_timestamp")
        if request.HasField("end_timestamp"):
            end = millis_of(request.end_timestamp, "end_timestamp")
        if begin is not None and end is not None and begin > end:
            raise BadRequest("begin_timestamp is after end_timestamp")
        return cls(begin, end)

    def has(self, at_ms: int) -> bool:
        """Whether the range contains a time."""
        return (self.begin_ms is None or self.begin_ms <= at_ms) and (
            self.end_ms is None or at_ms <= self.end_ms
        )


class ScrollPosition(NamedTuple):
    """The next message of a read in several pages."""

    broker: str
    queue_id: int
    offset: int


def format_position(position: ScrollPosition) -> str:
    """Return the `scroll_id` of a position."""
    return base64.urlsafe_b64encode(json.dumps(position).encode()).decode()


def parse_position(text: str) -> ScrollPosition:
    """Return the position of a `scroll_id`. Raises BadRequest."""
    try:
        if len(text) > SCROLL_CHARS_MAX:
            raise ValueError("too long")
        broker, queue_id, offset = json.loads(base64.urlsafe_b64decode(text.encode("ascii")))
        position = ScrollPosition(str(broker), int(queue_id), int(offset))
        if not (0 <= position.queue_id < 1 << 31 and 0 <= position.offset <= _OFFSET_MAX):
            raise ValueError("outside the limits")
    except (binascii.Error, ValueError, TypeError, RecursionError, OverflowError):
        raise BadRequest("scroll_id is not one of a previous answer to this query") from None
    return position


@final
class TimeRangeReader:
    """Fills one page."""

    def __init__(
        self,
        call: AdminCall,
        request: admin.ListMessageRequest,
        range_: TimeRange,
        page: MessagePage,
    ) -> None:
        if request.page_num > 1:
            raise BadRequest("a time range has no page numbers; continue it with scroll_id")
        self._call = call
        self._request = request
        self._range = range_
        self._page = page
        self._tags = _tags_of(request.subscription)
        self._reads = 0

    async def read(self) -> tuple[list[str], str]:
        """Fill the page. Return the unreachable broker groups, and the `scroll_id`; "": no more."""
        request = self._request
        begin = parse_position(request.scroll_id) if request.scroll_id else None
        found = await status_everywhere(self._call)
        if begin is not None and begin.broker in found.unreachable:
            raise BrokerGroupUnreachable(
                f"{begin.broker} cannot be reached, and the page begins there; retry later"
            )
        for broker, status in self._chosen(found):
            for queue in sorted(status.queues, key=lambda each: each.queue_id):
                at = broker, queue.queue_id
                if request.HasField("queue_id") and queue.queue_id != request.queue_id:
                    continue
                if begin is not None and at < begin[:2]:
                    continue
                offset = begin.offset if begin is not None and at == begin[:2] else None
                position = await self._read_queue(broker, status.topic.id, queue, offset)
                if position is not None:
                    return found.unreachable, format_position(position)
        return found.unreachable, ""

    def _chosen(self, found: BrokerAnswers[pb.TopicStatus]) -> list[tuple[str, pb.TopicStatus]]:
        """Return the broker groups to read, by name. Raises BrokerGroupNotFound, QueueNotFound."""
        name, request = self._request.broker_name, self._request
        chosen = sorted(
            ((each.broker, each.value) for each in found.answers if name in {"", each.broker}),
            key=lambda each: each[0],
        )
        if not chosen:
            raise BrokerGroupNotFound(f"broker group {name} has no such topic, or is unreachable")
        if request.HasField("queue_id") and not any(
            queue.queue_id == request.queue_id for _, status in chosen for queue in status.queues
        ):
            raise QueueNotFound(f"topic {self._call.topic} has no queue {request.queue_id}")
        return chosen

    async def _read_queue(
        self, broker: str, topic_id: int, queue: pb.QueueStatus, offset: int | None
    ) -> ScrollPosition | None:
        """Read a queue to its end. Return where the next page begins if there is no more room."""
        client = (await self._call.brokers.member(broker)).client
        if offset is None:
            offset = queue.min_offset
            if self._range.begin_ms is not None and queue.min_offset < queue.max_offset:
                query = pb.QueryOffsetRequest(
                    topic_id=topic_id, queue_id=queue.queue_id, timestamp_ms=self._range.begin_ms
                )
                offset = (await client.call(calls.QUERY_OFFSET, query)).offset
        while offset < queue.max_offset:
            if self._reads >= READS_MAX or self._page.is_full:
                return ScrollPosition(broker, queue.queue_id, offset)
            self._reads += 1
            read = pb.ReadMessagesRequest(
                topic=self._call.topic,
                queue_id=queue.queue_id,
                from_offset=offset,
                max_messages=self._page.limit if self._tags is None else READ_MESSAGES_MAX,
                max_bytes=READ_BYTES_MAX,
            )
            reply = await client.call(calls.READ_MESSAGES, read)
            for message in reply.messages:
                if self._range.end_ms is not None and message.stored_at_ms > self._range.end_ms:
                    return None
                if self._matches(message) and not self._page.add(message):
                    return ScrollPosition(broker, queue.queue_id, message.queue_offset)
            if reply.next_offset <= offset:
                return None
            offset = reply.next_offset
        return None

    def _matches(self, message: pb.FoundMessage) -> bool:
        if not self._range.has(message.stored_at_ms):
            return False
        if self._tags is None:
            return True
        return stored_message.tag_of(message.blob) in self._tags


def _tags_of(subscription: str) -> frozenset[str] | None:
    """Return the tags of a filter; None: each message. Raises IllegalFilter."""
    limits.FILTER.check_text(subscription)
    tags = frozenset(tag.strip() for tag in subscription.split("||") if tag.strip())
    return None if not tags or "*" in tags else tags
