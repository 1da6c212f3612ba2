"""EndTransaction, and the half messages of SendMessage."""

from __future__ import annotations

from typing import TYPE_CHECKING
from zlib import crc32

from tidemill.common.errors import InvalidTransactionId, ServiceError, TransactionNotFound
from tidemill.message import limits
from tidemill.message.rules import check_message_id
from tidemill.proxy.cluster.linked_group import open_transaction
from tidemill.proxy.link.commands import END_TRANSACTION, HALF
from tidemill.proxy.server.call import status_of
from tidemill.proxy.server.keyed_sends import KeyedRequest
from tidemill.proxy.server.send_results import OK, Outcome, encode_entry, encode_repeat
from tidemill.security.acl import Action
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from tidemill.proxy.clients.publishers import Publishers
    from tidemill.proxy.cluster.cluster import BrokerCluster, SendTarget
    from tidemill.proxy.server.call import Call
    from tidemill.proxy.server.keyed_sends import KeyedSends
    from tidemill.proxy.server.send_results import MessageSend

_RESOLUTIONS = {v2.COMMIT: link_pb2.RESOLUTION_COMMIT, v2.ROLLBACK: link_pb2.RESOLUTION_ROLLBACK}


class ProducerTransactions:
    """Half messages and their ends."""

    def __init__(self, cluster: BrokerCluster, publishers: Publishers, keyed: KeyedSends) -> None:
        self._cluster = cluster
        self._publishers = publishers
        self._keyed = keyed

    async def store_half(
        self, call: Call, topic: link_pb2.TopicConfig, send: MessageSend
    ) -> Outcome:
        """Store one half message at the broker group of its target."""
        half = link_pb2.HalfRequest(
            crc=crc32(send.blob),
            blob=send.blob,
            first_check_ms=send.first_check_ms or 0,
            client_id=call.client.client_id,
            owner=call.client.owner,
        )

        def put(at: SendTarget, key_version: int, timeout_ms: int) -> Awaitable[link_pb2.HalfReply]:
            at.broker.check_serves_transactions()
            half.topic_id, half.queue_id, half.key_version = at.topic_id, at.queue_id, key_version
            return at.broker.link.ask(HALF, half, timeout_ms=timeout_ms)

        def repeated(found: link_pb2.KeyLookupReply) -> link_pb2.HalfReply:
            return link_pb2.HalfReply(repeat=found.repeat)

        broker = send.target.broker
        try:
            if send.key is not None and not send.message_group:
                message = KeyedRequest(send.blob, put, repeated)
                broker, reply = await self._keyed.store(call, topic, send.target, message)
            else:
                reply = await put(send.target, 0, self._cluster.timeout_ms(call))
        except ServiceError as error:
            status = status_of(error)
            return status, encode_entry(status, send.message_id)
        self._publishers.note_sent(call.client, topic.name)
        if reply.HasField("repeat"):
            return OK, encode_repeat(broker, topic.name, reply.repeat, 0, 0, send.message_id)
        transaction_id = broker.transaction_signer.sign(reply.half_id, topic.name, send.message_id)
        return OK, encode_entry(OK, send.message_id, transaction_id=transaction_id)

    async def end_transaction(self, call: Call, request: bytes) -> bytes:
        """Commit a half message or roll it back; OK means that the decision is durable."""
        ending = service.EndTransactionRequest.FromString(request)
        name = call.name_of(ending.topic)
        call.require_topic(name, Action.PUB)
        check_message_id(ending.message_id)
        limits.TRANSACTION_ID.check_text(ending.transaction_id)
        if not ending.transaction_id.strip():
            raise InvalidTransactionId("the transaction id is blank")
        topic = self._cluster.find_topic(name)
        broker, half_id = open_transaction(
            self._cluster.brokers, ending.transaction_id, topic.name, ending.message_id
        )
        own_topic = broker.find_topic(topic)
        if own_topic is None:
            raise TransactionNotFound("the topic of the transaction was deleted")
        resolution = _RESOLUTIONS.get(ending.resolution, link_pb2.RESOLUTION_UNSPECIFIED)
        await broker.link.ask(
            END_TRANSACTION,
            link_pb2.EndTransactionRequest(
                half_id=half_id, topic_id=own_topic.id, resolution=resolution
            ),
            timeout_ms=self._cluster.timeout_ms(call),
        )
        status = v2.Status(code=v2.OK, message="OK")
        return service.EndTransactionResponse(status=status).SerializeToString()
