"""ReceiveMessage, AckMessage, ChangeInvisibleDuration, ForwardMessageToDeadLetterQueue."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Protocol

from tidemill.common.errors import (
    BadRequest,
    BrokerUnreachable,
    ConnectionBufferFull,
    IllegalInvisibleDuration,
    IllegalPollingTime,
    InvalidReceiptHandle,
    MessageNotFound,
    Overloaded,
    ServiceError,
)
from tidemill.message import limits
from tidemill.proxy.cluster.cluster import TIMEOUT_MAX_MS
from tidemill.proxy.filters import tags_of
from tidemill.proxy.link import Popped
from tidemill.proxy.link.commands import CHANGE_INVISIBLE, DEAD_LETTER, UNKNOWN_ACK
from tidemill.proxy.message_codec import (
    OK_STATUS,
    encode_acks,
    encode_delivery_timestamp,
    encode_received,
    encode_topic,
)
from tidemill.proxy.polling.poll import Pop, outcome_of
from tidemill.proxy.polling.shell import PollingShell, PopRefused, Target
from tidemill.proxy.server.call import CLIENT_VERSION, Status, status_of
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2
from tidemill.transport.grpc.connection_memory import SMALL_REPLY_BYTES

if TYPE_CHECKING:
    from google.protobuf.duration_pb2 import Duration

    from tidemill.common.clock import Clock
    from tidemill.message.receipt_handle import HandleFields
    from tidemill.proxy.cluster.cluster import BrokerGroup, Cluster, Ids
    from tidemill.proxy.link import BrokerLink
    from tidemill.proxy.server.call import Call, Responses
    from tidemill.proxy.settings import ProxySettings

BATCH_SIZE_MAX = 32
# Of its connection, free when a poll begins: what is popped and finds no room is given back, which
# costs the broker a record for each message. A message of the largest fits.
REPLY_ROOM_BYTES = 5 << 20
# What an item repeats for its message beside what the broker says: the topic's names, the handle,
# who stores it, and when it was.
ITEM_BYTES = 512
# Of a receive, where what the first brought had no room: it asks again when it has taken as much,
# and in between others may have got it, or more is there than before.
POPS_MAX = 4
# Of a poll that keeps room from others. A link is rarely full for longer: then it polls without.
ROOM_POLL_MS = 250
_NOTHING = "no message became available"
_MUCH_UNREAD = "this connection has much unread already; read it, and poll again"
INVISIBLE_MAX_MS = 12 * 3_600_000
AUTO_RENEW_INVISIBLE_MS = 60_000
# What a poll may take beyond its poll duration when the client has set no deadline.
_POLL_GRACE_MS = 3_000
# The first client version that knows ILLEGAL_POLLING_TIME.
_KNOWS_ILLEGAL_POLLING_TIME = (5, 0, 3)

_SETTLED = frozenset({link_pb2.ACK_RESULT_APPLIED, link_pb2.ACK_RESULT_ALREADY})
_GONE = InvalidReceiptHandle(
    "the receipt handle names no live delivery: the message was acked long ago, was redelivered "
    "after its invisible duration, or its handle was replaced; use the newest handle"
)
_UNKNOWN = BrokerUnreachable(
    "the connection to the broker was lost, and asked again it knows no such delivery any more: "
    "the message was acked the first time, or comes again"
)


class Ask(Protocol):
    """How a broker is asked for messages; `BrokerLink.pop` is one way."""

    def __call__(
        self, request: link_pb2.PopRequest, *, timeout_ms: int
    ) -> Awaitable[link_pb2.PopReply]:
        """Ask, and return the reply."""


class Consumer:
    """Answers consumers."""

    def __init__(
        self, cluster: Cluster, polling: PollingShell, clock: Clock, settings: ProxySettings
    ) -> None:
        self._cluster = cluster
        self._polling = polling
        self._clock = clock
        self._poll_min_ms = settings.grpc_client_consumer_min_long_polling_timeout_ms
        self._poll_max_ms = settings.long_polling_max_ms
        self._invisible_min_ms = settings.invisible_duration_min_ms
        self._reserve_ms = settings.deadline_reserve_ms
        self._request_timeout_ms = settings.request_timeout_ms

    async def receive_message(self, call: Call, request: bytes, responses: Responses) -> None:
        """Pop messages and send them, each in an item of its own."""
        # What the metrics tell of one that is refused.
        call.is_long_polling = call.is_short_polling_hit = "false"
        # What a poll keeps while it waits is little: neither the request nor what it is parsed to.
        group, topic, topic_wire, pop = await self._read_poll(call, request)
        del request
        target = Target(group, topic)
        found = None
        if self._cluster.is_single:
            found = await self._poll_one(call, target, pop, responses)
        broker, ids, reply = found or await self._poll_all(call, target, pop, responses)
        popped = [
            Popped(batch.slot, batch.delivery_id, batch.visible_at_ms, tuple(batch.indexes))
            for batch in reply.batches
        ]
        try:
            items = _items(broker, group, topic, topic_wire, reply)
            # Its messages are in the items now. Any part of it would keep the frame that it came
            # in, with the replies of others.
            del found, reply
            timestamp = encode_delivery_timestamp(self._clock.wall_ms())
            await responses.send_all((OK_STATUS, *items, timestamp))
        except BaseException:
            # The status is the first that has left.
            skip = max(responses.sent_count - 1, 0)
            broker.link.give_back(ids.group_id, ids.topic_id, popped, skip=skip)
            raise
        if pop.renews:
            # Until then it may be lost with its connection, and nobody would miss it.
            names = [(batch.slot, batch.delivery_id) for batch in popped]
            clock = self._clock
            responses.when_read(lambda: broker.link.handed_over(names, clock.monotonic_ms()))

    async def _read_poll(
        self, call: Call, request: bytes
    ) -> tuple[link_pb2.GroupConfig, link_pb2.TopicConfig, bytes, link_pb2.PopRequest]:
        """Return group, topic, how deliveries name the topic, and what to ask of a broker.

        Who asks it of one sets its ids of the two.
        """
        parsed = service.ReceiveMessageRequest.FromString(request)
        del request
        resource = parsed.message_queue.topic
        limits.NAMESPACE.check_text(resource.resource_namespace)
        limits.ATTEMPT_ID.check_text(parsed.attempt_id)
        tags = tags_of(parsed.filter_expression)
        cluster = self._cluster
        # Nearly every poll names what there is.
        group = cluster.known_group(parsed.group.name)
        if group is None:
            group = await cluster.use_group(parsed.group.name, call)
        call.group = group.name
        topic = cluster.known_topic(resource.name)
        if topic is None:
            topic = await cluster.use_topic(resource.name, call)
        call.topic = topic.name
        invisible_ms = self._receive_invisible_ms(parsed)
        poll_ms = self._poll_duration_ms(call, parsed)
        # From here on nothing refuses it for what it asks.
        if poll_ms:
            call.is_long_polling = "true"
        if parsed.auto_renew:
            self._cluster.client_alive(call.client_id, self._clock.monotonic_ms())
        pop = link_pb2.PopRequest(
            max_messages=min(max(parsed.batch_size, 1), BATCH_SIZE_MAX),
            invisible_duration_ms=invisible_ms,
            poll_duration_ms=poll_ms,
            tags=tags,
            attempt_id=parsed.attempt_id,
            client_id=call.client_id,
            renews=parsed.auto_renew,
        )
        return group, topic, encode_topic(resource.resource_namespace, resource.name), pop

    async def _poll_one(
        self, call: Call, target: Target, pop: link_pb2.PopRequest, responses: Responses
    ) -> tuple[BrokerGroup, Ids, link_pb2.PopReply] | None:
        """Poll the one broker that there is: it is parked there, and nobody else need be asked.

        None: a second one has joined, and `pop` is to ask them all for the time that is left.
        """
        group, topic = target
        broker = self._cluster.home
        ids = _ids_of_polled(broker, target)
        pop.group_id, pop.topic_id = ids
        poll_ms, began_ms = pop.poll_duration_ms, self._clock.monotonic_ms()
        outcome = "cancelled"
        direct = self._polling.begin_direct(broker.link)
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
            outcome = "joined" if direct.is_over and not reply.batches else _outcome_of(reply)
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
        self, call: Call, target: Target, pop: link_pb2.PopRequest, responses: Responses
    ) -> tuple[BrokerGroup, Ids, link_pb2.PopReply]:
        """Pop where the polling says, until a pop has found something or the poll is over."""
        brokers = self._brokers_of(target)
        # The other half is for the client to read what comes.
        room_end_ms = self._clock.monotonic_ms() + pop.poll_duration_ms // 2
        receive = self._polling.begin(
            target, brokers, pop, timeout_ms=self._pop_timeout_ms(call, 0)
        )
        try:
            if all(broker.link.is_given_up for broker in brokers):
                # As a call of any kind it waits for a broker no longer than that (ADR 0020).
                raise BrokerUnreachable("there is no connection to any broker of the topic")
            while isinstance(step := await receive.step(), Pop):
                broker = self._polling.broker(step.broker)
                ids = _ids_of_polled(broker, target)
                pop.group_id, pop.topic_id = ids
                try:
                    reply = await self._pop(
                        call,
                        pop,
                        responses,
                        ask=receive.pop,
                        link=broker.link,
                        poll_ms=step.poll_ms,
                        room_end_ms=room_end_ms,
                    )
                except PopRefused:
                    continue
                if receive.popped(reply):
                    call.is_short_polling_hit = "true" if receive.is_first_hit else "false"
                    return broker, ids, reply
                if reply.batches:
                    # The poll has ended while the reply was on its way.
                    responses.release(_room_of(reply))
                    broker.link.give_back(*ids, reply.batches)
        except ServiceError as error:
            receive.refused(error)
            raise
        finally:
            receive.leave()
        raise step.error or MessageNotFound(_NOTHING)

    def _brokers_of(self, target: Target) -> Sequence[BrokerGroup]:
        """Return who has what is received."""
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
        ask: Ask,
        link: BrokerLink,
        poll_ms: int,
        room_end_ms: int,
    ) -> link_pb2.PopReply:
        """Pop what the client's connection has room for, and take the room.

        Where the client has yet to read for it the poll waits, as it would for messages. It knows
        then how much room it wants, takes that first, and waits but briefly at the broker: room
        that is taken is kept from other polls.
        """
        now_ms = self._clock.monotonic_ms
        end_ms = now_ms() + poll_ms
        room_bytes = 0  # taken
        wanted_bytes = 0 if responses.has_room(REPLY_ROOM_BYTES) else REPLY_ROOM_BYTES
        for _ in range(POPS_MAX):
            if wanted_bytes:
                await self._hold_in_turn(pop, wanted_bytes, room_end_ms, responses)
                room_bytes, wanted_bytes = wanted_bytes, 0
            request = link_pb2.PopRequest()
            request.CopyFrom(pop)
            left_ms = max(end_ms - now_ms(), 0)
            request.poll_duration_ms = min(left_ms, ROOM_POLL_MS) if room_bytes else left_ms
            timeout_ms = self._pop_timeout_ms(call, request.poll_duration_ms)
            try:
                reply = await ask(request, timeout_ms=timeout_ms)
            except Overloaded:
                responses.release(room_bytes)
                # The link was full for as long as it kept room. It has time, and waits without.
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
                wanted_bytes = size_bytes
            elif not room_bytes or not left_ms:
                responses.release(room_bytes)
                return reply
            del reply
            responses.release(room_bytes)
            room_bytes = 0
        raise ConnectionBufferFull("this connection had no room for what is there; poll again")

    async def _hold_in_turn(
        self, pop: link_pb2.PopRequest, size_bytes: int, end_ms: int, responses: Responses
    ) -> None:
        """Wait for room for a reply; raises where there is none."""
        left_ms = end_ms - self._clock.monotonic_ms()
        if pop.poll_duration_ms and left_ms <= 0:
            raise ConnectionBufferFull(_MUCH_UNREAD)
        if not await responses.hold_in_turn(size_bytes, timeout_s=max(left_ms, 0) / 1000):
            if pop.poll_duration_ms and self._clock.monotonic_ms() >= end_ms:
                raise ConnectionBufferFull(_MUCH_UNREAD)
            raise Overloaded(_MUCH_UNREAD)

    async def ack_message(self, call: Call, request: bytes) -> bytes:
        """Settle deliveries; each entry ends by itself."""
        parsed = service.AckMessageRequest.FromString(request)
        topic = self._cluster.find_topic(parsed.topic.name)
        group = self._cluster.find_group(parsed.group.name)
        entries = parsed.entries
        if not entries:
            raise BadRequest("an ack has an entry")
        limits.ACK_ENTRIES.check_count(len(entries))
        handles = self._cluster.deliveries(group.name, topic.name)
        timeout_ms = self._cluster.timeout_ms(call)
        outcomes: list[Status | None] = [None] * len(entries)
        deliveries: dict[BrokerGroup, dict[int, HandleFields]] = {}
        for number, entry in enumerate(entries):
            try:
                broker, delivery = handles.open(entry.receipt_handle)
            except ServiceError as error:
                outcomes[number] = status_of(error)
            else:
                deliveries.setdefault(broker, {})[number] = delivery
        for broker, numbered in deliveries.items():
            try:
                ids = _ids_of_live(broker, group, topic)
                results = await broker.link.ack(*ids, numbered.values(), timeout_ms=timeout_ms)
            except ServiceError as error:
                for number in numbered:
                    outcomes[number] = status_of(error)
            else:
                for number, result in zip(numbered, results, strict=True):
                    if result not in _SETTLED:
                        is_known = result != UNKNOWN_ACK
                        outcomes[number] = status_of(_GONE if is_known else _UNKNOWN)
        if not any(outcomes):
            return encode_acks(entries, repeat(OK_STATUS, len(entries)), OK_STATUS)
        statuses = [OK_STATUS if outcome is None else outcome.encode() for outcome in outcomes]
        return encode_acks(entries, statuses, _overall(call, outcomes).encode())

    async def change_invisible_duration(self, call: Call, request: bytes) -> bytes:
        """Replace a delivery; on failure the client keeps the handle it has."""
        parsed = service.ChangeInvisibleDurationRequest.FromString(request)
        try:
            handle = await self._change_invisible(call, parsed)
            status = Status(v2.OK, "OK")
        except ServiceError as error:
            handle = parsed.receipt_handle
            status = status_of(error)
            call.response_code = status.code
        response = service.ChangeInvisibleDurationResponse(
            status=v2.Status(code=status.code, message=status.message), receipt_handle=handle
        )
        return response.SerializeToString()

    async def _change_invisible(
        self, call: Call, parsed: service.ChangeInvisibleDurationRequest
    ) -> str:
        topic = self._cluster.find_topic(parsed.topic.name)
        group = self._cluster.find_group(parsed.group.name)
        invisible_ms = _milliseconds(parsed.invisible_duration)
        _check_invisible(invisible_ms, min_ms=0)
        handles = self._cluster.deliveries(group.name, topic.name)
        broker, delivery = handles.open(parsed.receipt_handle)
        ids = _ids_of_live(broker, group, topic)
        reply = await broker.link.ask(
            CHANGE_INVISIBLE,
            link_pb2.ChangeInvisibleRequest(
                group_id=ids.group_id,
                topic_id=ids.topic_id,
                slot=delivery.slot,
                delivery_id=delivery.delivery_id,
                index=delivery.message_index,
                visible_at_ms=delivery.visible_at_ms,
                invisible_duration_ms=invisible_ms,
                suspend=parsed.suspend,
            ),
            timeout_ms=self._cluster.timeout_ms(call),
        )
        signed = broker.signer.sign(
            group.name,
            topic.name,
            slot=reply.slot,
            delivery_id=reply.delivery_id,
            visible_at_ms=reply.visible_at_ms,
        )
        return signed.handle(0).decode()

    async def forward_to_dead_letter_queue(self, call: Call, request: bytes) -> bytes:
        """Move a message that cannot be consumed to the group's dead-letter topic."""
        parsed = service.ForwardMessageToDeadLetterQueueRequest.FromString(request)
        topic = self._cluster.find_topic(parsed.topic.name)
        group = self._cluster.find_group(parsed.group.name)
        handles = self._cluster.deliveries(group.name, topic.name)
        broker, delivery = handles.open(parsed.receipt_handle)
        ids = _ids_of_live(broker, group, topic)
        await broker.link.ask(
            DEAD_LETTER,
            link_pb2.DeadLetterRequest(
                group_id=ids.group_id,
                topic_id=ids.topic_id,
                slot=delivery.slot,
                delivery_id=delivery.delivery_id,
                index=delivery.message_index,
                visible_at_ms=delivery.visible_at_ms,
            ),
            timeout_ms=self._cluster.timeout_ms(call),
        )
        return OK_STATUS

    def _receive_invisible_ms(self, parsed: service.ReceiveMessageRequest) -> int:
        if parsed.auto_renew:
            return AUTO_RENEW_INVISIBLE_MS
        invisible_ms = _milliseconds(parsed.invisible_duration)
        _check_invisible(invisible_ms, min_ms=self._invisible_min_ms)
        return invisible_ms

    def _poll_duration_ms(self, call: Call, parsed: service.ReceiveMessageRequest) -> int:
        """Return how long the poll may wait; 0 asks once.

        Raises IllegalPollingTime when the deadline leaves no room for a poll.
        """
        remaining_ms = call.time_remaining_ms()
        if parsed.HasField("long_polling_timeout"):
            wanted_ms = _milliseconds(parsed.long_polling_timeout)
            if wanted_ms == 0:
                return 0
        elif remaining_ms is None:
            wanted_ms = self._poll_max_ms
        else:
            wanted_ms = remaining_ms - self._request_timeout_ms // 2
        poll_ms = min(max(wanted_ms, self._poll_min_ms), self._poll_max_ms)
        if remaining_ms is None or poll_ms <= remaining_ms - self._reserve_ms:
            return poll_ms
        if remaining_ms >= self._poll_min_ms:
            return max(remaining_ms - self._reserve_ms, 0)
        message = (
            f"{remaining_ms} ms are left before the deadline, and a long poll takes at least"
            f" {self._poll_min_ms} ms"
        )
        if _version(call.metadata.get(CLIENT_VERSION, "")) < _KNOWS_ILLEGAL_POLLING_TIME:
            raise BadRequest(message)
        raise IllegalPollingTime(message)

    def _pop_timeout_ms(self, call: Call, poll_ms: int) -> int:
        """Return when to give up on a broker that does not answer at the end of the poll."""
        remaining_ms = call.time_remaining_ms()
        if remaining_ms is None:
            return poll_ms + _POLL_GRACE_MS
        # Half of the reserve is the broker's and the link's, the other half the client's.
        reserve_ms = min(self._reserve_ms // 2, remaining_ms // 4)
        return max(min(remaining_ms - reserve_ms, poll_ms + TIMEOUT_MAX_MS), 0)


def _ids_of_polled(broker: BrokerGroup, target: Target) -> Ids:
    """Return the ids with which a broker is asked for messages."""
    ids = broker.find_ids(target.group, target.topic)
    if ids is None:
        raise MessageNotFound(f"the topic {target.topic.name} was created again; poll again")
    return ids


def _outcome_of(reply: link_pb2.PopReply) -> str:
    """Return what the metrics call the end of a poll that was one pop."""
    if not reply.batches:
        return "timeout_empty"
    return "notified" if reply.was_parked else "first_pop"


def _ids_of_live(
    broker: BrokerGroup, group: link_pb2.GroupConfig, topic: link_pb2.TopicConfig
) -> Ids:
    """Return the ids with which a broker is asked about a delivery."""
    ids = broker.find_ids(group, topic)
    if ids is None:
        raise InvalidReceiptHandle(_GONE.message)
    return ids


def _items(
    broker: BrokerGroup,
    group: link_pb2.GroupConfig,
    topic: link_pb2.TopicConfig,
    topic_wire: bytes,
    reply: link_pb2.PopReply,
) -> list[bytes]:
    """Join the items of a reply."""
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
        items += encode_received(batch, topic_wire=topic_wire, store_host=store_host, signed=signed)
    return items


def _room_of(reply: link_pb2.PopReply) -> int:
    """Return how much room the items of a reply need, beyond what the call took.

    A small one is a part of that.
    """
    count = sum([len(batch.indexes) for batch in reply.batches])
    size_bytes = reply.ByteSize() + ITEM_BYTES * count
    return size_bytes if size_bytes > SMALL_REPLY_BYTES else 0


def _check_invisible(invisible_ms: int, *, min_ms: int) -> None:
    """Raise IllegalInvisibleDuration beyond the limits."""
    limits_text = f"it is {min_ms} ms to 12 hours"
    # Applications of the reference look for these words.
    if invisible_ms < min_ms:
        raise IllegalInvisibleDuration(f"the invisibleTime is too small: {limits_text}")
    if invisible_ms > INVISIBLE_MAX_MS:
        raise IllegalInvisibleDuration(f"the invisibleTime is too large: {limits_text}")


def _milliseconds(duration: Duration) -> int:
    return duration.seconds * 1000 + duration.nanos // 1_000_000


def _version(text: str) -> tuple[int, ...]:
    """Parse a client's version; one that cannot be parsed counts as new."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else _KNOWS_ILLEGAL_POLLING_TIME


def _overall(call: Call, outcomes: list[Status | None]) -> Status:
    codes = {v2.OK if outcome is None else outcome.code for outcome in outcomes}
    if len(codes) > 1:
        overall = Status(v2.MULTIPLE_RESULTS, "the entries ended differently; see each of them")
    else:
        overall = outcomes[0] or Status(v2.OK, "OK")
    call.response_code = overall.code
    return overall
