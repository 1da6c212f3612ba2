"""Clients of a simulated broker group, which record the history of their calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Hashable, Sequence
from random import Random
from typing import Any, TypeVar

from google.protobuf.message import Message

from tests.simulation.processes import Proxy
from tests.support.clients.history import History, Outcome
from tests.support.plain_calls import answer_of
from tests.support.worlds.proxy_world import ack_request, message, milliseconds, receive_request
from tidemill.proxy.server.call import Call
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service

Response = TypeVar("Response", bound=Message)
T = TypeVar("T")

DEADLINE_S = 4.0
INVISIBLE_MS = 10_000
POLL_MS = 5_000
HOARD_INVISIBLE_MS = 12 * 3600 * 1000
# The broker did nothing: a client may send the same message again under its key.
REJECTED = frozenset({v2.TOO_MANY_REQUESTS})


class CallBroken(Exception):
    """The proxy was killed during a call, or the caller stopped waiting; the outcome is unknown."""


class Client:
    """One client: it calls any proxy."""

    def __init__(self, name: str, proxies: list[Proxy], random: Random) -> None:
        self.name = name
        self._proxies = proxies
        self.random = random

    async def call(self, method: str, request: Message, response: type[Response]) -> Response:
        """Call a method of a random proxy. Raises CallBroken."""
        proxy = self.random.choice(self._proxies)
        call = self._new_call()
        encoded = request.SerializeToString()
        answer = await self._run(
            proxy, answer_of(proxy.boundary, proxy.methods, method, call, encoded)
        )
        return response.FromString(answer)

    async def receive(self, request: service.ReceiveMessageRequest) -> list[v2.Message]:
        """Receive messages; drop those of an incomplete response. Raises CallBroken."""
        proxy = self.random.choice(self._proxies)
        responses = ReceiveResponses()
        await self._run(
            proxy,
            proxy.boundary.streaming(
                "receive_message",
                proxy.methods.streaming["ReceiveMessage"],
                self._new_call(POLL_MS / 1000 + DEADLINE_S),
                request.SerializeToString(),
                responses,
            ),
        )
        # A client that stopped waiting does not read its responses.
        responses.report_read()
        return responses.messages

    def _new_call(self, deadline_s: float = DEADLINE_S) -> Call:
        headers = {"x-mq-client-id": self.name}
        return Call(headers, peer=lambda: self.name, connection=self, time_remaining_s=deadline_s)

    async def _run(self, proxy: Proxy, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a call in the proxy's process; a few callers stop waiting after 50 ms."""
        task = asyncio.ensure_future(proxy.serve(coroutine))
        proxy.tasks.append(task)
        patience_s = 0.05 if self.random.random() < 0.03 else None
        try:
            async with asyncio.timeout(patience_s):
                return await asyncio.shield(task)
        except TimeoutError:
            task.cancel()
            raise CallBroken from None
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is None or caller.cancelling():
                task.cancel()
                raise
            raise CallBroken from None  # The proxy was killed, not the caller.
        finally:
            with contextlib.suppress(ValueError):
                proxy.tasks.remove(task)


class ReceiveResponses:
    """The responses of one receive call."""

    def __init__(self) -> None:
        self.messages: list[v2.Message] = []
        self.sent_count = 0
        self.report_read: Callable[[], None] = lambda: None

    @property
    def connection(self) -> Hashable:
        return self

    def drain_connection(self) -> None:
        pass

    def has_room(self, _size_bytes: int) -> bool:
        return True

    def hold(self, _size_bytes: int) -> bool:
        return True

    async def hold_in_turn(self, _size_bytes: int, *, timeout_s: float) -> bool:
        raise AssertionError("has_room is always true")

    def release(self, _size_bytes: int) -> None:
        pass

    def when_read(self, report: Callable[[], None]) -> None:
        self.report_read = report

    async def send(self, encoded: bytes) -> None:
        item = service.ReceiveMessageResponse.FromString(encoded)
        self.sent_count += 1
        if item.HasField("message"):
            self.messages.append(item.message)

    async def send_all(self, messages: Sequence[bytes]) -> None:
        for one in messages:
            await self.send(one)


class Subscription:
    """A topic, its only consumer group, and their history."""

    def __init__(self, topic: str, group: str) -> None:
        self.topic = topic
        self.group = group
        self.history = History()
        self.recalled: dict[str, bool] = {}  # by key: whether the recall is certain
        self.count = 0
        self._changed: set[str] = set()  # keys of messages that a client tried to change
        self._counted: list[str] = []  # messages that no client took, with a counted attempt

    def new_key(self) -> str:
        self.count += 1
        return f"{self.topic}-{self.count}"

    def backlog(self) -> set[str]:
        """Return the keys of messages that a consumer must still receive."""
        return self.history.unsettled() - self.recalled.keys()

    def received(self, messages: Sequence[v2.Message], *, called_at: int = 0) -> list[str]:
        """Record messages that a client received, and return their keys.

        `called_at` is the time of the history before the receive.

        A message of a message group behind an unsettled one of its queue was never the first of a
        delivery. If no client has changed it, no attempt may count for it.
        """
        keys = [one.body.decode().rstrip() for one in messages]
        places = [one.system_properties.store_host for one in messages]
        # The answer to an earlier delivery may come last, after a jump of the clock.
        attempts = [one.system_properties.delivery_attempt for one in messages]
        self.history.received(keys, attempts, places, called_at=called_at)
        queues: set[tuple[str, int]] = set()
        for key, one in zip(keys, messages, strict=True):
            properties = one.system_properties
            queue, attempt = (
                (properties.store_host, properties.queue_id),
                properties.delivery_attempt,
            )
            is_behind = queue in queues and properties.message_group and key not in self._changed
            if is_behind and attempt > 1:
                self._counted.append(f"{key} behind another message, attempt {attempt}")
            queues.add(queue)
        return keys

    def note_change(self, key: str) -> None:
        """Record that a client changes the delivery of a message."""
        self._changed.add(key)

    def judge(self) -> str:
        """Return the broken promises, or "" if there are none."""
        for key in self.recalled:
            # A recalled message may or may not be delivered.
            self.history.sends[key].outcome = Outcome.UNKNOWN
        verdict = self.history.judge()
        received = {receive.key for receive in self.history.receives}
        certain = sorted(key for key, is_certain in self.recalled.items() if is_certain)
        delivered = [key for key in certain if key in received]
        if verdict.is_clean and not delivered and not self._counted:
            return ""
        return (
            f"{self.topic}:\n{verdict}\nrecalled and delivered: {delivered}\n"
            f"attempts of untouched messages: {self._counted[:10]}"
        )


async def produce(
    client: Client,
    subscription: Subscription,
    *,
    message_group: str = "",
    tags: tuple[str, ...] = ("",),
    pause_s: float = 0.125,
) -> None:
    """Send messages one by one; the subscription must receive those with the first tag."""
    while True:
        await asyncio.sleep(client.random.expovariate(1 / pause_s))
        tag, key = client.random.choice(tags), subscription.new_key()
        history = subscription.history if tag == tags[0] else History()
        send = history.send(key, message_group=message_group)
        body = key.encode().ljust(client.random.choice((16, 200, 4_000)))
        fields: dict[str, object] = {"tag": tag} if tag else {}
        if message_group:
            fields |= {"message_group": message_group, "message_type": v2.FIFO}
        request = service.SendMessageRequest(
            messages=[message(body, topic=subscription.topic, message_id=key, **fields)]
        )
        with contextlib.suppress(CallBroken):
            response = await client.call("SendMessage", request, service.SendMessageResponse)
            send.ended(_outcome_of(response.status.code))


async def schedule(client: Client, subscription: Subscription, wall_ms: Any) -> None:
    """Send delayed messages and recall some of them."""
    while True:
        await asyncio.sleep(client.random.expovariate(4))
        key = subscription.new_key()
        send = subscription.history.send(key)
        one = message(key.encode(), topic=subscription.topic, message_id=key, message_type=v2.DELAY)
        due_ms = wall_ms() + client.random.choice((100, 2_000, 15_000, 40_000))
        one.system_properties.delivery_timestamp.FromMilliseconds(due_ms)
        try:
            response = await client.call(
                "SendMessage",
                service.SendMessageRequest(messages=[one]),
                service.SendMessageResponse,
            )
        except CallBroken:
            continue
        send.ended(_outcome_of(response.status.code))
        handle = response.entries[0].recall_handle if response.entries else ""
        if response.status.code == v2.OK and handle and client.random.random() < 0.4:
            await asyncio.sleep(client.random.uniform(0, 3))
            await _recall(client, subscription, key, handle)


async def _recall(client: Client, subscription: Subscription, key: str, handle: str) -> None:
    received = {receive.key for receive in subscription.history.receives}
    subscription.recalled[key] = False
    request = service.RecallMessageRequest(
        topic=v2.Resource(name=subscription.topic), recall_handle=handle
    )
    with contextlib.suppress(CallBroken):
        response = await client.call("RecallMessage", request, service.RecallMessageResponse)
        if response.status.code == v2.OK:
            subscription.recalled[key] = key not in received
        elif response.status.code == v2.MESSAGE_NOT_FOUND:
            del subscription.recalled[key]


async def consume(
    client: Client, subscription: Subscription, *, batch_size: int = 8, tag: str = "*"
) -> None:
    """Receive messages and ack most of them."""
    request = receive_request(
        subscription.topic,
        subscription.group,
        poll_ms=POLL_MS,
        invisible_ms=INVISIBLE_MS,
        batch_size=batch_size,
    )
    request.filter_expression.expression = tag
    while True:
        await asyncio.sleep(client.random.expovariate(20))
        called_at = subscription.history.now()
        try:
            messages = await client.receive(request)
        except CallBroken:
            continue
        if messages:
            keys = subscription.received(messages, called_at=called_at)
            await _settle(client, subscription, messages, keys)


async def hoard(client: Client, topic: str, group: str) -> None:
    """Receive messages one by one, and never settle them."""
    request = receive_request(
        topic, group, poll_ms=POLL_MS, invisible_ms=HOARD_INVISIBLE_MS, batch_size=1
    )
    while True:
        await asyncio.sleep(client.random.expovariate(20))
        with contextlib.suppress(CallBroken):
            await client.receive(request)


async def bury(client: Client, topic: str, group: str) -> None:
    """Receive messages, and move them to the dead letters of the group."""
    request = receive_request(topic, group, poll_ms=POLL_MS, invisible_ms=INVISIBLE_MS)
    while True:
        await asyncio.sleep(client.random.expovariate(1))
        with contextlib.suppress(CallBroken):
            for one in await client.receive(request):
                forward = service.ForwardMessageToDeadLetterQueueRequest(
                    topic=v2.Resource(name=topic),
                    group=v2.Resource(name=group),
                    receipt_handle=one.system_properties.receipt_handle,
                    message_id=one.system_properties.message_id,
                )
                response = service.ForwardMessageToDeadLetterQueueResponse
                await client.call("ForwardMessageToDeadLetterQueue", forward, response)


async def _settle(
    client: Client, subscription: Subscription, messages: list[v2.Message], keys: list[str]
) -> None:
    random = client.random
    handles = [one.system_properties.receipt_handle for one in messages]
    if random.random() < 0.1:
        return  # The consumer dies, so its messages become available again.
    if random.random() < 0.15:
        handles = [
            await _renew(client, subscription, key, handle) if random.random() < 0.5 else handle
            for key, handle in zip(keys, handles, strict=True)
        ]
    await asyncio.sleep(random.expovariate(5))
    await ack(client, subscription, messages, handles)


async def ack(
    client: Client, subscription: Subscription, messages: list[v2.Message], handles: list[str]
) -> None:
    """Ack messages and record the outcome of each."""
    keys = [one.body.decode().rstrip() for one in messages]
    acks = [
        subscription.history.ack(
            key, one.system_properties.delivery_attempt, one.system_properties.store_host
        )
        for key, one in zip(keys, messages, strict=True)
    ]
    with contextlib.suppress(CallBroken):
        response = await client.call(
            "AckMessage",
            ack_request(*handles, topic=subscription.topic, group=subscription.group),
            service.AckMessageResponse,
        )
        for one, entry in zip(acks, response.entries, strict=False):
            if entry.status.code == v2.OK:
                one.ended(Outcome.OK)
            elif entry.status.code == v2.INVALID_RECEIPT_HANDLE:
                one.ended(Outcome.UNKNOWN)


async def _renew(client: Client, subscription: Subscription, key: str, handle: str) -> str:
    subscription.note_change(key)
    request = service.ChangeInvisibleDurationRequest(
        topic=v2.Resource(name=subscription.topic),
        group=v2.Resource(name=subscription.group),
        receipt_handle=handle,
        invisible_duration=milliseconds(INVISIBLE_MS),
    )
    with contextlib.suppress(CallBroken):
        response = await client.call(
            "ChangeInvisibleDuration", request, service.ChangeInvisibleDurationResponse
        )
        if response.status.code == v2.OK:
            return response.receipt_handle
    return handle


def _outcome_of(code: int) -> Outcome:
    if code == v2.OK:
        return Outcome.OK
    return Outcome.FAILED if code in REJECTED else Outcome.UNKNOWN
