"""The data that the pages of the console show in the tests."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

import httpx

from tests.support.processes.processes import Standalone

MARKUP: Final = "<b onclick=alert(1)>&amp;</b>"  # in every text that a client may choose
TIMERS: Final = 12
STORED: Final = 30


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
    for number in range(TIMERS):
        due_ms = now_ms + 3_600_000 * (number + 1)
        world.send("payments", MARKUP, keys=[f"payment-{number}"], deliverAtMs=due_ms)
    return world
