"""Clients that send, receive and ack without pauses or retries.

They record the effects of a restart on an application: each failed call, and the longest call.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import grpc

from tests.support.clients.api import METADATA, ack_request, message, receive_request
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.apache.rocketmq.v2 import service_pb2_grpc

TOPIC, GROUP = "steady", "steady"
GOOD = frozenset({v2.OK, v2.MESSAGE_NOT_FOUND})


class SteadyLoad:
    """Producers and consumers on one connection, each with one call at a time."""

    def __init__(self, channel: grpc.aio.Channel, *, deadline_s: float, poll_ms: int) -> None:
        self._stub = service_pb2_grpc.MessagingServiceStub(channel)
        self._deadline_s = deadline_s
        self._poll_ms = poll_ms
        self.ended: Counter[str] = Counter()  # successful calls by kind
        self.errors: Counter[str] = Counter()
        self.longest_s = 0.0
        self._stop = asyncio.Event()

    async def run(self, *, producers: int, consumers: int) -> None:
        """Run until `stop`."""
        async with asyncio.TaskGroup() as tasks:
            for n in range(producers):
                tasks.create_task(self._produce(n))
            for _ in range(consumers):
                tasks.create_task(self._consume())

    def stop(self) -> None:
        self._stop.set()

    async def _produce(self, producer: int) -> None:
        count = 0
        while not self._stop.is_set():
            count += 1
            one = message(TOPIC, bytes(100), message_id=f"{producer}-{count}")
            request = service.SendMessageRequest(messages=[one])
            began_s = time.monotonic()
            try:
                reply = await self._stub.SendMessage(
                    request, metadata=METADATA, timeout=self._deadline_s
                )
            except grpc.aio.AioRpcError as error:
                self._note("send", began_s, str(error.code()))
            else:
                self._note("send", began_s, reply.status)

    async def _consume(self) -> None:
        while not self._stop.is_set():
            began_s = time.monotonic()
            request = receive_request(TOPIC, GROUP, poll_ms=self._poll_ms, batch_size=8)
            call = self._stub.ReceiveMessage(
                request, metadata=METADATA, timeout=self._poll_ms / 1000 + self._deadline_s
            )
            try:
                items = [item async for item in call]
            except grpc.aio.AioRpcError as error:
                self._note("receive", began_s, str(error.code()))
                continue
            self._note("receive", began_s, items[0].status, waits_s=self._poll_ms / 1000)
            handles = [
                item.message.system_properties.receipt_handle
                for item in items
                if item.HasField("message")
            ]
            if handles:
                await self._ack(handles)

    async def _ack(self, handles: list[str]) -> None:
        began_s = time.monotonic()
        request = ack_request(TOPIC, GROUP, handles)
        try:
            reply = await self._stub.AckMessage(
                request, metadata=METADATA, timeout=self._deadline_s
            )
        except grpc.aio.AioRpcError as error:
            self._note("ack", began_s, str(error.code()))
        else:
            self._note("ack", began_s, reply.status)

    def _note(
        self, kind: str, began_s: float, outcome: v2.Status | str, *, waits_s: float = 0.0
    ) -> None:
        if isinstance(outcome, str):
            self.errors[f"{kind} {outcome}"] += 1
        elif outcome.code in GOOD:
            self.ended[kind] += 1
            self.longest_s = max(self.longest_s, time.monotonic() - began_s - waits_s)
        else:
            self.errors[f"{kind} {outcome.code} {outcome.message}"] += 1
