"""The data that the pages of the console show in the tests."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import httpx

from tests.support.clients.api import api, message
from tests.support.processes.processes import Standalone

MARKUP: Final = "<b onclick=alert(1)>&amp;</b>"  # in every text that a client may choose
TIMERS: Final = 12
STORED: Final = 30
HELD: Final = 3
HIDDEN_MS: Final = 3_600_000


@dataclass(frozen=True)
class ConsoleWorld:
    """A running standalone with topics, messages and delayed messages."""

    running: Standalone

    @property
    def admin(self) -> str:
        """The address of the console."""
        return self.running.admin

    def send(self, topic: str, body: str, **settings: object) -> dict[str, Any]:
        """Send a message by REST, and return the answer."""
        with httpx.Client(trust_env=False, timeout=30) as client:
            answer = client.post(
                f"{self.admin}/api/v1/topics/{topic}/messages", json={"body": body, **settings}
            )
        sent: dict[str, Any] = answer.raise_for_status().json()
        return sent


def filled_world(running: Standalone) -> ConsoleWorld:
    """Fill a standalone with data."""
    world = ConsoleWorld(running)
    running.put("topics/orders", queues=4)
    running.put("topics/payments", messageType="DELAY")
    for number in range(STORED):
        world.send("orders", f"{MARKUP} {number}", keys=[f"order-{number}"], tag="new")
    now_ms = time.time_ns() // 1_000_000
    running.put("topics/ledger", messageType="FIFO", queues=1)
    running.put("groups/billing")
    running.put("groups/booking", deliveryOrder="FIFO")
    # In a thread, since Playwright runs an event loop in this one.
    with ThreadPoolExecutor() as threads:
        threads.submit(asyncio.run, _hold_messages(running.grpc)).result()
    for number in range(TIMERS):
        due_ms = now_ms + 3_600_000 * (number + 1)
        world.send("payments", MARKUP, keys=[f"payment-{number}"], deliverAtMs=due_ms)
    return world


async def _hold_messages(endpoint: str) -> None:
    """Receive messages without an ack: some of `orders`, and the first one of `ledger`."""
    async with api(endpoint, call_s=30) as client:
        held: list[object] = []
        while len(held) < HELD:
            held += await client.receive("orders", "billing", batch_size=1, invisible_ms=HIDDEN_MS)
        for number in range(3):
            text = f"{MARKUP} {number}".encode()
            await client.send(message("ledger", text, message_group="one"))
        while not await client.receive("ledger", "booking", batch_size=1, invisible_ms=HIDDEN_MS):
            pass
