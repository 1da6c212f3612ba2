"""Producers and consumers that continue after every error and record all calls in a history."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field

import grpc

from tests.support.clients.api import CALL_S, POLL_MS_MIN, Api, api, message
from tests.support.clients.history import History, Outcome
from tests.support.clients.history_against_audit import LostAnswerSpan
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

INVISIBLE_MS = 3_000
PAUSE_S = 0.02  # after a failed call: a broker that is down must not be called in a busy loop
STILL_S_MAX = 100.0  # longest time without a message; the load then fails
LAZY_SHARE = 0.01  # share of deliveries that a consumer forgets, and share that it gives back
BACKLOG_MAX = 500  # messages; a forgotten message of an ordered topic blocks its queue for a while


@dataclass(slots=True)
class Load:
    """One topic and one consumer group, with producers and consumers."""

    endpoint: str
    topic: str
    group: str
    rng: random.Random
    message_groups: int = 0  # 0: without order
    delay_ms: int = 0  # largest delay of a message
    call_s: float = CALL_S  # timeout of a call
    history: History = field(default_factory=History)
    sent_ok: int = 0
    received: int = 0
    acked_ok: int = 0
    places: set[str] = field(default_factory=set)  # broker groups of the received messages
    # Messages that came too early, with their monotonic time in seconds.
    early: dict[str, float] = field(default_factory=dict)
    failed: list[LostAnswerSpan] = field(default_factory=list)  # receives without a whole answer
    _due_at_ms: dict[str, int] = field(default_factory=dict)
    _last_received_at: float = 0.0

    @property
    def status(self) -> str:
        """The progress so far."""
        return (
            f"{self.topic}: {self.sent_ok} stored, {self.received} received, {self.acked_ok} acked"
        )

    async def run(self, *, producers: int, consumers: int, stop: asyncio.Event) -> None:
        """Produce until `stop`. Consume until all messages are settled."""
        async with asyncio.TaskGroup() as tasks:
            producing = [tasks.create_task(self._produce(n, stop)) for n in range(producers)]
            consuming = [tasks.create_task(self._consume()) for _ in range(consumers)]
            await asyncio.wait(producing)
            await self._quiescence()
            for task in consuming:
                task.cancel()

    async def _quiescence(self) -> None:
        """Return when all messages are settled and no lost delivery can return."""
        loop = asyncio.get_running_loop()
        quiet_s = (2 * INVISIBLE_MS) / 1000
        began_at = loop.time()
        # No event marks the last message, so this polls.
        while not self._is_quiet(loop.time() - quiet_s):
            still_s = loop.time() - max(began_at, self._last_received_at)
            assert still_s < STILL_S_MAX, (
                f"{self.status}, and no more comes:\n{self.history.describe_unsettled()}"
            )
            await asyncio.sleep(0.2)

    def _is_quiet(self, since: float) -> bool:
        return self._last_received_at < since and not self.history.unsettled()

    async def _produce(self, producer: int, stop: asyncio.Event) -> None:
        # One producer per message group: it sends its messages one after the other.
        message_group = f"group-{producer}" if self.message_groups else ""
        number = 0
        async with api(self.endpoint, call_s=self.call_s) as client:
            while not stop.is_set():
                if self.sent_ok - self.acked_ok > BACKLOG_MAX:
                    await asyncio.sleep(PAUSE_S)
                    continue
                key = f"{self.topic}/{producer}/{number}"
                number += 1
                send = self.history.send(key, message_group=message_group)
                outcome = await self._send(client, key, message_group)
                send.ended(outcome)
                if outcome is Outcome.OK:
                    self.sent_ok += 1
                else:
                    await asyncio.sleep(PAUSE_S)

    async def _send(self, client: Api, key: str, message_group: str) -> Outcome:
        body = f"{key} ".encode().ljust(self.rng.choice((64, 512, 4096)), b".")
        due_at_ms = 0
        if self.delay_ms:
            due_at_ms = _now_ms() + self.rng.randrange(self.delay_ms)
            self._due_at_ms[key] = due_at_ms
        try:
            answer = await client.send(
                message(
                    self.topic,
                    body,
                    message_group=message_group,
                    message_id=key,
                    due_at_ms=due_at_ms,
                )
            )
        except grpc.aio.AioRpcError:
            return Outcome.UNKNOWN
        return outcome_of(answer.status.code)

    async def _consume(self) -> None:
        async with api(self.endpoint, call_s=self.call_s) as client:
            while True:
                begun_ms = _now_ms()
                try:
                    messages = await client.receive(
                        self.topic,
                        self.group,
                        poll_ms=POLL_MS_MIN,
                        invisible_ms=INVISIBLE_MS,
                        batch_size=self.rng.choice((1, 8, 32)),
                    )
                except (grpc.aio.AioRpcError, AssertionError):
                    # A cut stream or an error status: popped messages come back.
                    self.failed.append(LostAnswerSpan(begun_ms, _now_ms()))
                    await asyncio.sleep(PAUSE_S)
                    continue
                if messages:
                    await self._settle(client, messages)

    async def _settle(self, client: Api, messages: list[v2.Message]) -> None:
        """Ack most messages; forget some, and give some back at once."""
        keys = [each.body.partition(b" ")[0].decode() for each in messages]
        attempts = [each.system_properties.delivery_attempt for each in messages]
        places = [each.system_properties.store_host for each in messages]
        now_ms = _now_ms()
        for key in keys:
            if now_ms < self._due_at_ms.get(key, 0):
                self.early.setdefault(key, time.monotonic())
        self.history.received(keys, attempts, places)
        self.places.update(places)
        self.received += len(keys)
        self._last_received_at = asyncio.get_running_loop().time()
        wanted: list[tuple[str, int, str, str]] = []
        for key, attempt, place, each in zip(keys, attempts, places, messages, strict=True):
            handle = each.system_properties.receipt_handle
            chance = self.rng.random()
            if chance < LAZY_SHARE:
                continue
            if chance < 2 * LAZY_SHARE:
                await self._give_back(client, handle)
                continue
            wanted.append((key, attempt, place, handle))
        if not wanted:
            return
        acks = [self.history.ack(key, attempt, place) for key, attempt, place, _ in wanted]
        try:
            answer = await client.ack(self.topic, self.group, [handle for *_, handle in wanted])
        except grpc.aio.AioRpcError:
            outcomes = [Outcome.UNKNOWN] * len(acks)
        else:
            outcomes = [outcome_of(entry.status.code) for entry in answer.entries]
            # A rejected request has no entries.
            outcomes = outcomes or [outcome_of(answer.status.code)] * len(acks)
        for ack, outcome in zip(acks, outcomes, strict=True):
            ack.ended(outcome)
            self.acked_ok += outcome is Outcome.OK

    async def _give_back(self, client: Api, handle: str) -> None:
        try:
            await client.change_invisible(self.topic, self.group, handle, 0)
        except grpc.aio.AioRpcError:
            await asyncio.sleep(PAUSE_S)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def outcome_of(code: int) -> Outcome:
    """Return the outcome of a status code: OK, a rejected request, or unknown."""
    if code == v2.OK:
        return Outcome.OK
    return Outcome.UNKNOWN if code >= v2.INTERNAL_ERROR else Outcome.FAILED
