"""Transactions over gRPC: half messages, decisions, and a producer that answers checks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

from tests.support.clients.api import METADATA, Api, message
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service

CHECK_S = 60.0  # for a check on a busy machine


def half_message(
    topic: str, body: bytes, *, first_check_ms: int = 0, due_at_ms: int = 0
) -> v2.Message:
    """Return a transactional message as a client sends it."""
    half = message(topic, body, due_at_ms=due_at_ms)
    half.system_properties.message_type = v2.TRANSACTION
    if first_check_ms:
        duration = half.system_properties.orphaned_transaction_recovery_duration
        duration.FromMilliseconds(first_check_ms)
    return half


async def send_half(api: Api, half: v2.Message) -> str:
    """Send a half message, and return its transaction id."""
    answer = await api.send(half)
    assert answer.status.code == v2.OK, answer.status
    (entry,) = answer.entries
    assert entry.transaction_id
    assert not entry.offset
    return entry.transaction_id


async def end_transaction(
    api: Api, half: v2.Message, transaction_id: str, resolution: v2.TransactionResolution.ValueType
) -> v2.Status:
    """Commit a half message or roll it back, and return the status."""
    request = service.EndTransactionRequest(
        topic=half.topic,
        message_id=half.system_properties.message_id,
        transaction_id=transaction_id,
        resolution=resolution,
    )
    answer: service.EndTransactionResponse = await api.stub.EndTransaction(
        request, metadata=METADATA, timeout=CHECK_S
    )
    return answer.status


class CheckingProducer:
    """A producer with a telemetry stream, and the checks that it got."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def next_check(self) -> service.RecoverOrphanedTransactionCommand:
        """Return the next check."""
        async with asyncio.timeout(CHECK_S):
            while True:
                command: service.TelemetryCommand = await self._stream.read()
                if command.HasField("recover_orphaned_transaction_command"):
                    return command.recover_orphaned_transaction_command


@contextlib.asynccontextmanager
async def checking_producer(
    api: Api, topics: Iterable[str], *, client_id: str = "tests"
) -> AsyncIterator[CheckingProducer]:
    """Open a telemetry stream that publishes topics."""
    metadata = (("x-mq-client-id", client_id), *METADATA[1:])
    stream = api.stub.Telemetry(metadata=metadata)
    settings = v2.Settings(
        client_type=v2.PRODUCER,
        publishing=v2.Publishing(topics=[v2.Resource(name=topic) for topic in topics]),
        user_agent=v2.UA(language=v2.PYTHON),
    )
    await stream.write(service.TelemetryCommand(settings=settings))
    async with asyncio.timeout(CHECK_S):
        await stream.read()
    try:
        yield CheckingProducer(stream)
    finally:
        stream.cancel()
