"""A silent, lost or late master: the proxy asks the other replicas and keeps or opens the stream.

Time is virtual. The test replaces the replicas' ends of the connections.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random

from tests.simulation.loop import simulate
from tests.support.worlds.replica_records import member_of, record_of_three
from tidemill.controller.election.record import view_of
from tidemill.proxy.link.stream import EXCHANGE, PROBE, LinkStream
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.transport.grpc.status import RpcCode, RpcError
from tidemill.transport.routes.master_routes import MasterRoutes
from tidemill.transport.routes.masters import UnreachableMaster

GROUP = "broker-0"
A, B, C = (f"10.0.0.{n}:10911" for n in range(3))
NOTICED_S = 4.0  # 2.5 s of silence, a check every half second, and an answer
LIMIT_S = 60.0
SHORTEST_PAUSE_S = 0.04  # of a link, between two attempts, and the step of `until`


class Stream:
    """A call to a replica."""

    part_heard_at_s = 0.0  # messages arrive whole

    def __init__(self) -> None:
        self.outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def write(self, message: bytes) -> None:
        assert pb.RequestFrame.FromString(message).process_id

    def write_last(self, message: bytes) -> None:
        assert not message, "all services"

    def cancel(self) -> None:
        self.outcome.cancel()

    def fail(self, error: RpcError) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)

    async def wait_ended(self) -> None:
        await self.outcome


class Channel:
    """A connection to a replica."""

    def __init__(self, network: Network, address: str) -> None:
        self._network = network
        self._address = address
        self._heard_at_s = asyncio.get_running_loop().time()

    @property
    def heard_at_s(self) -> float:
        if self._address not in self._network.mute:
            self._heard_at_s = asyncio.get_running_loop().time()
        return self._heard_at_s

    def open(self, path: str, on_message: Callable[[bytes], None]) -> Stream:
        stream, loop = Stream(), asyncio.get_running_loop()
        if self._address in self._network.mute:
            return stream
        if path == PROBE:
            self._network.probed.append(self._address)
            loop.call_soon(on_message, b"answer")
            loop.call_soon(stream.outcome.set_result, None)
            return stream
        assert path == EXCHANGE
        self._network.links[self._address] = stream, on_message
        if self._address in self._network.late:
            self._network.reject(self._address, version=7)
        elif self._address == A:
            self._network.serve(A, epoch=self._network.epoch)
        return stream


class Network:
    """The reachable replicas."""

    def __init__(self) -> None:
        self.mute: set[str] = set()  # replicas that accept connections but send nothing
        self.away: set[str] = set()  # replicas that do not answer
        self.refusing: set[str] = set()  # replicas whose port is closed
        self.late: set[str] = set()  # replicas that do not know of their election yet
        self.epoch = 3  # of A, if it serves
        self.dialled: list[str] = []  # for a link
        self.probed: list[str] = []
        self.links: dict[str, tuple[Stream, Callable[[bytes], None]]] = {}  # by address

    def serve(self, address: str, *, epoch: int) -> None:
        """Answer the link as its master."""
        _, on_message = self.links[address]
        config = pb.ConfigUpdate(is_complete=True, broker_name=GROUP)
        frame = pb.ReplyFrame(config=config, epoch=epoch)
        asyncio.get_running_loop().call_soon(on_message, frame.SerializeToString())

    def reject(self, address: str, *, version: int) -> None:
        """Answer the link as a replica that is not the master in its version of the record."""
        _, on_message = self.links[address]
        frame = pb.ReplyFrame(not_master=pb.NotMaster(version=version))
        asyncio.get_running_loop().call_soon(on_message, frame.SerializeToString())

    def kill(self, address: str) -> None:
        """End the link, and answer no other one."""
        self.away.add(address)
        self.end_link(address)

    def end_link(self, address: str) -> None:
        """End the link."""
        stream, _ = self.links[address]
        stream.fail(RpcError(RpcCode.UNAVAILABLE, "the replica was killed"))

    @contextlib.asynccontextmanager
    async def connect(
        self, address: str, _limits: object, *, message_bytes_max: int, timeout_s: float
    ) -> AsyncIterator[Channel]:
        await asyncio.sleep(0.001)
        if message_bytes_max > 1 << 20:
            self.dialled.append(address)
        if address in self.refusing:
            raise RpcError(RpcCode.UNAVAILABLE, "the port is closed")
        if address in self.away:
            await asyncio.sleep(timeout_s)
            raise RpcError(RpcCode.UNAVAILABLE, "the address does not answer")
        yield Channel(self, address)


class World:
    """A link to a broker group of three replicas. The first is the master."""

    def __init__(self) -> None:
        self.network = Network()
        self.lost: list[str] = []
        self.frames: list[pb.ReplyFrame] = []
        self._served = 0  # frames until the last loss
        self.routes = MasterRoutes(
            [], None, connect=self.network.connect, name="proxy-0", cluster="c"
        )
        self.routes.masters.learn(GROUP, view_of(record_of_three()))
        self.stream = LinkStream(
            A,
            receive=self.frames.append,
            on_end=self._lose,
            connect=self.network.connect,
            routes=self.routes,
        )

    def _lose(self, reason: str) -> bool:
        self.lost.append(reason)
        was_served, self._served = len(self.frames) > self._served, len(self.frames)
        return was_served

    def elect(self, replica: int) -> None:
        """Let a controller announce an election."""
        record = record_of_three(epoch=4, version=8)._replace(master=member_of(replica))
        for address in self.routes.masters.learn(GROUP, view_of(record)):
            self.routes._elected[address]()

    @property
    def cut_off(self) -> dict[str, UnreachableMaster]:
        return self.routes.masters.unreachable()

    async def until(self, holds: Callable[[], bool]) -> float:
        """Wait until a condition holds; return the seconds that passed."""
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        async with asyncio.timeout(LIMIT_S):
            while not holds():  # noqa: ASYNC110 - time is virtual
                await asyncio.sleep(0.01)
        return loop.time() - begin_s

    async def lose_all(self) -> None:
        """Stop all replicas for a long time, until an attempt to connect has just failed."""
        network = self.network
        network.refusing |= {A, B, C}
        network.end_link(A)
        await asyncio.sleep(10.0)
        failed = len(network.dialled)
        await self.until(lambda: len(network.dialled) > failed)
        network.refusing.discard(A)
        network.epoch = 4


def play(scenario: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        world = World()
        async with asyncio.TaskGroup() as tasks:
            link = tasks.create_task(world.stream.run())
            await world.until(lambda: bool(world.frames))
            await scenario(world)
            link.cancel()
        await asyncio.sleep(LIMIT_S)  # Ended tasks have closed their connections by then.

    simulate(main(), Random(0))


def test_a_silent_master_is_reported_and_keeps_its_stream() -> None:
    async def scenario(world: World) -> None:
        world.network.away.add(C)
        world.network.mute.add(A)
        took_s = await world.until(
            lambda: world.cut_off == {GROUP: UnreachableMaster(A, frozenset({B}))}
        )
        assert took_s < NOTICED_S
        world.network.away.clear()
        await world.until(lambda: world.cut_off == {GROUP: UnreachableMaster(A, frozenset({B, C}))})
        assert (world.network.dialled, world.lost) == ([A], []), "it may only pause"
        assert sorted(world.network.probed) == [B, C], "once each"

    play(scenario)


def test_a_recovered_master_is_not_reported() -> None:
    async def scenario(world: World) -> None:
        world.network.mute.add(A)
        await world.until(lambda: bool(world.cut_off))
        world.network.mute.clear()
        assert await world.until(lambda: not world.cut_off) < 1.0
        world.network.mute.add(A)
        assert await world.until(lambda: bool(world.cut_off)) > 2.0, "it is another silence"

    play(scenario)


def test_no_replica_is_probed_while_the_master_answers() -> None:
    async def scenario(world: World) -> None:
        await asyncio.sleep(60.0)
        assert not world.cut_off
        assert (world.network.dialled, world.network.probed) == ([A], [])

    play(scenario)


def test_a_route_to_the_dialled_replica_keeps_the_connection() -> None:
    """A new master that is slow to answer is not left for a replica that is not the master."""

    async def scenario(world: World) -> None:
        world.network.away.add(C)
        world.network.kill(A)
        await world.until(lambda: B in world.network.links)
        world.elect(1)
        await asyncio.sleep(1.0)
        world.network.serve(B, epoch=4)
        await world.until(lambda: len(world.frames) == 2)
        assert world.network.dialled.count(B) == 1
        assert world.network.dialled[-1] == B

    play(scenario)


def test_a_route_to_another_replica_ends_the_attempt() -> None:
    async def scenario(world: World) -> None:
        world.network.kill(A)
        await world.until(lambda: B in world.network.links)
        world.elect(2)
        assert await world.until(lambda: C in world.network.links) < 0.1
        world.network.serve(C, epoch=4)
        await world.until(lambda: len(world.frames) == 2)
        assert world.network.dialled[-1] == C

    play(scenario)


def test_a_master_that_is_elected_again_is_dialled_at_once() -> None:
    async def scenario(world: World) -> None:
        await world.lose_all()
        world.elect(0)
        assert await world.until(lambda: len(world.frames) == 2) < SHORTEST_PAUSE_S
        assert world.network.dialled[-1] == A

    play(scenario)


def test_an_elected_master_that_does_not_know_it_yet_is_dialled_with_short_pauses() -> None:
    async def scenario(world: World) -> None:
        await world.lose_all()
        world.network.late.add(A)
        failed = len(world.network.dialled)
        world.elect(0)
        await asyncio.sleep(0.2)
        world.network.late.clear()
        assert await world.until(lambda: len(world.frames) == 2) < 2 * SHORTEST_PAUSE_S
        assert set(world.network.dialled[failed:]) == {A}

    play(scenario)
