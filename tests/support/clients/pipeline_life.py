"""A small load on a real broker for an audit, with acked messages and messages in flight."""

from __future__ import annotations

import time

from tests.support.clients.api import api, message
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

TOPIC, GROUP = "lives", "readers"
SENT = 60
ACKED = 50  # delivered messages that are acked; the others stay in flight
DELAYED = 10
DELAY_MS = 1_500


async def live(endpoint: str) -> set[str]:
    """Send, delay, receive and ack; return the ids of acknowledged sends."""
    ids = set()
    async with api(endpoint) as client:
        for i in range(SENT):
            await _sent(await client.send(message(TOPIC, b"%d" % i, message_id=f"n{i}")))
            ids.add(f"n{i}")
        due_ms = int(time.time() * 1000) + DELAY_MS
        for i in range(DELAYED):
            sent = message(TOPIC, b"d%d" % i, message_id=f"d{i}", due_at_ms=due_ms + i)
            await _sent(await client.send(sent))
            ids.add(f"d{i}")
        got: list[v2.Message] = []
        while len(got) < SENT + DELAYED:
            got += await client.receive(TOPIC, GROUP, poll_ms=5_000, invisible_ms=600_000)
        handles = [each.system_properties.receipt_handle for each in got[:ACKED]]
        await client.ack(TOPIC, GROUP, handles)
    return ids


async def _sent(answer: object) -> None:
    assert answer.status.code == v2.OK, answer  # type: ignore[attr-defined]  # A SendMessageResponse.
