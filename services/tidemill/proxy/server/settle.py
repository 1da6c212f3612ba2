"""AckMessage, ChangeInvisibleDuration and ForwardMessageToDeadLetterQueue."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING

from tidemill.common.errors import BadRequest, BrokerUnreachable, InvalidReceiptHandle, ServiceError
from tidemill.message import limits
from tidemill.proxy.link.commands import CHANGE_INVISIBLE, DEAD_LETTER, UNKNOWN_ACK
from tidemill.proxy.message_codec import OK_STATUS, encode_acks
from tidemill.proxy.server.call import CallStatus, status_of
from tidemill.proxy.server.invisible_duration import check_invisible, duration_ms
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

if TYPE_CHECKING:
    from tidemill.message.receipt_handle import HandleFields
    from tidemill.proxy.cluster.cluster import BrokerCluster, LinkedGroup, LocalIds
    from tidemill.proxy.server.call import Call

_SETTLED = frozenset({link_pb2.ACK_RESULT_APPLIED, link_pb2.ACK_RESULT_ALREADY})
_GONE = InvalidReceiptHandle(
    "the delivery of this receipt handle has ended: the message was acked long ago, was delivered "
    "again after its invisible duration, or the handle was replaced; use the newest handle"
)
_UNKNOWN = BrokerUnreachable(
    "the connection to the broker was lost, and the broker does not know this delivery: the first "
    "ack settled the message, or the message will be delivered again"
)


class Settler:
    """The calls that settle a delivery or change its invisible duration."""

    def __init__(self, cluster: BrokerCluster) -> None:
        self._cluster = cluster

    async def ack_message(self, call: Call, request: bytes) -> bytes:
        """Settle deliveries; each entry has its own status."""
        parsed = service.AckMessageRequest.FromString(request)
        topic = self._cluster.find_topic(parsed.topic.name)
        group = self._cluster.find_group(parsed.group.name)
        entries = parsed.entries
        if not entries:
            raise BadRequest("the ack has no entries; send at least one receipt handle")
        limits.ACK_ENTRIES.check_count(len(entries))
        handles = self._cluster.deliveries(group.name, topic.name)
        timeout_ms = self._cluster.timeout_ms(call)
        outcomes: list[CallStatus | None] = [None] * len(entries)
        deliveries: dict[LinkedGroup, dict[int, HandleFields]] = {}
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
        topic = self._cluster.find_topic(parsed.topic.name)
        group = self._cluster.find_group(parsed.group.name)
        invisible_ms = duration_ms(parsed.invisible_duration)
        check_invisible(invisible_ms, min_ms=0)
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
        """Move a message to the dead-letter topic of the consumer group."""
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


def _ids_of_live(
    broker: LinkedGroup, group: link_pb2.GroupConfig, topic: link_pb2.TopicConfig
) -> LocalIds:
    """Return the ids of consumer group and topic at the broker of a delivery."""
    ids = broker.find_ids(group, topic)
    if ids is None:
        raise InvalidReceiptHandle(_GONE.message)
    return ids


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
