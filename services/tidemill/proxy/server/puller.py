"""PullMessage, QueryOffset, GetOffset, UpdateOffset: reads without consuming (ADR 0046)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from tidemill.common.errors import (
    BadRequest,
    ConnectionBufferFull,
    IllegalOffset,
    MessageNotFound,
    OffsetNotFound,
    Overloaded,
    RequestError,
    TopicNotFound,
)
from tidemill.message.encoding import TIMESTAMP_SECONDS_MAX
from tidemill.proxy.cluster.cluster import TIMEOUT_MAX_MS
from tidemill.proxy.filters import wanted_by
from tidemill.proxy.message_codec import OF_PULL, OK_STATUS, encode_next_offset
from tidemill.proxy.server.broker_queue import PULL_BYTES_MAX, PULL_MAX, READER, find_queue
from tidemill.proxy.server.call import status_of
from tidemill.proxy.shares import Shares
from tidemill.security.acl import Action
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from google.protobuf.timestamp_pb2 import Timestamp

    from tidemill.common.clock import Clock
    from tidemill.message.resources import ResourceName
    from tidemill.proxy.cluster.broker_calls import BrokerCalls
    from tidemill.proxy.cluster.cluster import BrokerCluster, LinkedGroup
    from tidemill.proxy.quotas.deliveries import DeliveryPermits, DeliveryQuotas
    from tidemill.proxy.server.broker_queue import BrokerQueue
    from tidemill.proxy.server.call import Call, Responses
    from tidemill.proxy.server.pull_pages import PullPage, PullPages
    from tidemill.proxy.settings import ProxySettings

# Added by the proxy to each message of the broker: the names of the topic and of the store.
ITEM_BYTES: Final = 512
# Required free room of the connection when a pull begins. Messages without room are read in vain.
ROOM_BYTES: Final = PULL_BYTES_MAX + PULL_MAX * ITEM_BYTES
# Pulls of all clients that wait for a message; one user or address gets half of them. Each is a
# call to a broker; the remaining calls are for reads.
WAITS_MAX: Final = 768
# Attempts of a pull whose messages find no room, because more have arrived or others took the room.
PULLS_MAX: Final = 4
ROOM_WAIT_S: Final = 10.0  # for the client to read earlier responses
PERMITS_WAIT_MS: Final = 250  # for a quota, while the pull holds room that other calls need
# Delay after a wait that ended for a message that the filter may reject.
LOOK_AGAIN_S: Final = 0.1
_NOTHING: Final = "no message became available"
_MUCH_UNREAD: Final = "too much unread data on this connection; read it and pull again"


class Puller:
    """Reads by queue and offset."""

    def __init__(
        self,
        cluster: BrokerCluster,
        calls: BrokerCalls,
        pages: PullPages,
        clock: Clock,
        settings: ProxySettings,
        quotas: DeliveryQuotas | None = None,
    ) -> None:
        """Without `quotas`, pulls have none."""
        self._quotas = quotas
        self._cluster = cluster
        self._calls = calls
        self._pages = pages
        self._waits = Shares(WAITS_MAX)
        self._clock = clock
        self._poll_max_ms = settings.long_polling_max_ms
        self._reserve_ms = settings.deadline_reserve_ms

    # ------------------------------------------------------------ messages

    async def pull_message(self, call: Call, request: bytes, responses: Responses) -> None:
        """Send messages of a queue from an offset on, and the next offset."""
        parsed = service.PullMessageRequest.FromString(request)
        del request
        wanted = wanted_by(parsed.filter_expression)
        pull = link_pb2.PullRequest(
            offset=parsed.offset,
            max_messages=min(max(parsed.batch_size, 1), PULL_MAX),
            max_bytes=PULL_BYTES_MAX,
            tags=wanted.tags,
            sql=wanted.sql,
        )
        names = call.name_of(parsed.group), call.name_of(parsed.message_queue.topic)
        call.check_while_open(lambda: call.require_consumer(*names))
        queue = self._find_queue(call, parsed.message_queue)
        self._check_group(call, parsed.group)
        if parsed.offset < 0:
            raise IllegalOffset(f"the offset must be 0 or more, not {parsed.offset}")
        pull.topic_id, pull.queue_id = queue.topic_id, queue.queue_id
        if pull.sql:
            queue.broker.link.check_serves_sql()
        wait_ms = self._wait_ms(call, parsed)
        call.is_long_polling = "true" if wait_ms else "false"
        topic = call.resource_name(parsed.message_queue.topic)
        try:
            page = await self._pull(call, queue, pull, wait_ms, responses, topic=topic)
        except _Ended as ended:
            status = status_of(ended.error)
            call.response_code = status.code
            ending = encode_next_offset(ended.next_offset)
            await responses.send_all((status.encode(), ending))
            return
        await responses.send_all((OK_STATUS, *page.items, encode_next_offset(page.next_offset)))

    async def _pull(
        self,
        call: Call,
        queue: BrokerQueue,
        pull: link_pb2.PullRequest,
        wait_ms: int,
        responses: Responses,
        *,
        topic: ResourceName,
    ) -> PullPage:
        """Return a page with messages; raise _Ended if there are none.

        While the pull waits, it holds no room.
        """
        end_ms = self._clock.monotonic_ms() + wait_ms
        while True:
            page = await self._pull_once(call, queue, pull, end_ms, responses, topic)
            if page.items:
                return page
            is_stuck = page.next_offset == pull.offset
            if is_stuck:  # Otherwise the scanned messages may have expired, which is no error.
                _check_range(pull.offset, page)
            pull.offset = page.next_offset
            remaining_ms = end_ms - self._clock.monotonic_ms()
            if remaining_ms <= 0 or (is_stuck and not page.is_at_end):
                raise _Ended(MessageNotFound(_NOTHING), page.next_offset)
            if not page.is_at_end:
                continue
            if not await self._await_message(call, queue, pull, remaining_ms):
                raise _Ended(MessageNotFound(_NOTHING), pull.offset)
            if pull.tags or pull.sql:
                await asyncio.sleep(LOOK_AGAIN_S)

    async def _await_message(
        self, call: Call, queue: BrokerQueue, pull: link_pb2.PullRequest, wait_ms: int
    ) -> bool:
        """Wait until the queue has a message from the offset on. Return False after `wait_ms`."""
        sharer = call.sharer
        if not self._waits.has_room(sharer):
            raise Overloaded("too many waiting pulls at this proxy; pull again after a pause")
        awaited = link_pb2.AwaitMessageRequest(
            topic_id=pull.topic_id, queue_id=pull.queue_id, offset=pull.offset, wait_ms=wait_ms
        )
        asking = asyncio.create_task(
            self._ask(queue.broker, "AwaitMessage", awaited, wait_ms + self._timeout_ms(call)),
            name="await a message",
        )
        released = asyncio.create_task(self._cluster.polls_released.wait(), name="released")
        self._waits.take(sharer)
        try:
            await asyncio.wait((asking, released), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                return False  # The process stops.
            return link_pb2.AwaitMessageReply.FromString(asking.result()).is_there
        finally:
            self._waits.give_back(sharer)
            asking.cancel()
            released.cancel()
            if asking.done() and not asking.cancelled():
                asking.exception()  # Mark it as retrieved: the caller may be cancelled.

    async def _pull_once(
        self,
        call: Call,
        queue: BrokerQueue,
        pull: link_pb2.PullRequest,
        end_ms: int,
        responses: Responses,
        topic: ResourceName,
    ) -> PullPage:
        """Pull a page that fits into the client's connection, and hold the room of its messages.

        If there is no room, wait without messages in memory until the client has read.
        """
        held_bytes = 0
        missing_bytes = 0 if responses.has_room(ROOM_BYTES) else ROOM_BYTES
        for _ in range(PULLS_MAX):
            if missing_bytes:
                if not await responses.hold_in_turn(missing_bytes, timeout_s=ROOM_WAIT_S):
                    raise Overloaded(_MUCH_UNREAD)
                held_bytes, missing_bytes = missing_bytes, 0
            permits = None
            if held_bytes:
                # Other calls cannot use reserved memory, so the pull waits briefly for permits.
                try:
                    permits = await self._take_permits(call, pull, end_ms, most_ms=PERMITS_WAIT_MS)
                except BaseException as error:
                    responses.release(held_bytes)
                    if not isinstance(error, _Ended):
                        raise
                    held_bytes = 0
            if not held_bytes:
                permits = await self._take_permits(call, pull, end_ms)
            try:
                page = await self._read_page(call, queue, pull, permits, topic)
            except BaseException:
                responses.release(held_bytes)
                raise
            size_bytes = sum(map(len, page.items))
            if size_bytes <= held_bytes:
                responses.release(held_bytes - size_bytes)
                return page
            if responses.hold(size_bytes - held_bytes):
                return page
            # A pull consumes nothing, so the page can be read again.
            responses.release(held_bytes)
            if permits is not None:
                permits.give_back()
            del page
            held_bytes, missing_bytes = 0, size_bytes
        raise ConnectionBufferFull(_MUCH_UNREAD)

    async def _take_permits(
        self, call: Call, pull: link_pb2.PullRequest, end_ms: int, *, most_ms: int | None = None
    ) -> DeliveryPermits | None:
        """Wait for the permits of a consumer group with a quota. Raises _Ended without permits.

        A pull that does not wait for messages waits for permits in the first half of its time.
        """
        if self._quotas is None or not self._quotas.is_limited(call.group):
            return None
        wait_ms = max(end_ms - self._clock.monotonic_ms(), self._timeout_ms(call) // 2)
        if most_ms is not None:
            wait_ms = min(wait_ms, most_ms)
        permits = await self._quotas.take(call.group, pull.max_messages, timeout_ms=wait_ms)
        if permits is None:
            raise _Ended(MessageNotFound(_NOTHING), pull.offset)
        return permits

    async def _read_page(
        self,
        call: Call,
        queue: BrokerQueue,
        pull: link_pb2.PullRequest,
        permits: DeliveryPermits | None,
        topic: ResourceName,
    ) -> PullPage:
        """Read a page with at most as many messages as there are permits."""
        if permits is not None:
            limited = link_pb2.PullRequest()
            limited.CopyFrom(pull)
            limited.max_messages = permits.messages
            pull = limited
        try:
            page = await self._pages.read(
                queue,
                pull,
                reader=call.sharer,
                header=OF_PULL,
                topic=topic,
                timeout_ms=self._timeout_ms(call),
            )
        except BaseException:
            if permits is not None:
                permits.give_back()
            raise
        if permits is not None:
            permits.spend(len(page.items), sum(map(len, page.items)))
        return page

    def _wait_ms(self, call: Call, parsed: service.PullMessageRequest) -> int:
        """Return the time that a pull may wait; 0 if it does not wait."""
        duration = parsed.long_polling_timeout
        wait_ms = min(duration.seconds * 1000 + duration.nanos // 1_000_000, self._poll_max_ms)
        remaining_ms = call.time_remaining_ms()
        if remaining_ms is not None:
            wait_ms = min(wait_ms, remaining_ms - self._reserve_ms)
        return max(wait_ms, 0)

    # ------------------------------------------------------------ offsets

    async def query_offset(self, call: Call, request: bytes) -> bytes:
        """Return the first or end offset of a queue, or the offset of a timestamp."""
        parsed = service.QueryOffsetRequest.FromString(request)
        call.require_topic(call.name_of(parsed.message_queue.topic), Action.SUB, Action.GET)
        queue = self._find_queue(call, parsed.message_queue)
        query = link_pb2.QueryOffsetRequest(topic_id=queue.topic_id, queue_id=queue.queue_id)
        policy = parsed.query_offset_policy
        if parsed.HasField("timestamp") != (policy == v2.TIMESTAMP):
            # The default policy is BEGINNING: a request with only a timestamp would get it.
            raise BadRequest("the policy TIMESTAMP needs a timestamp, and no other policy has one")
        match policy:
            case v2.TIMESTAMP:
                query.timestamp_ms = _milliseconds(parsed.timestamp)
            case v2.END:
                query.end = True
            case v2.BEGINNING:
                query.first = True
            case _:
                raise BadRequest(f"unknown policy {policy}; use BEGINNING, END or TIMESTAMP")
        answer = await self._ask(queue.broker, "QueryOffset", query, self._timeout_ms(call))
        offset = link_pb2.OffsetReply.FromString(answer).offset
        return service.QueryOffsetResponse(status=_OK, offset=offset).SerializeToString()

    async def get_offset(self, call: Call, request: bytes) -> bytes:
        """Return the pull offset that a consumer group has stored."""
        parsed = service.GetOffsetRequest.FromString(request)
        queue, group_id = self._queue_and_group(call, parsed.message_queue, parsed.group)
        query = link_pb2.GetPullOffsetRequest(
            group_id=group_id, topic_id=queue.topic_id, queue_id=queue.queue_id
        )
        answer = await self._ask(queue.broker, "GetPullOffset", query, self._timeout_ms(call))
        offset = link_pb2.OffsetReply.FromString(answer).offset
        if offset < 0:
            raise OffsetNotFound(
                f"the group {call.group} has not stored a pull offset for this queue"
            )
        return service.GetOffsetResponse(status=_OK, offset=offset).SerializeToString()

    async def update_offset(self, call: Call, request: bytes) -> bytes:
        """Store the pull offset of a consumer group. It does not affect pops."""
        parsed = service.UpdateOffsetRequest.FromString(request)
        queue, group_id = self._queue_and_group(call, parsed.message_queue, parsed.group)
        update = link_pb2.UpdatePullOffsetRequest(
            group_id=group_id,
            topic_id=queue.topic_id,
            queue_id=queue.queue_id,
            offset=parsed.offset,
        )
        await self._ask(queue.broker, "UpdatePullOffset", update, self._timeout_ms(call))
        return OK_STATUS

    def _queue_and_group(
        self, call: Call, message_queue: v2.MessageQueue, resource: v2.Resource
    ) -> tuple[BrokerQueue, int]:
        """Return the queue, and the id of the consumer group at the queue's broker."""
        call.require_consumer(call.name_of(resource), call.name_of(message_queue.topic))
        queue = self._find_queue(call, message_queue)
        group = self._cluster.find_group(call.name_of(resource))
        call.group = group.name
        own = queue.broker.find_group(group)
        if own is None:
            raise TopicNotFound(
                f"{queue.broker.name} does not know the group {group.name} yet; retry"
            )
        return queue, own.id

    # ------------------------------------------------------------ brokers

    def _check_group(self, call: Call, resource: v2.Resource) -> None:
        """Raise GroupNotFound for an unknown group. A request may omit the group."""
        if resource.name:
            call.group = self._cluster.find_group(call.name_of(resource)).name

    def _find_queue(self, call: Call, named: v2.MessageQueue) -> BrokerQueue:
        call.topic = call.name_of(named.topic)
        return find_queue(self._cluster, call.topic, named.broker.name, named.id)

    async def _ask(
        self, broker: LinkedGroup, method: str, request: Message, timeout_ms: int
    ) -> bytes:
        return await self._calls.call(
            broker, READER + method, request.SerializeToString(), timeout_ms=timeout_ms
        )

    def _timeout_ms(self, call: Call) -> int:
        return min(self._cluster.timeout_ms(call), TIMEOUT_MAX_MS)


def _milliseconds(timestamp: Timestamp) -> int:
    """Return a timestamp in milliseconds, rounded up."""
    seconds, nanos = timestamp.seconds, timestamp.nanos
    if not (0 <= seconds <= TIMESTAMP_SECONDS_MAX and 0 <= nanos < 1_000_000_000):
        raise BadRequest("the timestamp is outside the years 1970 to 9999")
    return seconds * 1000 + -(-nanos // 1_000_000)


_OK: Final = v2.Status(code=v2.OK, message="OK")


class _Ended(Exception):
    """A pull that ends without a message, with the next offset."""

    def __init__(self, error: RequestError, next_offset: int) -> None:
        super().__init__(error.message)
        self.error = error
        self.next_offset = next_offset


def _check_range(offset: int, page: PullPage) -> None:
    """Raise _Ended if the queue does not contain the offset."""
    if offset < page.min_offset:
        expired = OffsetNotFound(
            f"the message at {offset} has expired; the queue begins at {page.min_offset}"
        )
        raise _Ended(expired, page.min_offset)
    if offset > page.end_offset:
        beyond = IllegalOffset(f"the queue ends at {page.end_offset}, before {offset}")
        raise _Ended(beyond, page.end_offset)
