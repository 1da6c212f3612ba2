"""Memory of a proxy after large replies were read, and while others are unread."""

from __future__ import annotations

from pathlib import Path

import grpc

from tests.support.clients import http2_peer as peer
from tests.support.clients.hostile_client import (
    CLOSED,
    GROUP,
    Stranger,
    memory_mib,
    message,
    path_of,
    poll,
    send_of,
)
from tests.support.processes.processes import Standalone, standalone
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service

COUNT = 25
LARGE_BYTES = 2_000_000
WIDE_OPEN = 2**30
KEPT_MIB_MAX = 20  # of 50, were each of them kept


def fill(server: Standalone, topic: str, body: bytes) -> None:
    request = send_of(message(body, topic)).SerializeToString()
    with grpc.insecure_channel(server.grpc) as channel:
        send: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            path_of("SendMessage")
        )
        for _ in range(COUNT):
            answer = send(request, metadata=(("x-mq-client-id", "producer"),), timeout=60)
            assert service.SendMessageResponse.FromString(answer).status.code == v2.OK


def poll_of(topic: str, wait_s: int = 5) -> service.ReceiveMessageRequest:
    request = poll(wait_s=wait_s)
    request.batch_size = 1
    request.message_queue.topic.name = topic
    return request


def test_nothing_stays_of_large_replies_that_were_read(tmp_path: Path) -> None:
    """Small replies came in one frame with them, and are not read; topics were made in others."""
    with standalone(tmp_path / "data") as server:
        server.put(f"groups/{GROUP}")
        for topic, body in (("small", b"x" * 10), ("large", bytes(LARGE_BYTES))):
            server.put(f"topics/{topic}", queues=1)
            fill(server, topic, body)
        [proxy] = [each for name, each in server.processes.items() if name.startswith("proxy")]
        with Stranger(server.grpc, CLOSED) as stranger:
            stranger.socket.settimeout(60)
            stranger.begin(peer.window_update(0, 2**31 - 1 - 65_535))
            before_mib = memory_mib(proxy.pid)
            for n in range(COUNT):
                first_id = stranger._next_id
                calls = [
                    stranger.call_of("ReceiveMessage", poll_of("small")),
                    stranger.call_of("ReceiveMessage", poll_of("large")),
                    stranger.call_of("ReceiveMessage", poll_of(f"new-{n}", wait_s=0)),
                ]
                opened = [peer.window_update(first_id + each, WIDE_OPEN) for each in (2, 4)]
                stranger.begin(b"".join((*calls, *opened)))
                stranger.until_end_of(first_id + 2)
                stranger.until_end_of(first_id + 4)
                stranger.frames.clear()
            assert memory_mib(proxy.pid) - before_mib < KEPT_MIB_MAX
