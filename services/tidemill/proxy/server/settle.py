"""AckMessage, ChangeInvisibleDuration and ForwardMessageToDeadLetterQueue."""

from __future__ import annotations

import contextlib
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

from tidemill.common.errors import (
    BadRequest,
    BrokerUnreachable,
    GroupNotFound,
    InvalidReceiptHandle,
    ServiceError,
    TopicNotFound,
)
from tidemill.message import limits
from tidemill.proxy.link.commands import CHANGE_INVISIBLE, DEAD_LETTER, UNKNOWN_ACK
from tidemill.proxy.message_codec import OK_STATUS, encode_acks
from tidemill.proxy.server.call import CallStatus, status_of
from tidemill.proxy.server.invisible_duration import check_invisible, duration_ms
from tidemill.proxy.server.link_answers import LinkAnswer
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tidemill.message.receipt_handle import HandleFields
    from tidemill.proxy.cluster.cluster import BrokerCluster, LinkedGroup, LocalIds
    from tidemill.proxy.cluster.linked_group import ReceiptHandles
    from tidemill.proxy.link import BrokerLink
    from tidemill.proxy.server.call import Answer, Call

_DeliveryRequest: TypeAlias = (
    "service.ChangeInvisibleDurationRequest | service.ForwardMessageToDeadLetterQueueRequest"
)
_SETTLED = frozenset({link_pb2.ACK_RESULT_APPLIED, link_pb2.ACK_RESULT_ALREADY})
_GONE = InvalidReceiptHandle(
    "the delivery of this receipt handle has ended: the message was acked long ago, was delivered "
    "again after its invisible duration, its topic or consumer group was deleted, or the handle "
    "was replaced; use the newest handle"
)
_UNKNOWN = BrokerUnreachable(
    "the connection to the broker was lost, and the broker does not know this delivery: the first "
    "ack settled the message, or the message will be delivered again"
)


class _NamedDelivery(NamedTuple):
    """The delivery that the receipt handle of a request names."""

    topic: str
    group: str
    broker: LinkedGroup
    request_fields: dict[str, Any]  # fields of each request about it


class _DeliveriesAt(NamedTuple):
    """Deliveries of one broker group, by the number of their entry in the request."""

    broker: LinkedGroup
    ids: LocalIds
    numbered: dict[int, HandleFields]


@final
class _Ack:
    """The outcomes of the entries of one ack; None: settled."""

    __slots__ = ("call", "entries", "outcomes")

    def __init__(self, call: Call, entries: Sequence[service.AckMessageEntry]) -> None:
        self.call = call
        self.entries = entries
        self.outcomes: list[CallStatus | None] = [None] * len(entries)

    def note_results(self, numbers: Iterable[int], results: Iterable[int]) -> None:
        """Note the results of a broker, in the order of the entries."""
        for number, result in zip(numbers, results, strict=True):
            if result not in _SETTLED:
                is_known = result != UNKNOWN_ACK
                self.outcomes[number] = status_of(_GONE if is_known else _UNKNOWN)

    def note_error(self, numbers: Iterable[int], error: ServiceError) -> None:
        """Note an error for all entries of a broker."""
        for number in numbers:
            self.outcomes[number] = status_of(error)

    def encode(self) -> bytes:
        """Return the AckMessageResponse."""
        if not any(self.outcomes):
            return encode_acks(self.entries, repeat(OK_STATUS, len(self.entries)), OK_STATUS)
        statuses = [OK_STATUS if one is None else one.encode() for one in self.outcomes]
        return encode_acks(self.entries, statuses, _overall(self.call, self.outcomes).encode())


@final
class _AckAnswer(LinkAnswer):
    """The answer to an ack whose deliveries are all of one broker group."""

    __slots__ = ("_ack", "_numbers")

    def __init__(self, ack: _Ack, link: BrokerLink, numbers: Iterable[int]) -> None:
        super().__init__(ack.call, link)
        self._ack = ack
        self._numbers = numbers

    def encode(self, result: list[int]) -> bytes:
        """Return the AckMessageResponse."""
        self._ack.note_results(self._numbers, result)
        return self._ack.encode()

    def set_exception(self, exception: Exception) -> None:
        """Answer each entry with the error."""
        if isinstance(exception, ServiceError):
            self._ack.note_error(self._numbers, exception)
            self._call.respond(self._ack.encode())
        else:
            self._call.fail(exception)


@final
class _ChangeAnswer(LinkAnswer):
    """The answer to a change of an invisible duration."""

    __slots__ = ("_delivery", "_handle")

    def __init__(self, call: Call, link: BrokerLink, handle: str, delivery: _NamedDelivery) -> None:
        super().__init__(call, link)
        self._handle = handle
        self._delivery = delivery

    def encode(self, result: link_pb2.ChangeInvisibleReply) -> bytes:
        """Return the ChangeInvisibleDurationResponse with the new handle."""
        return _encode_changed(self._delivery, result)

    def set_exception(self, exception: Exception) -> None:
        """Answer with the handle of the request and the error."""
        if isinstance(exception, ServiceError):
            self._call.respond(_encode_unchanged(self._call, self._handle, exception))
        else:
            self._call.fail(exception)


class Settler:
    """The calls that settle a delivery or change its invisible duration."""

    def __init__(self, cluster: BrokerCluster) -> None:
        self._cluster = cluster

    def ack_message(self, call: Call, request: bytes) -> Answer | None:
        """Settle deliveries; each entry has its own status.

        Deliveries of one broker group need no task.
        """
        parsed = service.AckMessageRequest.FromString(request)
        entries = parsed.entries
        limits.ACK_ENTRIES.check_count(len(entries))
        topic_name, group_name = call.name_of(parsed.topic), call.name_of(parsed.group)
        call.require_consumer(group_name, topic_name)
        handles = self._cluster.deliveries(group_name, topic_name)
        found = self._find(
            topic_name, group_name, handles, (entry.receipt_handle for entry in entries)
        )
        if not entries:
            raise BadRequest("the ack has no entries; send at least one receipt handle")
        if found is None:
            raise InvalidReceiptHandle(_GONE.message)
        topic, group = found
        timeout_ms = self._cluster.timeout_ms(call)
        ack = _Ack(call, entries)
        deliveries: dict[LinkedGroup, dict[int, HandleFields]] = {}
        for number, entry in enumerate(entries):
            try:
                _check_lite_topic(entry.lite_topic)
                broker, delivery = handles.open(entry.receipt_handle)
            except ServiceError as error:
                ack.outcomes[number] = status_of(error)
            else:
                deliveries.setdefault(broker, {})[number] = delivery
        by_ids: list[_DeliveriesAt] = []
        for broker, numbered in deliveries.items():
            if (ids := broker.find_ids(group, topic)) is None:
                ack.note_error(numbered, _GONE)
            else:
                by_ids.append(_DeliveriesAt(broker, ids, numbered))
        if call.reply is None or len(by_ids) > 1:
            return partial(self._ack_in_turn, ack, by_ids, timeout_ms)
        if not by_ids:
            call.respond(ack.encode())
            return None
        [(broker, ids, numbered)] = by_ids
        answer = _AckAnswer(ack, broker.link, numbered)
        try:
            request_id = broker.link.ack_for(
                answer, *ids, numbered.values(), owner=call.client.owner, timeout_ms=timeout_ms
            )
        except ServiceError as error:
            answer.set_exception(error)
        else:
            answer.wait(request_id)
        return None

    async def _ack_in_turn(
        self, ack: _Ack, by_ids: Iterable[_DeliveriesAt], timeout_ms: int
    ) -> bytes:
        """Settle the deliveries of one broker group after the other."""
        for broker, ids, numbered in by_ids:
            try:
                results = await broker.link.ack(
                    *ids, numbered.values(), owner=ack.call.client.owner, timeout_ms=timeout_ms
                )
            except ServiceError as error:
                ack.note_error(numbered, error)
            else:
                ack.note_results(numbered, results)
        return ack.encode()

    def change_invisible_duration(self, call: Call, request: bytes) -> Answer | None:
        """Replace a delivery. After a failure, the client keeps its handle."""
        parsed = service.ChangeInvisibleDurationRequest.FromString(request)
        try:
            invisible_ms = duration_ms(parsed.invisible_duration)
            check_invisible(invisible_ms, min_ms=0)
            delivery = self._open(call, parsed)
            if delivery is None:
                raise InvalidReceiptHandle(_GONE.message)
            change = link_pb2.ChangeInvisibleRequest(
                **delivery.request_fields,
                invisible_duration_ms=invisible_ms,
                suspend=parsed.suspend,
            )
            timeout_ms = self._cluster.timeout_ms(call)
            if call.reply is None:
                return partial(_change_in_task, call, parsed, delivery, change, timeout_ms)
            link = delivery.broker.link
            answer = _ChangeAnswer(call, link, parsed.receipt_handle, delivery)
            answer.wait(link.ask_for(answer, CHANGE_INVISIBLE, change, timeout_ms=timeout_ms))
        except ServiceError as error:
            response = _encode_unchanged(call, parsed.receipt_handle, error)
            if call.reply is None:
                return partial(_answered, response)
            call.respond(response)
        return None

    async def forward_to_dead_letter_queue(self, call: Call, request: bytes) -> bytes:
        """Move a message to the dead-letter topic of the consumer group.

        If the delivery has ended, the proxy moves nothing. It answers OK with a message about that.
        The message was settled, or it is delivered again. After a lost answer, push consumers of
        Java and Python repeat the forward until it succeeds, and the next messages of the message
        group wait. A Java consumer takes OK alone for a success.
        """
        parsed = service.ForwardMessageToDeadLetterQueueRequest.FromString(request)
        delivery = self._open(call, parsed)
        if delivery is None:
            return _nothing_moved(_GONE)
        try:
            await delivery.broker.link.ask(
                DEAD_LETTER,
                link_pb2.DeadLetterRequest(**delivery.request_fields),
                timeout_ms=self._cluster.timeout_ms(call),
            )
        except InvalidReceiptHandle as error:
            return _nothing_moved(error)
        return OK_STATUS

    def _open(self, call: Call, parsed: _DeliveryRequest) -> _NamedDelivery | None:
        """Return the delivery of a request; None: its topic or consumer group was deleted.

        Raises as `_find`, and InvalidReceiptHandle if the cluster did not issue the handle.
        """
        topic_name, group_name = call.name_of(parsed.topic), call.name_of(parsed.group)
        call.require_consumer(group_name, topic_name)
        handles = self._cluster.deliveries(group_name, topic_name)
        found = self._find(topic_name, group_name, handles, [parsed.receipt_handle])
        if found is None:
            return None
        topic, group = found
        _check_lite_topic(parsed.lite_topic)
        broker, delivery = handles.open(parsed.receipt_handle)
        ids = broker.find_ids(group, topic)
        if ids is None:
            return None
        fields = {
            "group_id": ids.group_id,
            "topic_id": ids.topic_id,
            "slot": delivery.slot,
            "delivery_id": delivery.delivery_id,
            "index": delivery.message_index,
            "visible_at_ms": delivery.visible_at_ms,
            "owner": call.client.owner,
        }
        return _NamedDelivery(topic.name, group.name, broker, fields)

    def _find(
        self, topic: str, group: str, handles: ReceiptHandles, texts: Iterable[str]
    ) -> tuple[link_pb2.TopicConfig, link_pb2.GroupConfig] | None:
        """Return topic and consumer group. Return None if one was deleted after a delivery.

        A push consumer repeats an ack and a change until its handle is invalid. Raises
        TopicNotFound or GroupNotFound if the cluster issued none of the receipt handles.
        """
        try:
            return self._cluster.find_topic(topic), self._cluster.find_group(group)
        except (TopicNotFound, GroupNotFound):
            for text in texts:
                with contextlib.suppress(ServiceError):
                    handles.open(text)
                    return None
            raise


async def _change_in_task(
    call: Call,
    parsed: service.ChangeInvisibleDurationRequest,
    delivery: _NamedDelivery,
    change: link_pb2.ChangeInvisibleRequest,
    timeout_ms: int,
) -> bytes:
    try:
        reply = await delivery.broker.link.ask(CHANGE_INVISIBLE, change, timeout_ms=timeout_ms)
    except ServiceError as error:
        return _encode_unchanged(call, parsed.receipt_handle, error)
    return _encode_changed(delivery, reply)


async def _answered(response: bytes) -> bytes:
    return response


def _encode_changed(delivery: _NamedDelivery, reply: link_pb2.ChangeInvisibleReply) -> bytes:
    signed = delivery.broker.signer.sign(
        delivery.group,
        delivery.topic,
        slot=reply.slot,
        delivery_id=reply.delivery_id,
        visible_at_ms=reply.visible_at_ms,
    )
    return service.ChangeInvisibleDurationResponse(
        status=v2.Status(code=v2.OK, message="OK"), receipt_handle=signed.handle(0).decode()
    ).SerializeToString()


def _encode_unchanged(call: Call, handle: str, error: ServiceError) -> bytes:
    status = status_of(error)
    call.response_code = status.code
    return service.ChangeInvisibleDurationResponse(
        status=v2.Status(code=status.code, message=status.message), receipt_handle=handle
    ).SerializeToString()


def _nothing_moved(why: InvalidReceiptHandle) -> bytes:
    return service.ForwardMessageToDeadLetterQueueResponse(
        status=v2.Status(code=v2.OK, message=f"nothing was moved: {why}")
    ).SerializeToString()


def _check_lite_topic(lite_topic: str) -> None:
    """Raise InvalidReceiptHandle for a lite topic: no delivery is of one."""
    if lite_topic:
        raise InvalidReceiptHandle(
            f"the delivery is not of the lite topic {lite_topic[:64]!r}; lite topics are not served"
        )


def _overall(call: Call, outcomes: list[CallStatus | None]) -> CallStatus:
    codes = {v2.OK if outcome is None else outcome.code for outcome in outcomes}
    if len(codes) > 1:
        overall = CallStatus(
            v2.MULTIPLE_RESULTS, "the entries have different results; check each entry"
        )
    else:
        overall = outcomes[0] or CallStatus(v2.OK, "OK")
    call.response_code = overall.code
    return overall
