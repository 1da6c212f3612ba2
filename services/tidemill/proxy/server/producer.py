"""SendMessage and RecallMessage: the methods of producers."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from tidemill.common.errors import (
    BadRequest,
    BrokerTimeout,
    BrokerUnreachable,
    Forbidden,
    MessageCorrupted,
    MessageNotFound,
    Overloaded,
    ServiceError,
    UnavailableError,
)
from tidemill.message import limits
from tidemill.message.encoding import encode_stored
from tidemill.message.outline import check_send
from tidemill.message.resource_names import DEAD_LETTER_TOPIC_PREFIX, check_topic
from tidemill.message.rules import (
    accepted_types,
    check_item,
    check_message,
    check_type,
    first_check_ms,
    message_type,
    type_for_topic,
)
from tidemill.proxy.cluster.dedup_keys import dedup_key_of
from tidemill.proxy.cluster.linked_group import open_recall
from tidemill.proxy.link.commands import CANCEL_TIMER
from tidemill.proxy.server.call import CallStatus, status_of
from tidemill.proxy.server.keyed_sends import KeyedSends
from tidemill.proxy.server.link_answers import SendAnswer
from tidemill.proxy.server.send_results import (
    OK,
    MessageSend,
    Outcome,
    encode_entry,
    encode_response,
    encode_stored_entry,
)
from tidemill.proxy.server.transactions import ProducerTransactions
from tidemill.security.acl import Action
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from tidemill.common.clock import Clock
    from tidemill.proxy.clients.publishers import Publishers
    from tidemill.proxy.cluster.cluster import BrokerCluster, LinkedGroup, SendTarget
    from tidemill.proxy.link.commands import Appended
    from tidemill.proxy.quotas.sends import SendQuotas
    from tidemill.proxy.server.call import Answer, Call

_ENCODINGS = frozenset({v2.ENCODING_UNSPECIFIED, v2.IDENTITY, v2.GZIP})


# What a quota counts of a message: its bytes, its message group, and whether it is delayed.
Content: TypeAlias = tuple[bytes, str, bool]


class _Stored(NamedTuple):
    """A stored message: the broker group, and the position there."""

    broker: LinkedGroup
    appended: Appended
    # Whether another broker group, which was tried before, may have stored it as well.
    may_be_elsewhere: bool = False


class Producer:
    """The methods of producers."""

    def __init__(
        self,
        cluster: BrokerCluster,
        clock: Clock,
        *,
        item_bytes_max: int,
        publishers: Publishers,
        quotas: SendQuotas | None = None,
    ) -> None:
        """Reject messages that clients would receive as more than `item_bytes_max`.

        Without `quotas`, sends have none.
        """
        self._quotas = quotas
        self._cluster = cluster
        self._item_bytes_max = item_bytes_max
        self._clock = clock
        self._keyed = KeyedSends(cluster, clock)
        self.transactions = ProducerTransactions(cluster, publishers, self._keyed)

    def send_message(self, call: Call, request: bytes) -> Answer | None:
        """Store the messages of a request; OK means that they are durable.

        If one message is invalid, the whole request is rejected and nothing of it is stored. A send
        of one message to a known topic without quotas, transactions and dedup keys needs no task.
        """
        check_send(request)
        # A list: to iterate over the messages of a request costs more.
        messages = service.SendMessageRequest.FromString(request).messages[:]
        in_task = partial(self._send, call, messages)
        has_quotas = self._quotas is not None and self._quotas.is_active
        if call.reply is None or len(messages) != 1 or has_quotas:
            return in_task
        try:
            call.topic = name = call.name_of(messages[0].topic)
            call.require_topic(name, Action.PUB)
            topic = self._cluster.known_topic(name)
            if topic is None or topic.is_system or topic.HasField("dedup"):
                return in_task
            send = self._prepare(topic, messages[0], self._clock.wall_ms())
        except ServiceError as error:
            call.respond(_rejection(call, messages, status_of(error)))
            return None
        if not send.target.topic_id or send.first_check_ms is not None:
            return in_task
        self._append(call, topic, send)
        return None

    def _append(self, call: Call, topic: link_pb2.TopicConfig, send: MessageSend) -> None:
        """Append a message to the link of its target; the reply of the broker ends the call."""
        target = send.target
        elsewhere = partial(self._send_elsewhere, call, topic, send) if target.may_move else None
        answer = SendAnswer(call, topic.name, send.message_id, target, elsewhere)
        try:
            timeout_ms = self._cluster.timeout_ms(call)
            request_id = target.broker.link.append_for(
                answer,
                target.topic_id,
                target.queue_id,
                send.blob,
                timeout_ms=timeout_ms // 2 if target.may_move else timeout_ms,
                may_repeat=send.may_repeat,
                may_move=target.may_move,
            )
        except ServiceError as error:
            answer.set_exception(error)
        else:
            answer.wait(request_id)

    async def _send_elsewhere(
        self, call: Call, topic: link_pb2.TopicConfig, send: MessageSend, error: UnavailableError
    ) -> bytes:
        """Send a message to other broker groups after its target has failed."""
        storing = self._store_anywhere(call, topic, send.target, send.blob, failure=error)
        status, entry = await _outcome(topic.name, send.message_id, storing)
        return encode_response(call, status, entry)

    async def recall_message(self, call: Call, request: bytes) -> bytes:
        """Cancel a delayed message; OK means that it will never be delivered."""
        recall = service.RecallMessageRequest.FromString(request)
        name = call.name_of(recall.topic)
        call.require_topic(name, Action.PUB)
        topic = self._cluster.find_topic(name)
        if v2.DELAY not in accepted_types(topic.type):
            raise BadRequest(f"the topic {topic.name} does not accept delayed messages")
        broker, recalled = open_recall(self._cluster.brokers, recall.recall_handle, topic.name)
        own_topic = broker.find_topic(topic)
        if own_topic is None:
            raise MessageNotFound("the topic of the message was deleted")
        await broker.link.ask(
            CANCEL_TIMER,
            link_pb2.RecallRequest(timer_id=recalled.timer_id, topic_id=own_topic.id),
            timeout_ms=self._cluster.timeout_ms(call),
        )
        response = service.RecallMessageResponse(
            status=v2.Status(code=v2.OK, message="OK"), message_id=recalled.message_id
        )
        return response.SerializeToString()

    async def _send(self, call: Call, messages: list[v2.Message]) -> bytes:
        limits.MESSAGES.check_count(len(messages))
        try:
            if len(messages) != 1:
                _check_batch(call, messages)
            call.topic = name = call.name_of(messages[0].topic)
            call.require_topic(name, Action.PUB)
            topic = self._cluster.known_topic(name)
            now_ms = self._clock.wall_ms()
            is_new = topic is None
            if topic is None or topic.is_system:
                topic = await self._use_topic(call, name, messages, now_ms)
            # All of them before the first is stored: if one fails, none is stored.
            sends = []
            for message in messages:
                send = self._prepare(topic, message, now_ms)
                if not send.target.topic_id:
                    send = await self._wait_for_topic(call, name, send)
                sends.append(send)
            del message, send
            # The permits of the first messages of a topic were taken before its creation.
            if self._quotas is not None and self._quotas.is_active and not is_new:
                contents = [(send.blob, send.message_group, send.is_delayed) for send in sends]
                await self._admit(self._quotas, call, name, contents)
        except ServiceError as error:
            return _rejection(call, messages, status_of(error))
        # From here on the link owns the messages: nothing of them is kept while they are stored.
        del messages
        if len(sends) != 1:
            return await self._store_all(call, topic, sends)
        status, entry = await self._store(call, topic, sends.pop(), set())
        return encode_response(call, status, entry)

    async def _admit(
        self, quotas: SendQuotas, call: Call, topic: str, contents: Sequence[Content]
    ) -> None:
        """Take the permits of all messages of a request, or none. Raises Overloaded."""
        await quotas.admit(
            user=call.user,
            user_id=call.client.owner,
            client_id=call.client_id,
            topic=topic,
            messages=len(contents),
            size_bytes=sum([len(blob) for blob, _, _ in contents]),
            timers=sum([is_delayed for *_, is_delayed in contents]),
            message_groups=frozenset([group for _, group, _ in contents if group]),
        )

    async def _use_topic(
        self, call: Call, name: str, messages: Sequence[v2.Message], now_ms: int
    ) -> link_pb2.TopicConfig:
        """Return a topic of clients; create a missing one if its first messages are accepted.

        A rejected request creates nothing, so all checks and quotas come first.
        """
        topic = self._cluster.known_topic(name)
        if topic is None:
            check_topic(name)
            if not self._cluster.may_create_topic(name, call):
                return self._cluster.find_topic(name)  # It raises TopicNotFound.
            if name.startswith(DEAD_LETTER_TOPIC_PREFIX):
                raise _of_broker(name)
            topic = link_pb2.TopicConfig(name=name, type=link_pb2.TOPIC_TYPE_MIXED)
            contents = [
                (
                    self._encode(topic, message, now_ms),
                    message.system_properties.message_group,
                    message.system_properties.HasField("delivery_timestamp"),
                )
                for message in messages
            ]
            if self._quotas is not None and self._quotas.is_active:
                await self._admit(self._quotas, call, name, contents)
            call.topic = name
            await self._cluster.create_topic(name, call)
            topic = self._cluster.find_topic(name)
        if topic.is_system:
            raise _of_broker(name)
        return topic

    def _encode(self, topic: link_pb2.TopicConfig, message: v2.Message, now_ms: int) -> bytes:
        """Check and encode a message."""
        blob = _encode(message, topic, now_ms)
        check_item(blob, self._item_bytes_max)
        return blob

    def _prepare(
        self, topic: link_pb2.TopicConfig, message: v2.Message, now_ms: int
    ) -> MessageSend:
        """Check and encode a message, and choose its target."""
        properties = message.system_properties
        blob = self._encode(topic, message, now_ms)
        message_group = properties.message_group
        if topic.type == link_pb2.TOPIC_TYPE_PRIORITY:
            target = self._cluster.choose_level(topic, properties.priority)
        else:
            target = self._cluster.choose_target(topic, message_group)
        is_delayed = properties.HasField("delivery_timestamp")
        key = None
        if topic.HasField("dedup"):
            key = dedup_key_of(message, topic.dedup)
            if key is not None:
                target = self._cluster.key_owners.choose(topic, target, key, message_group)
        if properties.message_type == v2.TRANSACTION:
            # It has one transaction id, so it is stored at one broker group, and once.
            target, check_ms = target._replace(may_move=False), first_check_ms(properties)
            return MessageSend(
                properties.message_id, message_group, blob, target, False, is_delayed, key, check_ms
            )
        if key is not None:
            # The broker answers a repeat as the first time. In mode REPLACE a repeat might undo a
            # later send, or be stored after its timer has fired.
            may_repeat = topic.dedup.mode != link_pb2.DEDUP_MODE_REPLACE
            return MessageSend(
                properties.message_id, message_group, blob, target, may_repeat, is_delayed, key
            )
        # A broker looks for a repeated message in the log, and not among its timers: a second
        # timer would be one that no recall handle cancels.
        return MessageSend(
            properties.message_id, message_group, blob, target, not is_delayed, is_delayed
        )

    async def _wait_for_topic(self, call: Call, name: str, send: MessageSend) -> MessageSend:
        """Wait until the broker group of a message group knows the topic."""
        topic_id = await self._cluster.topic_id_at(send.target.broker, name, call)
        return send._replace(target=send.target._replace(topic_id=topic_id))

    async def _store_all(
        self, call: Call, topic: link_pb2.TopicConfig, sends: list[MessageSend]
    ) -> bytes:
        """Store several messages at the same time."""
        rejected_groups: set[str] = set()
        sends.reverse()
        async with asyncio.TaskGroup() as tasks:
            # Tasks begin in the order of their creation, so messages are appended in their order.
            stores = [
                tasks.create_task(
                    self._store(call, topic, sends.pop(), rejected_groups), name="store"
                )
                for _ in range(len(sends))
            ]
        statuses, entries = zip(*[store.result() for store in stores], strict=True)
        return encode_response(call, _overall_status(statuses), *entries)

    async def _store(
        self, call: Call, topic: link_pb2.TopicConfig, send: MessageSend, rejected_groups: set[str]
    ) -> Outcome:
        """Store one message. The first step, up to the first wait, appends it to the link.

        `rejected_groups` are the message groups of this request with a rejected message.
        """
        if send.first_check_ms is not None:
            return await self.transactions.store_half(call, topic, send)
        message_id, message_group, blob, target, may_repeat, _, key, _ = send
        del send
        try:
            if message_group in rejected_groups:
                # Later messages of a message group may not overtake a rejected one.
                raise Overloaded("an earlier message of this message group was rejected; retry")
            broker, topic_id, queue_id, may_move, _ = target
            if may_move:
                storing = self._store_anywhere(call, topic, target, blob)
                del blob
                return await _outcome(topic.name, message_id, storing)
            if key is not None and not message_group:
                broker, appended = await self._keyed.append(
                    call, topic, target, blob, may_repeat=may_repeat
                )
            else:
                appending = broker.link.append(
                    topic_id,
                    queue_id,
                    blob,
                    timeout_ms=self._cluster.timeout_ms(call),
                    may_repeat=may_repeat,
                )
                del blob
                appended = await appending
        except ServiceError as error:
            if message_group:
                rejected_groups.add(message_group)
            status = status_of(error)
            return status, encode_entry(status, message_id)
        return OK, encode_stored_entry(broker, topic.name, message_id, appended)

    async def _store_anywhere(
        self,
        call: Call,
        topic: link_pb2.TopicConfig,
        target: SendTarget,
        blob: bytes,
        *,
        failure: UnavailableError | None = None,
    ) -> _Stored:
        """Store a message at one broker group. If that fails, try the others within the deadline.

        `failure` is that of `target`, if it was tried already. A broker that does not reply may
        have stored the message. The message is then stored twice; the alternative is a producer
        that waits for a broker that hangs.
        """
        now_ms = self._clock.monotonic_ms
        end_ms = now_ms() + self._cluster.timeout_ms(call)
        tried: list[LinkedGroup] = []
        unknown: UnavailableError | None = None
        while True:
            if failure is None:
                remaining_ms = max(end_ms - now_ms(), 0)
                try:
                    appended = await target.broker.link.append(
                        target.topic_id,
                        target.queue_id,
                        blob,
                        timeout_ms=remaining_ms // 2 if target.may_move else remaining_ms,
                        may_move=target.may_move,
                    )
                except UnavailableError as error:
                    failure = error
                else:
                    return _Stored(target.broker, appended, may_be_elsewhere=unknown is not None)
            tried.append(target.broker)
            if isinstance(failure, BrokerTimeout | BrokerUnreachable):
                unknown = unknown or failure
            if not target.may_move or end_ms <= now_ms():
                # The last broker rejected the message; an earlier one may have stored it.
                raise unknown or failure from None
            failure = None
            try:
                if target.priority is None:
                    target = self._cluster.choose_target(topic, "", tried=tried)
                else:
                    target = self._cluster.choose_level(topic, target.priority, tried=tried)
            except BrokerUnreachable as error:
                # No broker group remains to try; one of those tried may have stored the message.
                raise unknown or error from None


async def _outcome(topic: str, message_id: str, storing: Awaitable[_Stored]) -> Outcome:
    """Return the outcome of a message that any broker group may store."""
    try:
        stored = await storing
    except ServiceError as error:
        status = status_of(error)
        return status, encode_entry(status, message_id)
    entry = encode_stored_entry(
        stored.broker, topic, message_id, stored.appended, may_be_elsewhere=stored.may_be_elsewhere
    )
    return OK, entry


def _of_broker(topic: str) -> Forbidden:
    return Forbidden(f"only the broker may store messages in the topic {topic}")


def _check_batch(call: Call, messages: Sequence[v2.Message]) -> None:
    """Check that there are messages, of one topic."""
    if not messages:
        raise MessageCorrupted("the request has no message")
    if len({call.name_of(message.topic) for message in messages}) > 1:
        raise MessageCorrupted("all messages of a request must have the same topic")


def _encode(message: v2.Message, topic: link_pb2.TopicConfig, now_ms: int) -> bytes:
    check_message(message)
    properties = message.system_properties
    kind = message_type(properties)
    # A topic that the first use would create has no queues yet.
    required = type_for_topic(kind, properties)
    check_type(required, topic.name, topic.type, exists=topic.queues > 0)
    if properties.body_encoding not in _ENCODINGS:
        raise BadRequest(f"the body encoding {properties.body_encoding} is unknown")
    return encode_stored(message, message_type=kind, now_ms=now_ms)


def _rejection(call: Call, messages: Sequence[v2.Message], status: CallStatus) -> bytes:
    """Encode the response to a rejected request."""
    ids = [message.system_properties.message_id for message in messages]
    entries = [encode_entry(status, message_id) for message_id in ids]
    return encode_response(call, status, *entries)


def _overall_status(statuses: Sequence[CallStatus]) -> CallStatus:
    """Return the status of a request with several messages."""
    if len({status.code for status in statuses}) == 1:
        return statuses[0]
    return CallStatus(v2.MULTIPLE_RESULTS, "the messages have different results; see each entry")
