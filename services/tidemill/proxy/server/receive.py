"""ReceiveMessage: pop messages for one receive, and send them in items of their own."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Protocol

from tidemill.common.errors import (
    BrokerUnreachable,
    ConnectionBufferFull,
    MessageNotFound,
    Overloaded,
    ServiceError,
)
from tidemill.message import limits
from tidemill.message.resources import ResourceName
from tidemill.proxy.cluster.cluster import TIMEOUT_MAX_MS
from tidemill.proxy.filters import wanted_by
from tidemill.proxy.link import PoppedBatch
from tidemill.proxy.message_codec import OK_STATUS, encode_delivery_timestamp, encode_received
from tidemill.proxy.polling.poll import PopStep, outcome_of
from tidemill.proxy.polling.shell import PollingShell, PollTarget, PopFailure
from tidemill.proxy.server.invisible_duration import check_invisible, duration_ms
from tidemill.proxy.server.poll_duration import PollDurations
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2
from tidemill.transport.aio.misuse_log import MisuseLog
from tidemill.transport.grpc.connection_memory import SMALL_REPLY_BYTES

if TYPE_CHECKING:
    from tidemill.common.clock import Clock
    from tidemill.proxy.clients.clients import Clients
    from tidemill.proxy.cluster.cluster import BrokerCluster, LinkedGroup, LocalIds
    from tidemill.proxy.link import BrokerLink
    from tidemill.proxy.polling.shell import MultiBrokerReceive
    from tidemill.proxy.server.call import Call, Responses
    from tidemill.proxy.settings import ProxySettings

BATCH_SIZE_MAX = 32
# Memory of the connection that must be free when a poll begins. The largest message fits. Messages
# that are popped and do not fit are given back, which costs the broker one record per message.
REPLY_ROOM_BYTES = 5 << 20
LARGE_BYTES = 1 << 20  # an item that the log names if its client ends the receive
# What an item usually adds to the reply of the broker: names of the topic, handle, store host,
# times. `item_bytes.DELIVERY_BYTES` is the most.
ADDED_BYTES = 512
# Pops of one receive. If a reply does not fit, the receive reserves its size and pops again. Other
# consumers may have taken the messages in between, or more messages may be ready.
POPS_MAX = 4
# Time at the broker, and for permits of a quota, while the receive holds memory that other polls
# need. A link is rarely full for longer; then the receive polls without reserved memory.
ROOM_POLL_MS = 250
_NOTHING = "no message became available"
_MUCH_UNREAD = "this connection has much unread already; read it, and poll again"
AUTO_RENEW_INVISIBLE_MS = 60_000
# What a poll may take beyond its poll duration when the client has set no deadline.
_POLL_GRACE_MS = 3_000


class PopCall(Protocol):
    """A way to pop at a broker, such as `BrokerLink.pop`."""

    def __call__(
        self, request: link_pb2.PopRequest, *, timeout_ms: int
    ) -> Awaitable[link_pb2.PopReply]:
        """Pop and return the reply."""


class _NoPermits(Exception):
    """The poll has ended without permits of its consumer group."""


class Receiver:
    """ReceiveMessage."""

    def __init__(
        self,
        cluster: BrokerCluster,
        polling: PollingShell,
        clients: Clients,
        clock: Clock,
        settings: ProxySettings,
    ) -> None:
        self._cluster = cluster
        self._polling = polling
        self._clock = clock
        self._durations = PollDurations(clients, settings)
        self._invisible_min_ms = settings.invisible_duration_min_ms
        self._reserve_ms = settings.deadline_reserve_ms
        self._misuse = MisuseLog()

    async def receive_message(self, call: Call, request: bytes, responses: Responses) -> None:
        """Pop messages and send each of them in its own item."""
        # Labels of the metrics if the call is rejected.
        call.is_long_polling = call.is_short_polling_hit = "false"
        # A waiting poll keeps little memory: not the request, and not its parsed form.
        group, topic, namespace, pop = await self._read_poll(call, request)
        del request
        if pop.sql:
            for broker in self._cluster.brokers:
                broker.link.check_serves_sql()
        target = PollTarget(group, topic)
        found = None
        if self._cluster.is_single and not self._polling.is_limited(group.name):
            found = await self._poll_one(call, target, pop, responses)
        broker, ids, reply = found or await self._poll_all(call, target, pop, responses)
        popped = [
            PoppedBatch(batch.slot, batch.delivery_id, batch.visible_at_ms, tuple(batch.indexes))
            for batch in reply.batches
        ]
        items: list[bytes] = []
        try:
            items = _items(broker, group, topic, namespace, reply)
            # The items hold the messages now. A reference to the reply would keep its whole frame,
            # with the replies of other calls.
            del found, reply
            timestamp = encode_delivery_timestamp(self._clock.wall_ms())
            await responses.send_all((OK_STATUS, *items, timestamp))
        except BaseException:
            # The status is the first message of the stream.
            skip = max(responses.sent_count - 1, 0)
            self._log_large(call, topic.name, items, skip)
            broker.link.give_back(ids.group_id, ids.topic_id, popped, skip=skip)
            raise
        if pop.renews:
            # Before the client has read it, the reply may be lost with its connection.
            names = [(batch.slot, batch.delivery_id) for batch in popped]
            clock = self._clock
            responses.when_read(lambda: broker.link.report_handovers(names, clock.monotonic_ms()))

    def _log_large(self, call: Call, topic: str, items: Sequence[bytes], skip: int) -> None:
        """Log a large message at which a client ended its receive: it may accept less."""
        for item in items[skip : skip + 1]:
            if len(item) > LARGE_BYTES:
                received = service.ReceiveMessageResponse.FromString(item).message
                self._misuse.report(
                    "large_message",
                    peer=call.peer(),
                    reason="the client accepts smaller messages, or it disconnected",
                    event="client ended its receive at a large message",
                    topic=topic,
                    message_id=received.system_properties.message_id,
                    size_bytes=len(item),
                )

    async def _read_poll(
        self, call: Call, request: bytes
    ) -> tuple[link_pb2.GroupConfig, link_pb2.TopicConfig, str, link_pb2.PopRequest]:
        """Return consumer group, topic, the client's namespace, and the pop.

        The caller sets the ids of the consumer group and topic at the broker that it asks.
        """
        parsed = service.ReceiveMessageRequest.FromString(request)
        del request
        topic_name = call.resource_name(parsed.message_queue.topic)
        group_name = call.name_of(parsed.group)
        call.check_while_open(lambda: call.require_consumer(group_name, topic_name.full))
        limits.ATTEMPT_ID.check_text(parsed.attempt_id)
        wanted = wanted_by(parsed.filter_expression)
        cluster = self._cluster
        # Nearly every poll names an existing consumer group and topic.
        group = cluster.known_group(group_name)
        if group is None:
            group = await cluster.use_group(group_name, call)
        call.group = group.name
        topic = cluster.known_topic(topic_name.full)
        if topic is None:
            topic = await cluster.use_topic(topic_name.full, call)
        call.topic = topic.name
        invisible_ms = self._receive_invisible_ms(parsed)
        poll_ms = self._durations.duration_ms(call, parsed)
        # The request is valid.
        if poll_ms:
            call.is_long_polling = "true"
        if parsed.auto_renew:
            self._cluster.report_alive(call.client, self._clock.monotonic_ms())
        pop = link_pb2.PopRequest(
            max_messages=min(max(parsed.batch_size, 1), BATCH_SIZE_MAX),
            invisible_duration_ms=invisible_ms,
            poll_duration_ms=poll_ms,
            tags=wanted.tags,
            sql=wanted.sql,
            attempt_id=parsed.attempt_id,
            client_id=call.client_id,
            owner=call.client.owner,
            renews=parsed.auto_renew,
        )
        return group, topic, topic_name.namespace, pop

    async def _poll_one(
        self, call: Call, target: PollTarget, pop: link_pb2.PopRequest, responses: Responses
    ) -> tuple[LinkedGroup, LocalIds, link_pb2.PopReply] | None:
        """Poll the only broker of the cluster; the poll is parked there.

        Return None if a second broker group has joined, or if the consumer group has a quota now.
        `pop` then has the remaining poll duration.
        """
        group, topic = target
        broker = self._cluster.home
        ids = _ids_of_polled(broker, target)
        pop.group_id, pop.topic_id = ids
        poll_ms, began_ms = pop.poll_duration_ms, self._clock.monotonic_ms()
        outcome = "cancelled"
        direct = self._polling.begin_direct(broker.link, call.client, group.name)
        self._polling.counts.began(topic.name, group.name, "direct", is_long=poll_ms > 0)
        try:
            reply = await self._pop(
                call,
                pop,
                responses,
                ask=direct.pop,
                link=broker.link,
                poll_ms=poll_ms,
                room_end_ms=began_ms + poll_ms // 2,
            )
            if direct.is_ended and reply.batches:
                responses.release(_room_of(reply))
                broker.link.give_back(*ids, reply.batches)
                del reply.batches[:]
            is_joined = direct.is_over and not direct.is_ended and not reply.batches
            outcome = "joined" if is_joined else _outcome_of(reply)
        except ServiceError as error:
            outcome = outcome_of(error).value
            raise
        finally:
            self._polling.end_direct(direct)
            waited_ms = self._clock.monotonic_ms() - began_ms
            self._polling.counts.ended(
                topic.name, group.name, "direct", outcome, waited_ms, is_long=poll_ms > 0
            )
        if outcome == "joined":
            pop.poll_duration_ms = max(poll_ms - waited_ms, 0)
            return None
        if not reply.batches:
            raise MessageNotFound(_NOTHING)
        if outcome == "first_pop":
            call.is_short_polling_hit = "true"
        return broker, ids, reply

    async def _poll_all(
        self, call: Call, target: PollTarget, pop: link_pb2.PopRequest, responses: Responses
    ) -> tuple[LinkedGroup, LocalIds, link_pb2.PopReply]:
        """Pop at the brokers that the polling names until messages are found or the poll ends."""
        brokers = self._brokers_of(target)
        # The client needs the other half of the time to read the messages.
        room_end_ms = self._clock.monotonic_ms() + pop.poll_duration_ms // 2
        receive = self._polling.begin(
            target, brokers, pop, timeout_ms=self._pop_timeout_ms(call, 0)
        )
        try:
            if all(broker.link.is_given_up for broker in brokers):
                # No call waits longer for a broker (ADR 0020).
                raise BrokerUnreachable("there is no connection to any broker of the topic")
            while isinstance(step := await receive.step(), PopStep):
                broker = self._polling.broker(step.broker)
                ids = _ids_of_polled(broker, target)
                put_step(pop, ids, step)
                try:
                    reply = await self._pop(
                        call,
                        pop,
                        responses,
                        ask=receive.pop,
                        receive=receive,
                        link=broker.link,
                        poll_ms=step.poll_ms,
                        room_end_ms=room_end_ms,
                    )
                except PopFailure:
                    continue
                if receive.popped(reply):
                    call.is_short_polling_hit = "true" if receive.is_first_hit else "false"
                    return broker, ids, reply
                if reply.batches:
                    # The poll ended before the reply arrived.
                    responses.release(_room_of(reply))
                    broker.link.give_back(*ids, reply.batches)
        except ServiceError as error:
            receive.fail(error)
            raise
        finally:
            receive.close()
        raise step.error or MessageNotFound(_NOTHING)

    def _brokers_of(self, target: PollTarget) -> Sequence[LinkedGroup]:
        """Return the broker groups that store the topic."""
        brokers = self._cluster.brokers_of(target.topic, target.group)
        if not brokers:
            raise MessageNotFound(f"the topic {target.topic.name} was created again; poll again")
        return brokers

    async def _pop(
        self,
        call: Call,
        pop: link_pb2.PopRequest,
        responses: Responses,
        *,
        ask: PopCall,
        receive: MultiBrokerReceive | None = None,
        link: BrokerLink,
        poll_ms: int,
        room_end_ms: int,
    ) -> link_pb2.PopReply:
        """Pop messages that fit into the free memory of the connection, and reserve that memory.

        If the client has too much unread, the poll waits for memory as it waits for messages. It
        then reserves the known size first and waits only briefly for the permits of `receive` and
        at the broker, because other polls cannot use reserved memory.
        """
        now_ms = self._clock.monotonic_ms
        end_ms = now_ms() + poll_ms
        room_bytes = 0  # reserved
        wanted_bytes = 0 if responses.has_room(REPLY_ROOM_BYTES) else REPLY_ROOM_BYTES
        for _ in range(POPS_MAX):
            if wanted_bytes:
                await self._hold_in_turn(pop, wanted_bytes, room_end_ms, responses)
                room_bytes, wanted_bytes = wanted_bytes, 0
            if receive is not None:
                try:
                    room_bytes = await _take_permits(receive, pop, room_bytes, responses)
                except _NoPermits:
                    return link_pb2.PopReply()
            request = link_pb2.PopRequest()
            request.CopyFrom(pop)
            left_ms = max(end_ms - now_ms(), 0)
            request.poll_duration_ms = min(left_ms, ROOM_POLL_MS) if room_bytes else left_ms
            timeout_ms = self._pop_timeout_ms(call, request.poll_duration_ms)
            try:
                reply = await ask(request, timeout_ms=timeout_ms)
            except Overloaded:
                responses.release(room_bytes)
                # The link was full during the short poll. Wait on without reserved memory.
                if not room_bytes or left_ms <= ROOM_POLL_MS:
                    raise
                room_bytes = 0
                continue
            except BaseException:
                responses.release(room_bytes)
                raise
            if reply.batches:
                size_bytes = _room_of(reply)
                if size_bytes <= room_bytes:
                    if room_bytes:
                        responses.release(room_bytes - size_bytes)
                    return reply
                if responses.hold(size_bytes - room_bytes):
                    return reply
                link.give_back(pop.group_id, pop.topic_id, reply.batches)
                if receive is not None:
                    receive.return_permits()
                wanted_bytes = size_bytes
            elif not room_bytes or not left_ms:
                responses.release(room_bytes)
                return reply
            del reply
            responses.release(room_bytes)
            room_bytes = 0
        raise ConnectionBufferFull(
            "the messages do not fit into the memory of this connection; read it, and poll again"
        )

    async def _hold_in_turn(
        self, pop: link_pb2.PopRequest, size_bytes: int, end_ms: int, responses: Responses
    ) -> None:
        """Wait for memory for a reply. Raises ConnectionBufferFull, Overloaded."""
        left_ms = end_ms - self._clock.monotonic_ms()
        if pop.poll_duration_ms and left_ms <= 0:
            raise ConnectionBufferFull(_MUCH_UNREAD)
        if not await responses.hold_in_turn(size_bytes, timeout_s=max(left_ms, 0) / 1000):
            if pop.poll_duration_ms and self._clock.monotonic_ms() >= end_ms:
                raise ConnectionBufferFull(_MUCH_UNREAD)
            raise Overloaded(_MUCH_UNREAD)

    def _receive_invisible_ms(self, parsed: service.ReceiveMessageRequest) -> int:
        if parsed.auto_renew:
            return AUTO_RENEW_INVISIBLE_MS
        invisible_ms = duration_ms(parsed.invisible_duration)
        check_invisible(invisible_ms, min_ms=self._invisible_min_ms)
        return invisible_ms

    def _pop_timeout_ms(self, call: Call, poll_ms: int) -> int:
        """Return the timeout of a pop that polls for `poll_ms`."""
        remaining_ms = call.time_remaining_ms()
        if remaining_ms is None:
            return poll_ms + _POLL_GRACE_MS
        # Broker and link get half of the reserve, the client gets the other half.
        reserve_ms = min(self._reserve_ms // 2, remaining_ms // 4)
        return max(min(remaining_ms - reserve_ms, poll_ms + TIMEOUT_MAX_MS), 0)


async def _take_permits(
    receive: MultiBrokerReceive, pop: link_pb2.PopRequest, room_bytes: int, responses: Responses
) -> int:
    """Wait for permits. Return the memory that is still reserved. Raises _NoPermits."""
    if room_bytes:
        try:
            if await receive.take_permits(pop.max_messages, wait_ms=ROOM_POLL_MS):
                return room_bytes
        except BaseException:
            responses.release(room_bytes)
            raise
        responses.release(room_bytes)
    if not await receive.take_permits(pop.max_messages):
        raise _NoPermits
    return 0


def put_step(pop: link_pb2.PopRequest, ids: LocalIds, step: PopStep) -> None:
    """Put a step into the request of its receive, which may have an earlier step."""
    pop.group_id, pop.topic_id = ids
    pop.level_min, pop.level_below = step.level_min, step.level_below
    pop.ClearField("priority_factor")
    if step.factor is not None:
        pop.priority_factor = step.factor


def _ids_of_polled(broker: LinkedGroup, target: PollTarget) -> LocalIds:
    """Return the ids of consumer group and topic at a broker."""
    ids = broker.find_ids(target.group, target.topic)
    if ids is None:
        raise MessageNotFound(f"the topic {target.topic.name} was created again; poll again")
    return ids


def _outcome_of(reply: link_pb2.PopReply) -> str:
    """Return the outcome label of a poll that was one pop."""
    if not reply.batches:
        return "timeout_empty"
    return "notified" if reply.was_parked else "first_pop"


def _items(
    broker: LinkedGroup,
    group: link_pb2.GroupConfig,
    topic: link_pb2.TopicConfig,
    namespace: str,
    reply: link_pb2.PopReply,
) -> list[bytes]:
    """Build the items of a reply."""
    signer, store_host = broker.signer, broker.name.encode()
    items: list[bytes] = []
    for batch in reply.batches:
        signed = signer.sign(
            group.name,
            topic.name,
            slot=batch.slot,
            delivery_id=batch.delivery_id,
            visible_at_ms=batch.visible_at_ms,
        )
        items += encode_received(
            batch, topic=ResourceName(topic.name, namespace), store_host=store_host, signed=signed
        )
    return items


def _room_of(reply: link_pb2.PopReply) -> int:
    """Return the memory that the items of a reply need, in bytes.

    The reservation of the call covers a small reply.
    """
    count = sum([len(batch.indexes) for batch in reply.batches])
    size_bytes = reply.ByteSize() + ADDED_BYTES * count
    return size_bytes if size_bytes > SMALL_REPLY_BYTES else 0
