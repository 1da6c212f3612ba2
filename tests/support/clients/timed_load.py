"""Senders that recall some of their delayed messages, and consumers, both through all faults.

`TimedLoad.judge` reports broken guarantees from the clients' view:

    T-1   no message comes before it is due
    T-3   an acknowledged message that was not recalled comes
    T-11  a recalled message never comes; if a recall was too late, the message has come
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field

import grpc

from tests.support.clients.api import POLL_MS_MIN, Api, api, message
from tests.support.clients.history import Outcome
from tests.support.clients.load import INVISIBLE_MS, PAUSE_S, outcome_of
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

RECALL_SHARE = 0.1
QUIET_S = 2 * INVISIBLE_MS / 1000
BACKLOG_MAX = 20_000  # stored messages that no consumer has received


@dataclass(slots=True)
class TimedMessage:
    """The history of one delayed message."""

    due_at_ms: int
    sent: Outcome = Outcome.UNKNOWN
    recalled: Outcome | None = None  # None: no recall; FAILED: the recall was too late
    received_at_ms: list[int] = field(default_factory=list)


@dataclass(slots=True)
class TimedLoad:
    """One topic and one consumer group, with producers and consumers."""

    endpoint: str
    topic: str
    group: str
    rng: random.Random
    delay_ms_max: int
    messages: dict[str, TimedMessage] = field(default_factory=dict)
    sent_ok: int = 0
    received: int = 0
    recalled_ok: int = 0
    _last_received_at: float = 0.0

    @property
    def status(self) -> str:
        """The progress so far."""
        return (
            f"{self.topic}: {self.sent_ok} scheduled, {self.received} received, "
            f"{self.recalled_ok} recalled"
        )

    async def run(self, *, producers: int, consumers: int, stop: asyncio.Event) -> None:
        """Schedule until `stop`. Consume until all messages have come."""
        async with asyncio.TaskGroup() as tasks:
            producing = [tasks.create_task(self._produce(n, stop)) for n in range(producers)]
            consuming = [tasks.create_task(self._consume()) for _ in range(consumers)]
            await asyncio.wait(producing)
            # No event marks the last message, so this polls.
            while not self._is_quiet():  # noqa: ASYNC110
                await asyncio.sleep(0.2)
            for task in consuming:
                task.cancel()

    def _is_quiet(self) -> bool:
        is_still = self._last_received_at < asyncio.get_running_loop().time() - QUIET_S
        return is_still and not self.missing()

    def missing(self) -> list[str]:
        """Return the messages that must still come."""
        return [
            key
            for key, timed in self.messages.items()
            if timed.sent is Outcome.OK
            and timed.recalled in (None, Outcome.FAILED)
            and not timed.received_at_ms
        ]

    def judge(self) -> list[str]:
        """Return the broken guarantees, one per line."""
        broken = [f"T-3: {key} never came" for key in self.missing()]
        for key, timed in self.messages.items():
            early = [at for at in timed.received_at_ms if at < timed.due_at_ms]
            if early:
                broken.append(f"T-1: {key} came {timed.due_at_ms - early[0]} ms early")
            if timed.recalled is Outcome.OK and timed.received_at_ms:
                broken.append(f"T-11: {key} was recalled and came")
        return broken

    async def _produce(self, producer: int, stop: asyncio.Event) -> None:
        number = 0
        async with api(self.endpoint) as client:
            while not stop.is_set():
                if self.sent_ok - self.received > BACKLOG_MAX:
                    await asyncio.sleep(PAUSE_S)
                    continue
                key = f"{self.topic}/{producer}/{number}"
                number += 1
                now_ms = time.time_ns() // 1_000_000
                timed = TimedMessage(now_ms + self.rng.randint(100, self.delay_ms_max))
                self.messages[key] = timed
                handle = await self._schedule(client, key, timed)
                if handle and self.rng.random() < RECALL_SHARE:
                    await asyncio.sleep(self.rng.uniform(0, 0.2))
                    await self._recall(client, handle, timed)
                elif timed.sent is not Outcome.OK:
                    await asyncio.sleep(PAUSE_S)

    async def _schedule(self, client: Api, key: str, timed: TimedMessage) -> str:
        body = f"{key} ".encode().ljust(self.rng.choice((64, 512, 4096)), b".")
        try:
            answer = await client.send(
                message(self.topic, body, message_id=key, due_at_ms=timed.due_at_ms)
            )
        except grpc.aio.AioRpcError:
            return ""
        timed.sent = outcome_of(answer.status.code)
        if timed.sent is not Outcome.OK:
            return ""
        self.sent_ok += 1
        return answer.entries[0].recall_handle

    async def _recall(self, client: Api, handle: str, timed: TimedMessage) -> None:
        """Repeat the recall until the server answers. A recall is idempotent."""
        timed.recalled = Outcome.UNKNOWN
        while True:
            try:
                answer = await client.recall(self.topic, handle)
            except grpc.aio.AioRpcError:
                await asyncio.sleep(PAUSE_S)
                continue
            if answer.status.code == v2.OK:
                timed.recalled = Outcome.OK
                self.recalled_ok += 1
                return
            if answer.status.code == v2.MESSAGE_NOT_FOUND:
                timed.recalled = Outcome.FAILED
                return
            await asyncio.sleep(PAUSE_S)

    async def _consume(self) -> None:
        async with api(self.endpoint) as client:
            while True:
                try:
                    messages = await client.receive(
                        self.topic, self.group, poll_ms=POLL_MS_MIN, invisible_ms=INVISIBLE_MS
                    )
                    self._note(messages)
                    if messages:
                        handles = [each.system_properties.receipt_handle for each in messages]
                        await client.ack(self.topic, self.group, handles)
                except (grpc.aio.AioRpcError, AssertionError):
                    await asyncio.sleep(PAUSE_S)

    def _note(self, messages: list[v2.Message]) -> None:
        now_ms = time.time_ns() // 1_000_000
        for each in messages:
            key = each.body.partition(b" ")[0].decode()
            self.messages[key].received_at_ms.append(now_ms)
            self.received += 1
            self._last_received_at = asyncio.get_running_loop().time()
