"""AckMessage, ChangeInvisibleDuration and ForwardMessageToDeadLetterQueue."""

from __future__ import annotations

import contextlib
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

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
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tidemill.message.receipt_handle import HandleFields
    from tidemill.proxy.cluster.cluster import BrokerCluster, LinkedGroup
    from tidemill.proxy.cluster.linked_group import ReceiptHandles
    from tidemill.proxy.server.call import Call

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


class Settler:
    """The calls that settle a delivery or change its invisible duration."""

    def __init__(self, cluster: BrokerCluster) -> None:
        self._cluster = cluster

    async def ack_message(self, call: Call, request: bytes) -> bytes:
        """Settle deliveries; each entry has its own status."""
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
        outcomes: list[CallStatus | None] = [None] * len(entries)
        deliveries: dict[LinkedGroup, dict[int, HandleFields]] = {}
        for number, entry in enumerate(entries):
            try:
                _check_lite_topic(entry.lite_topic)
                broker, delivery = handles.open(entry.receipt_handle)
            except ServiceError as error:
                outcomes[number] = status_of(error)
            else:
                deliveries.setdefault(broker, {})[number] = delivery
        for broker, numbered in deliveries.items():
            try:
                ids = broker.find_ids(group, topic)
                if ids is None:
                    raise InvalidReceiptHandle(_GONE.message)
                results = await broker.link.ack(
                    *ids, numbered.values(), owner=call.client.owner, timeout_ms=timeout_ms
                )
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
        """Replace a delivery. After a failure, the client keeps its handle."""
        parsed = service.ChangeInvisibleDurationRequest.FromString(request)
        try:
            handle = await self._change_invisible(call, parsed)
            status = CallStatus(v2.OK, "OK")
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
        invisible_ms = duration_ms(parsed.invisible_duration)
        check_invisible(invisible_ms, min_ms=0)
        delivery = self._open(call, parsed)
        if delivery is None:
            raise InvalidReceiptHandle(_GONE.message)
        broker = delivery.broker
        reply = await broker.link.ask(
            CHANGE_INVISIBLE,
            link_pb2.ChangeInvisibleRequest(
                **delivery.request_fields,
                invisible_duration_ms=invisible_ms,
                suspend=parsed.suspend,
            ),
            timeout_ms=self._cluster.timeout_ms(call),
        )
        signed = broker.signer.sign(
            delivery.group,
            delivery.topic,
            slot=reply.slot,
            delivery_id=reply.delivery_id,
            visible_at_ms=reply.visible_at_ms,
        )
        return signed.handle(0).decode()

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
