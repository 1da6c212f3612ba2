"""The data that the pages of the console show in the tests."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import httpx

from tests.support.clients.api import api, message
from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone

MARKUP: Final = "<b onclick=alert(1)>&amp;</b>"  # in every text that a client may choose
TIMERS: Final = 12
STORED: Final = 30
HELD: Final = 3
LETTERS: Final = 6
HIDDEN_MS: Final = 3_600_000


@dataclass(frozen=True)
class ConsoleWorld:
    """A running standalone with topics, messages and delayed messages."""

    running: Standalone

    @property
    def admin(self) -> str:
        """The address of the console."""
        return self.running.admin

    def letter_ids(self) -> list[str]:
        """Return the ids of the first dead letters, the newest first."""
        found = self.running.get("dead-letters?topic=letters")["deadLetters"]
        return [each["id"] for each in found if each["replays"] == 0][-LETTERS:]

    def fail_more(self, group: str, count: int) -> None:
        """Make dead letters of a new consumer group, of a topic of its own."""
        topic = f"of-{group}"
        self.running.put(f"topics/{topic}", queues=1)
        self.running.put(f"groups/{group}", maxAttempts=1)
        for number in range(count):
            self.send(topic, f"{MARKUP} {number}")
        with ThreadPoolExecutor() as threads:
            failing = _fail_messages(self.running.grpc, topic, group, count)
            threads.submit(asyncio.run, failing).result()
        path = f"dead-letters?group={group}"
        eventually(lambda: len(self.running.get(path)["deadLetters"]) == count)

    def hold(self, name: str, count: int) -> None:
        """Let a consumer of a new group hold messages of a new topic, both of this name."""
        self.running.put(f"topics/{name}")
        self.running.put(f"groups/{name}")
        for _ in range(count):
            self.send(name, MARKUP)
        with ThreadPoolExecutor() as threads:
            holding = _hold(self.running.grpc, name, name, count)
            threads.submit(asyncio.run, holding).result()

    def lock(self, name: str) -> None:
        """Let a consumer of a new group lock the queue of a new FIFO topic of this name."""
        self.running.put(f"topics/{name}", messageType="FIFO", queues=1)
        self.running.put(f"groups/{name}", deliveryOrder="FIFO")
        with ThreadPoolExecutor() as threads:
            locking = _lock(self.running.grpc, name, name)
            threads.submit(asyncio.run, locking).result()

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
    running.put("topics/tailed", queues=4)
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
    _fill_dead_letters(world)
    for number in range(TIMERS):
        due_ms = now_ms + 3_600_000 * (number + 1)
        world.send("payments", MARKUP, keys=[f"payment-{number}"], deliverAtMs=due_ms)
    return world


def _fill_dead_letters(world: ConsoleWorld) -> None:
    """Let a consumer group fail messages, each at its only attempt."""
    running = world.running
    running.put("topics/letters", queues=1)
    running.put("groups/mailing", maxAttempts=1)
    for number in range(LETTERS):
        world.send("letters", f"{MARKUP} {number}", keys=[f"letter-{number}"], tag="new")
    with ThreadPoolExecutor() as threads:
        failing = _fail_messages(running.grpc, "letters", "mailing", LETTERS)
        threads.submit(asyncio.run, failing).result()
    eventually(lambda: len(running.get("dead-letters")["deadLetters"]) == LETTERS)


async def _fail_messages(endpoint: str, topic: str, group: str, count: int) -> None:
    """Receive messages without an ack; their invisible duration is short."""
    async with api(endpoint, call_s=30) as client:
        failed: list[object] = []
        while len(failed) < count:
            failed += await client.receive(topic, group, invisible_ms=1_000)


async def _hold(endpoint: str, topic: str, group: str, count: int) -> None:
    """Receive messages without an ack."""
    async with api(endpoint, call_s=30) as client:
        held: list[object] = []
        while len(held) < count:
            held += await client.receive(topic, group, batch_size=1, invisible_ms=HIDDEN_MS)


async def _lock(endpoint: str, topic: str, group: str) -> None:
    """Send messages of one message group, and receive the first one without an ack."""
    async with api(endpoint, call_s=30) as client:
        for number in range(3):
            text = f"{MARKUP} {number}".encode()
            await client.send(message(topic, text, message_group="one"))
    await _hold(endpoint, topic, group, 1)


async def _hold_messages(endpoint: str) -> None:
    await _hold(endpoint, "orders", "billing", HELD)
    await _lock(endpoint, "ledger", "booking")
