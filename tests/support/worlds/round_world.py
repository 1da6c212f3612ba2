"""The broker's shell without gRPC: links and rounds over an engine on a `FaultyDisk`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any, ClassVar
from zlib import crc32

from tests.support.clocks import ManualClock
from tests.support.worlds.engine_world import World, blob
from tidemill.broker.metrics.traffic import Traffic
from tidemill.broker.server.link.proxy_link import ProxyLink
from tidemill.broker.server.round.durability import ROUNDS_IN_FLIGHT_MAX, Durability
from tidemill.broker.server.round.long_polling import LongPolling
from tidemill.broker.server.round.rounds import Rounds
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb


async def idle() -> None:
    """Run all tasks that can run without time passing."""
    for _ in range(50):
        await asyncio.sleep(0)


class GatedSyncs:
    """Syncs files of a FaultyDisk; a sync waits while the gate is shut."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.count = 0
        self.failure: Exception | None = None
        self.turns = 0  # turns of the event loop that a sync takes

    def let_one_pass(self) -> None:
        """Let the running sync end, and shut the gate after it."""
        self.gate.set()
        self.gate.clear()

    async def sync(self, files: Iterable[object]) -> None:
        await self.gate.wait()
        for _ in range(self.turns):
            await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        for file in files:
            file.sync()  # type: ignore[attr-defined]  # A file of a FaultyDisk.
        self.count += 1


class Proxy:
    """The proxy's end of a link, which reads every reply at once."""

    def __init__(self, rounds: Rounds, newest: dict[bytes, ProxyLink]) -> None:
        self.unsent_bytes = 0
        self.is_read = asyncio.Event()  # clear: `drained` waits
        self.is_read.set()
        self.config = pb.ConfigUpdate()  # the first one
        self.link = ProxyLink(rounds, Traffic(), self, newest=newest)
        self.requests: asyncio.Queue[pb.RequestFrame | None] = asyncio.Queue()
        self.replies: asyncio.Queue[pb.ReplyFrame] = asyncio.Queue()

    def write(self, message: bytes) -> None:
        self.replies.put_nowait(pb.ReplyFrame.FromString(message))

    async def wait_drained(self) -> None:
        await self.is_read.wait()

    async def send(self, frame: pb.RequestFrame) -> None:
        await self.requests.put(frame)

    async def reply(self) -> pb.ReplyFrame:
        async with asyncio.timeout(5):
            return await self.replies.get()

    async def frames(self) -> AsyncIterator[bytes]:
        while frame := await self.requests.get():
            yield frame.SerializeToString()


class RoundWorld:
    """A broker in memory; `changes` apply to the engine's configuration."""

    world_type: ClassVar[type[World]] = World

    def __init__(
        self,
        *,
        parked_max: int = 100,
        pending_bytes_max: int = 1 << 20,
        rounds_max: int = ROUNDS_IN_FLIGHT_MAX,
        **changes: Any,
    ) -> None:
        self.world = self.world_type(**changes)
        self.clock = ManualClock(self.world.now_ms)
        self.topic_id = self.world.topic()
        self.group_id = self.world.group()
        self.world.pop(1)  # the first pop of a group records that it reads the topic
        self.syncs = GatedSyncs()
        self.background_syncs = GatedSyncs()
        self.polls = LongPolling(parked_max=parked_max)
        self.durability = Durability(self.world.engine, self.syncs, rounds_max=rounds_max)
        self.rounds = Rounds(
            self.world.engine,
            durability=self.durability,
            background_syncs=self.background_syncs,
            clock=self.clock,
            polls=self.polls,
            pending_bytes_max=pending_bytes_max,
        )
        self.world.engine.take_config_changes()
        self._newest: dict[bytes, ProxyLink] = {}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.rounds.run())
            yield
            self.syncs.gate.set()
            self.rounds.stop()

    @contextlib.asynccontextmanager
    async def proxy(self) -> AsyncIterator[Proxy]:
        """Connect a proxy, and take its first frame, the configuration."""
        proxy = Proxy(self.rounds, self._newest)
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(proxy.link.read(proxy.frames()))
            offering = tasks.create_task(proxy.link.pops.offer_room())
            paging = tasks.create_task(proxy.link.security.send_pages())
            proxy.config = (await proxy.reply()).config
            assert proxy.config.is_complete
            yield proxy
            reading.cancel()
            offering.cancel()
            paging.cancel()
            proxy.link.end()

    def advance(self, by_ms: int) -> None:
        """Let time pass, and wake the round loop."""
        self.clock.advance(by_ms)
        self.rounds.wake()

    def append_frame(self, *texts: str, first_id: int = 1, tag: str = "") -> pb.RequestFrame:
        frame = pb.RequestFrame()
        for n, text in enumerate(texts):
            data = blob(text, tag=tag)
            frame.appends.request_ids.append(first_id + n)
            frame.appends.topic_ids.append(self.topic_id)
            frame.appends.queue_ids.append(0)
            frame.appends.crcs.append(crc32(data))
            frame.appends.blobs.append(data)
        return frame

    def pop_frame(
        self,
        request_id: int,
        *,
        poll_ms: int = 0,
        tags: tuple[str, ...] = (),
        sql: str = "",
        want: int = 32,
        topic_id: int = 0,
        renews_for: str = "",
        client_id: str = "",
    ) -> pb.RequestFrame:
        pop = pb.PopRequest(
            request_id=request_id,
            group_id=self.group_id,
            topic_id=topic_id or self.topic_id,
            max_messages=want,
            invisible_duration_ms=30_000,
            poll_duration_ms=poll_ms,
            tags=tags,
            sql=sql,
            client_id=renews_for or client_id,
            renews=bool(renews_for),
        )
        return pb.RequestFrame(pops=[pop])
