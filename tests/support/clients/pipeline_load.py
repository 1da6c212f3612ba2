"""Messages for the pipeline's tests, sent as a client sends them, without asyncio."""

from __future__ import annotations

import grpc

from tests.support.clients.api import METADATA
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.apache.rocketmq.v2 import service_pb2_grpc

BATCH = 32  # messages of one send
SEND_S = 30.0


def send_some(
    endpoint: str,
    topic: str,
    count: int,
    *,
    body_size: int = 64,
    first: int = 0,
    namespace: str = "",
) -> set[tuple[str, bytes]]:
    """Send messages and return the id and the body of each."""
    sent: set[tuple[str, bytes]] = set()
    with grpc.insecure_channel(
        endpoint, options=[("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        stub = service_pb2_grpc.MessagingServiceStub(channel)
        for begin in range(first, first + count, BATCH):
            messages = [
                _message(topic, i, body_size, namespace)
                for i in range(begin, min(begin + BATCH, first + count))
            ]
            answer: service.SendMessageResponse = stub.SendMessage(
                service.SendMessageRequest(messages=messages), metadata=METADATA, timeout=SEND_S
            )
            assert answer.status.code == v2.OK, answer.status
            sent |= {(each.system_properties.message_id, each.body) for each in messages}
    return sent


def _message(topic: str, i: int, body_size: int, namespace: str) -> v2.Message:
    message = v2.Message(
        topic=v2.Resource(name=topic, resource_namespace=namespace),
        body=f"{topic}-{i}".encode().ljust(body_size, b"."),
        user_properties={"colour": "red"},
    )
    system = message.system_properties
    system.message_id = f"{topic}-{i}"
    system.message_type = v2.NORMAL
    system.tag = "t"
    system.keys.extend(["k1", "k2"])
    system.body_encoding = v2.IDENTITY
    system.born_timestamp.GetCurrentTime()
    return message
