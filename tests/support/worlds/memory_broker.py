"""A broker in memory: a real BrokerLink server for tests of the proxy, without a store.

Links and commands are those of the broker, over a `MemoryEngine`. Each frame is a round, committed
at once. A test injects faults by the name of a command.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Protocol

import grpc

from tests.support.worlds.memory_engine import NOW_MS, MemoryEngine
from tidemill.broker.engine.metadata.catalog import ConfigChanges
from tidemill.broker.metrics.traffic import Traffic
from tidemill.broker.server.link.commands import COMMANDS
from tidemill.broker.server.link.link_service import BrokerLinkService
from tidemill.broker.server.link.proxy_link import ProxyLink
from tidemill.broker.server.round.durability import RoundEffect
from tidemill.broker.server.round.long_polling import LongPolling
from tidemill.broker.server.round.round_times import RoundTimes, SyncLog
from tidemill.broker.server.wire.config_frames import group_config, topic_config
from tidemill.broker.server.wire.security_frames import PAGE_BYTES
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb


class MemoryTurn:
    """A stand-in for `Turn`."""

    is_draining = False
    now_ms = firing_ms = NOW_MS
    monotonic_ms = 0

    def __init__(self, engine: MemoryEngine, polls: LongPolling) -> None:
        self.engine = engine
        self.polls = polls
        self.effects: dict[object, RoundEffect] = {}
        self.times = RoundTimes(time.monotonic())


class MemoryWork(Protocol):
    """Work of a round."""

    def apply(self, turn: MemoryTurn) -> Iterator[None]:
        """Do the work in slices."""


class MemoryRounds:
    """A stand-in for `Rounds`: one round for each piece of work, at once."""

    is_master = True

    def __init__(self, engine: MemoryEngine) -> None:
        self.engine = engine
        self.links: list[ProxyLink] = []
        self.syncs = SyncLog()
        self._polls = LongPolling()
        self.turn = MemoryTurn(engine, self._polls)

    def do(self, apply: Callable[[MemoryTurn], Iterator[None]] = lambda _turn: iter(())) -> None:
        """Apply work, report changes, try waiting polls again, and release the replies."""
        turn = self.turn = MemoryTurn(self.engine, self._polls)
        _exhaust(apply(turn))
        if changes := self.engine.take_config_changes():
            self._report_changes(changes)
        _exhaust(self._polls.wake([topic.id for topic in self.engine.catalog.topics.values()], ()))
        now_s = time.monotonic()
        self.syncs.note(1, now_s)
        turn.times.note_written(now_s, 1, self.syncs, has_replicas=False)
        for effect in turn.effects.values():
            _exhaust(effect.release())

    def _report_changes(self, changes: ConfigChanges) -> None:
        for link in self.links:
            link.add_config_changes(changes)

    async def submit(self, work: MemoryWork) -> None:
        self.do(work.apply)

    def put(self, work: MemoryWork) -> None:
        self.do(work.apply)

    async def settle(self) -> None:
        pass

    def attach(self, link: ProxyLink) -> None:
        self.links.append(link)

    def detach(self, link: ProxyLink) -> None:
        if link in self.links:
            self.links.remove(link)

    def wake(self) -> None:
        pass


class Stream:
    """One proxy's stream, as the broker's link sees it."""

    def __init__(self, broker: MemoryBroker, requests: AsyncIterator[bytes]) -> None:
        self.replies: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._broker = broker
        self._requests = requests

    def write(self, message: bytes) -> None:
        if not self._broker.is_mute:
            self.replies.put_nowait(message)

    @property
    def unsent_bytes(self) -> int:
        return 0 if self._broker.may_page.is_set() else PAGE_BYTES

    async def wait_drained(self) -> None:
        await self._broker.may_page.wait()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        broker = self._broker
        async for request in self._requests:
            await broker.is_reading.wait()
            frame = pb.RequestFrame.FromString(request)
            yield self._with_faults(frame).SerializeToString()
            async with broker.arrived:
                broker.frames.append(frame)
                broker.arrived.notify_all()

    def _with_faults(self, frame: pb.RequestFrame) -> pb.RequestFrame:
        """Return the requests that the broker serves; reject the others as the test wants."""
        served = pb.RequestFrame()
        served.CopyFrom(frame)
        rejected = pb.ReplyFrame()
        for command in COMMANDS:
            failure = self._broker.failures.get(command.name)
            if failure is not None:
                for request_id in request_ids(getattr(frame, command.request_field)):
                    rejected.failures.add(
                        request_id=request_id, error=failure.error, message=failure.message
                    )
            if failure is not None or command.name in self._broker.holds:
                served.ClearField(command.request_field)  # type: ignore[arg-type]  # one of its names
        if rejected.failures:
            self.write(rejected.SerializeToString())
        return served


class MemoryProxy:
    """The proxy's end of a link, which reads every reply at once."""

    def __init__(self) -> None:
        self.config = pb.ConfigUpdate()  # the first one
        self.replies: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._requests: asyncio.Queue[bytes] = asyncio.Queue()

    async def send(self, frame: pb.RequestFrame) -> None:
        await self._requests.put(frame.SerializeToString())

    async def reply(self) -> pb.ReplyFrame:
        async with asyncio.timeout(5):
            return pb.ReplyFrame.FromString(await self.replies.get() or b"")

    async def frames(self) -> AsyncIterator[bytes]:
        while True:
            yield await self._requests.get()


class MemoryBroker:
    """The broker: its engine, its service and its faults."""

    def __init__(self, *, auto_create: bool = True) -> None:
        self.engine = MemoryEngine(auto_create=auto_create)
        self.frames: list[pb.RequestFrame] = []
        self.failures: dict[str, pb.Failure] = {}  # name of a command -> its answer
        self.holds: set[str] = set()  # names of commands that are never answered
        self.is_reading = asyncio.Event()  # clear: frames stay unanswered
        self.is_reading.set()
        self.is_mute = False  # replies are lost
        self.is_up = asyncio.Event()  # clear: a new connection waits for its configuration
        self.is_up.set()
        self.may_page = asyncio.Event()  # clear: pages of security items wait
        self.may_page.set()
        self.arrived = asyncio.Condition()
        self.address = ""
        self._rounds = MemoryRounds(self.engine)
        self._service = BrokerLinkService(self._rounds, Traffic())  # type: ignore[arg-type]  # a stand-in
        self._streams: list[Stream] = []

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[MemoryBroker]:
        server = grpc.aio.server()
        exchange: grpc.RpcMethodHandler[bytes, bytes]
        exchange = grpc.stream_stream_rpc_method_handler(self._exchange)
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    "tidemill.broker.v1.BrokerLink", {"Exchange": exchange}
                ),
            )
        )
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            yield self
        finally:
            self.drop_links()
            await server.stop(0)

    async def _exchange(
        self, requests: AsyncIterator[bytes], _context: object
    ) -> AsyncIterator[bytes]:
        await self.is_up.wait()
        stream = Stream(self, requests)
        self._streams.append(stream)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(self._service.exchange(stream))  # type: ignore[arg-type]  # a stand-in
            while (reply := await stream.replies.get()) is not None:
                yield reply
            serving.cancel()
        self._streams.remove(stream)

    @contextlib.asynccontextmanager
    async def proxy(self) -> AsyncIterator[MemoryProxy]:
        """Connect a proxy without a network; the configuration is taken off."""
        proxy = MemoryProxy()
        stream = Stream(self, proxy.frames())
        proxy.replies = stream.replies
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(self._service.exchange(stream))  # type: ignore[arg-type]  # a stand-in
            proxy.config = (await proxy.reply()).config
            yield proxy
            serving.cancel()

    def reject_sends(self, why: str) -> None:
        """Report to all proxies that messages are rejected; "": they are accepted again."""
        for link in self._rounds.links:
            link.note_rejection(why)

    def put_topic(self, name: str, **fields: int) -> pb.TopicConfig:
        topic = self.engine.put_topic(name, **fields)
        self._rounds.do()
        return topic_config(topic)

    def put_security_items(self, *items: dict[str, Any]) -> None:
        """Put or delete security items, each as the next version."""
        for item in items:
            self.engine.put_security_item(item)
        self._rounds.do()

    def put_group(self, name: str, **fields: bool) -> pb.GroupConfig:
        group = self.engine.put_group(name, **fields)
        self._rounds.do()
        return group_config(group)

    def delete_topic(self, name: str) -> None:
        self.engine.delete_topic(name)
        self._rounds.do()

    def delete_group(self, name: str) -> None:
        self.engine.delete_group(name)
        self._rounds.do()

    def deliver_timer(self, timer_id: int) -> None:
        """Store a delayed message as if its due time had come."""
        self.engine.deliver_timer(timer_id)
        self._rounds.do()

    def go(self) -> None:
        """Break every stream, and accept no new one until `is_up` is set."""
        self.is_up.clear()
        self.drop_links()

    def drop_links(self) -> None:
        """Break every stream."""
        for stream in self._streams:
            stream.replies.put_nowait(None)

    def answer_late(self, pop: pb.PopRequest) -> None:
        """Answer a held pop."""
        for link in self._rounds.links:
            frame = pb.RequestFrame(pops=[pop])
            self._rounds.do(lambda turn, link=link, frame=frame: link.apply(frame, 0.0, turn))  # type: ignore[misc]  # a stand-in

    def count_of(self, field_name: str) -> int:
        """Return the number of received requests of one kind."""
        return sum(len(request_ids(getattr(frame, field_name))) for frame in self.frames)

    async def wait_for_frame(self, field_name: str) -> pb.RequestFrame:
        """Return the first frame with requests in `field_name`."""
        async with asyncio.timeout(5), self.arrived:
            while True:
                for frame in self.frames:
                    if field_name in {descriptor.name for descriptor, _ in frame.ListFields()}:
                        return frame
                await self.arrived.wait()


def request_ids(requests: Any) -> list[int]:
    """Return the request ids in a field of a request frame, which has columns or messages."""
    if hasattr(requests, "request_ids"):
        return list(requests.request_ids)
    return [request.request_id for request in requests]


def _exhaust(slices: Iterator[None]) -> None:
    for _ in slices:
        pass
