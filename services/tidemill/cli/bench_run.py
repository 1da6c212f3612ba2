"""The load of `tidemill bench`: senders and receivers at the proxies, and their latencies."""

from __future__ import annotations

import asyncio
import math
import secrets
import struct
import time
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Final, TypeVar

import grpc
from grpc.aio import AioRpcError

from tidemill.release.trial import TrialUser
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.apache.rocketmq.v2 import service_pb2_grpc

T = TypeVar("T")

CALL_S: Final = 10.0
POLL_MS: Final = 5_000  # the shortest long poll that a proxy does not extend
INVISIBLE_MS: Final = 60_000
BATCH: Final = 32  # messages of one receive
ERROR_PAUSE_S: Final = 0.1  # after a failed call
DRAIN_S: Final = 10.0  # time after the last send, in addition to the delay
BUCKET: Final = math.log(1.02)  # the bounds of buckets grow by 2 %
STAMP: Final = struct.Struct(
    ">d"
)  # begin of each body: the due time, or the time of the send (Unix, ms)


@dataclass(slots=True)
class Latencies:
    """Latencies in buckets, so a long measurement takes no more memory. Exact within 2 %."""

    buckets: Counter[int] = field(default_factory=Counter)
    max_ms: float = 0.0

    @property
    def count(self) -> int:
        """Number of latencies."""
        return self.buckets.total()

    def add(self, latency_ms: float) -> None:
        """Add a latency; a negative one counts as the smallest."""
        self.buckets[math.ceil(math.log(max(latency_ms, 0.001)) / BUCKET)] += 1
        self.max_ms = max(self.max_ms, latency_ms)

    def quantile(self, part: float) -> float | None:
        """Return the upper bound of the latencies of a part; None without any."""
        rank, seen = math.ceil(part * self.count), 0
        for bucket, count in sorted(self.buckets.items()):
            seen += count
            if seen >= rank:
                return min(math.exp(bucket * BUCKET), self.max_ms)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """Parameters of a measurement."""

    name: str  # of the topic and of the consumer group
    user: TrialUser
    duration_s: float
    concurrency: int  # calls in flight of senders, and of receivers
    body_bytes: int
    rate: float | None = None  # messages per second; None: as fast as it goes
    delay_ms: int | None = None  # of delayed messages
    has_receivers: bool = False


@dataclass(slots=True)
class BenchResult:
    """Numbers of a measurement so far."""

    latencies: Latencies = field(default_factory=Latencies)
    errors: Counter[str] = field(default_factory=Counter)  # by code
    sent: int = 0
    early: int = 0  # delayed messages that came before their time
    begin_s: float = 0.0
    end_s: float = 0.0  # of the last message

    def note(self, latency_ms: float) -> None:
        """Add the latency of a message."""
        self.latencies.add(latency_ms)
        self.end_s = time.monotonic()

    def per_second(self, delay_ms: int | None) -> float:
        """Return the messages per second, from the begin to the last message, without the delay."""
        duration_s = self.end_s - self.begin_s - (delay_ms or 0) / 1_000
        return self.latencies.count / max(duration_s, 0.001)


async def measure(
    plan: BenchPlan, result: BenchResult, proxy: str, credentials: grpc.ChannelCredentials | None
) -> None:
    """Run the load for its duration. Then wait for the remaining messages, for a bounded time."""
    if credentials is None:
        channel = grpc.aio.insecure_channel(proxy)
    else:
        channel = grpc.aio.secure_channel(proxy, credentials)
    async with channel:
        load = _Load(plan, result, service_pb2_grpc.MessagingServiceStub(channel))
        result.begin_s = result.end_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            receivers = [
                tasks.create_task(load.receive(), name="receive")
                for _ in range(plan.concurrency if plan.has_receivers else 0)
            ]
            async with asyncio.TaskGroup() as senders:
                for _ in range(plan.concurrency):
                    senders.create_task(load.send(), name="send")
            if receivers:
                await load.drain()
            for receiver in receivers:
                receiver.cancel()


class _Load:
    """Senders and receivers of one measurement."""

    def __init__(
        self, plan: BenchPlan, result: BenchResult, stub: service_pb2_grpc.MessagingServiceAsyncStub
    ) -> None:
        self._plan = plan
        self._result = result
        self._stub = stub
        self._padding = bytes(max(plan.body_bytes - STAMP.size, 0))
        self._next_at_s = 0.0
        self._all_received = asyncio.Event()
        self._has_sent_all = False

    async def send(self) -> None:
        """Send messages, one after the other, until the time is over."""
        end_s = self._result.begin_s + self._plan.duration_s
        while await self._wait_turn(end_s):
            begin_ms = time.time() * 1_000
            due_ms = begin_ms if self._plan.delay_ms is None else begin_ms + self._plan.delay_ms
            request = service.SendMessageRequest(messages=[self._message(due_ms)])
            headers = self._plan.user.headers
            answer = await self._call(
                self._stub.SendMessage(request, metadata=headers, timeout=CALL_S)
            )
            if answer is not None and await self._accept(answer.status):
                self._result.sent += 1
                if not self._plan.has_receivers:
                    self._result.note(time.time() * 1_000 - begin_ms)

    async def receive(self) -> None:
        """Receive and acknowledge messages until the task is cancelled."""
        name = self._plan.name
        while True:
            request = service.ReceiveMessageRequest(
                group=v2.Resource(name=name),
                message_queue=v2.MessageQueue(topic=v2.Resource(name=name)),
                filter_expression=v2.FilterExpression(type=v2.TAG, expression="*"),
                batch_size=BATCH,
            )
            request.invisible_duration.FromMilliseconds(INVISIBLE_MS)
            request.long_polling_timeout.FromMilliseconds(POLL_MS)
            messages = await self._call(self._received(request)) or []
            for message in messages:
                (due_ms,) = STAMP.unpack_from(message.body)
                late_ms = time.time() * 1_000 - due_ms
                # The time of delivery has no fraction of a millisecond.
                self._result.early += self._plan.delay_ms is not None and late_ms < -1
                self._result.note(late_ms)
            if messages:
                await self._ack(messages)
            self._check_end()

    async def drain(self) -> None:
        """Wait until all sent messages are received, for a bounded time."""
        self._has_sent_all = True
        self._check_end()
        try:
            async with asyncio.timeout(DRAIN_S + (self._plan.delay_ms or 0) / 1_000):
                await self._all_received.wait()
        except TimeoutError:
            missing = self._result.sent - self._result.latencies.count
            self._result.errors["NOT_RECEIVED"] += missing

    def _check_end(self) -> None:
        if self._has_sent_all and self._result.latencies.count >= self._result.sent:
            self._all_received.set()

    async def _wait_turn(self, end_s: float) -> bool:
        """Wait for the time of the next message. Return whether it is before the end."""
        if self._plan.rate is not None:
            at_s = max(self._next_at_s, time.monotonic())
            if at_s >= end_s:
                return False
            self._next_at_s = at_s + 1 / self._plan.rate
            await asyncio.sleep(at_s - time.monotonic())
        return time.monotonic() < end_s

    def _message(self, due_ms: float) -> v2.Message:
        properties = v2.SystemProperties(message_id=secrets.token_hex(16).upper())
        if self._plan.delay_ms is not None:
            properties.delivery_timestamp.FromMilliseconds(round(due_ms))
        return v2.Message(
            topic=v2.Resource(name=self._plan.name),
            body=STAMP.pack(due_ms) + self._padding,
            system_properties=properties,
        )

    async def _received(self, request: service.ReceiveMessageRequest) -> list[v2.Message]:
        timeout_s = POLL_MS / 1_000 + CALL_S
        headers = self._plan.user.headers
        messages = []
        async for answer in self._stub.ReceiveMessage(request, metadata=headers, timeout=timeout_s):
            if answer.HasField("message"):
                messages.append(answer.message)
            elif answer.HasField("status") and answer.status.code != v2.MESSAGE_NOT_FOUND:
                await self._accept(answer.status)
        return messages

    async def _ack(self, messages: list[v2.Message]) -> None:
        entries = [
            service.AckMessageEntry(
                message_id=each.system_properties.message_id,
                receipt_handle=each.system_properties.receipt_handle,
            )
            for each in messages
        ]
        name = v2.Resource(name=self._plan.name)
        request = service.AckMessageRequest(group=name, topic=name, entries=entries)
        headers = self._plan.user.headers
        answer = await self._call(self._stub.AckMessage(request, metadata=headers, timeout=CALL_S))
        if answer is not None:
            await self._accept(answer.status)

    async def _call(self, call: Awaitable[T]) -> T | None:
        """Return the answer of a call. After an error, count it, pause, and return None."""
        try:
            return await call
        except AioRpcError as error:
            self._result.errors[error.code().name] += 1
            await asyncio.sleep(ERROR_PAUSE_S)
            return None

    async def _accept(self, status: v2.Status) -> bool:
        """Whether a status is OK. If it is not, count it and pause."""
        if status.code == v2.OK:
            return True
        self._result.errors[v2.Code.Name(status.code)] += 1
        await asyncio.sleep(ERROR_PAUSE_S)
        return False
