"""A home and a follower in one process: what is told, when, and what is not listened to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests.support.worlds.engine_world import GROUP, TOPIC
from tests.support.worlds.proxy_world import eventually
from tests.support.worlds.round_world import RoundWorld, idle
from tidemill.broker.engine.metadata.membership import BrokerGroup
from tidemill.broker.server.members import members as members_module
from tidemill.broker.server.members.home_service import BrokerHomeService
from tidemill.broker.server.members.members import Members
from tidemill.common.errors import BrokerUnreachable, Conflict
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.transport.grpc.status import RpcCode, RpcError

ADDRESSES = {"broker-0": "h0:1", "broker-1": "h1:1"}


class Stream:
    """A call of Follow: the home's end writes, the follower's iterates and sends."""

    def __init__(self, service: BrokerHomeService, on_message: Callable[[bytes], None]) -> None:
        self.written: list[pb.FollowFrame] = []
        self._requests: asyncio.Queue[bytes] = asyncio.Queue()
        self._on_message = on_message
        self._outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(service.follow(self))  # type: ignore[arg-type]  # as RpcCall

    def write(self, message: bytes) -> None:
        self.written.append(pb.FollowFrame.FromString(message))
        self._requests.put_nowait(message)

    def write_last(self, message: bytes) -> None:
        self.write(message)

    def cancel(self) -> None:
        self._serving.cancel()

    def fail(self, error: RpcError) -> None:
        if not self._outcome.done():
            self._outcome.set_exception(error)

    async def ended(self) -> None:
        await asyncio.shield(self._outcome)

    async def send(self, message: bytes) -> None:
        self._on_message(message)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        return await self._requests.get()


class Channel:
    """What the home connects to, as long as `is_there`."""

    heard_at_s = 0.0

    def __init__(self, follower: RoundWorld) -> None:
        self.service = BrokerHomeService(follower.rounds)
        self.streams: list[Stream] = []
        self.is_there = True
        self.failure: Exception | None = None

    @contextlib.asynccontextmanager
    async def connect(self, _address: str, *_: object, **__: object) -> AsyncIterator[Channel]:
        if self.failure is not None:
            raise self.failure
        if not self.is_there:
            raise RpcError(RpcCode.UNAVAILABLE, "nobody is there")
        yield self

    def open(self, _path: str, on_message: Callable[[bytes], None]) -> Stream:
        stream = Stream(self.service, on_message)
        self.streams.append(stream)
        return stream

    def lose(self) -> None:
        self.streams[-1].fail(RpcError(RpcCode.UNAVAILABLE, "the stream was lost"))


class Cluster:
    def __init__(self) -> None:
        self.home = RoundWorld(broker_name="broker-0")
        self.follower = RoundWorld(broker_name="broker-1")
        world = self.follower.world
        world.engine.administration.delete_topic(TOPIC, world.now_ms)
        world.engine.administration.delete_group(GROUP, world.now_ms)
        world.commit()
        self.home.world.engine.broker_groups.found(ADDRESSES, self.home.world.now_ms)
        self.home.world.commit()
        self.home.world.engine.take_config_changes()
        self.channel = Channel(self.follower)
        self.members = Members(self.home.rounds, self.channel.connect, life="first")

    @property
    def is_connected(self) -> bool:
        return self.members.followers["broker-1"].is_connected

    def knows(self, topic: str) -> bool:
        return self.follower.world.engine.catalog.find_topic(topic) is not None

    def metric(self) -> float:
        (family,) = [one for one in self.members.collect() if one.name.endswith("connected")]
        (sample,) = family.samples
        return sample.value

    async def put(self, topic: str) -> None:
        await self.home.rounds.call(
            lambda engine, turn: engine.administration.put_topic(
                topic, type_=None, queues=1, now_ms=turn.now_ms
            )
        )


def run(
    scenario: Callable[[Cluster], Awaitable[None]], *, failure: Exception | None = None
) -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.channel.failure = failure
        async with (
            asyncio.timeout(20),
            cluster.follower.running(),
            cluster.home.running(),
            cluster.members.running(),
        ):
            await scenario(cluster)

    asyncio.run(main())


def test_a_member_is_told_everything_and_then_what_changes() -> None:
    async def scenario(cluster: Cluster) -> None:
        await eventually(lambda: cluster.is_connected)
        assert cluster.knows(TOPIC)
        assert "broker-1" in cluster.home.world.engine.broker_groups.connected
        await cluster.put("more")
        await eventually(lambda: cluster.knows("more"))
        first, *later = cluster.channel.streams[0].written
        assert first.configs[0].is_complete
        assert not first.configs[0].handle_secret
        assert not any(config.is_complete for frame in later for config in frame.configs)

    run(scenario)


def test_the_home_asks_where_groups_at_the_latest_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "BEGUN_LOOK_S", 0.01)

    async def scenario(cluster: Cluster) -> None:
        await eventually(lambda: cluster.is_connected)
        home, world = cluster.home.world, cluster.follower.world
        await cluster.home.rounds.call(
            lambda engine, turn: engine.administration.put_group(
                "latest", start_from_latest=True, now_ms=turn.now_ms
            )
        )
        await eventually(lambda: world.engine.catalog.find_group("latest") is not None)
        await cluster.follower.rounds.call(lambda *_: world.pop(1, group="latest"))
        own = world.engine.catalog.find_group("latest")
        assert own is not None
        assert own.begun

        def homes() -> object:
            group = home.engine.catalog.find_group("latest")
            return group.begun if group is not None else ()

        await eventually(lambda: homes() == own.begun)

    run(scenario)


def test_what_the_home_may_still_lose_nobody_is_told_of() -> None:
    async def scenario(cluster: Cluster) -> None:
        await eventually(lambda: cluster.is_connected)
        cluster.home.syncs.gate.clear()
        putting = asyncio.create_task(cluster.put("more"))
        await idle()
        assert cluster.home.world.engine.catalog.find_topic("more") is not None
        assert len(cluster.channel.streams[0].written) == 1
        cluster.home.syncs.gate.set()
        await putting
        await eventually(lambda: cluster.knows("more"))

    run(scenario)


def test_who_was_away_is_told_everything_again() -> None:
    async def scenario(cluster: Cluster) -> None:
        await eventually(lambda: cluster.is_connected)
        cluster.channel.is_there = False
        cluster.channel.lose()
        await eventually(lambda: not cluster.is_connected)
        assert not cluster.home.world.engine.broker_groups.connected
        assert cluster.metric() == 0
        await cluster.put("more")
        cluster.channel.is_there = True
        await eventually(lambda: cluster.is_connected)
        assert cluster.knows("more")
        assert cluster.metric() == 1

    run(scenario)


def test_who_is_far_behind_is_told_everything_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(cluster: Cluster) -> None:
        await eventually(lambda: cluster.is_connected)
        cluster.follower.syncs.gate.clear()
        for n in range(6):
            await cluster.put(f"more-{n}")
        cluster.follower.syncs.gate.set()
        await eventually(lambda: cluster.knows("more-5"))
        assert all(cluster.knows(f"more-{n}") for n in range(6))
        written = cluster.channel.streams[0].written
        assert max(len(frame.configs) for frame in written) <= 2
        assert sum(config.is_complete for frame in written for config in frame.configs) == 2

    monkeypatch.setattr(members_module, "UPDATES_MAX", 2)
    run(scenario)


def test_an_older_word_that_was_still_on_its_way_is_refused() -> None:
    async def scenario(cluster: Cluster) -> None:
        await eventually(lambda: cluster.is_connected)
        await cluster.put("more")
        await eventually(lambda: cluster.knows("more"))
        answers: list[pb.FollowReply] = []
        late = Stream(
            cluster.channel.service,
            lambda message: answers.append(pb.FollowReply.FromString(message)),
        )
        late.write(cluster.channel.streams[0].written[0].SerializeToString())
        await eventually(lambda: bool(answers))
        assert answers[0].error == "Conflict"
        assert cluster.knows("more")
        late.cancel()

    run(scenario)


def test_who_is_another_than_the_list_says_is_told_nothing() -> None:
    async def scenario(cluster: Cluster) -> None:
        moved = BrokerGroup(name="broker-9", address="h1:1")
        cluster.home.world.engine.catalog.membership.groups["broker-9"] = moved
        await cluster.put("a change of nobody")
        await cluster.home.rounds.call(
            lambda engine, turn: engine.broker_groups.drain("broker-9", turn.now_ms)
        )
        await eventually(lambda: "broker-9" in cluster.members.followers)
        follower = cluster.members.followers["broker-9"]
        await eventually(lambda: "this is broker-1, and not broker-9" in follower.reason)

    run(scenario)


def test_a_member_that_is_not_connected_cannot_be_asked() -> None:
    async def scenario(cluster: Cluster) -> None:
        await eventually(lambda: cluster.is_connected)
        follower = cluster.members.followers["broker-1"]
        with pytest.raises(Conflict, match="is not draining"):
            await follower.ask(pb.FollowFrame(leave=True))
        cluster.channel.is_there = False
        cluster.channel.lose()
        await eventually(lambda: not cluster.is_connected)
        with pytest.raises(BrokerUnreachable, match="is not connected"):
            await follower.ask(pb.FollowFrame(count_left=True))

    run(scenario)


def test_an_answer_to_who_has_given_up_is_not_the_next_ones() -> None:
    async def scenario(cluster: Cluster) -> None:
        await eventually(lambda: cluster.is_connected)
        follower = cluster.members.followers["broker-1"]
        stream = cluster.channel.streams[0]
        cluster.follower.syncs.gate.clear()
        # No answer leaves the follower before this is durable.
        recording = asyncio.create_task(
            cluster.follower.rounds.call(
                lambda engine, turn: engine.administration.record(
                    {"op": "nextId", "nextId": 50}, turn.now_ms
                )
            )
        )
        await idle()
        counting = asyncio.create_task(follower.ask(pb.FollowFrame(count_left=True)))
        await eventually(lambda: stream.written[-1].count_left)
        late = pb.FollowReply(sequence=1, error="Conflict", message="to another question")
        await stream.send(late.SerializeToString())
        cluster.follower.syncs.gate.set()
        assert (await counting).HasField("left")
        await recording

    run(scenario)


def test_a_member_whose_connection_fails_as_nobody_foresaw_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(cluster: Cluster) -> None:
        await eventually(lambda: "foresaw" in cluster.members.followers["broker-1"].reason)
        cluster.channel.failure = None
        await eventually(lambda: cluster.is_connected)

    monkeypatch.setattr(members_module, "REFUSED_S", 0.0)
    run(scenario, failure=ZeroDivisionError("what nobody foresaw"))


async def drain(cluster: Cluster) -> None:
    await eventually(lambda: cluster.is_connected)
    await cluster.home.rounds.call(
        lambda engine, turn: engine.broker_groups.drain("broker-1", turn.now_ms)
    )
    catalog = cluster.follower.world.engine.catalog
    await eventually(lambda: catalog.membership.home is not None and catalog.is_draining)


async def add(cluster: Cluster) -> None:
    await cluster.home.rounds.call(
        lambda engine, turn: engine.broker_groups.add("broker-1", "h1:1", turn.now_ms)
    )


def test_who_has_left_and_is_taken_back_is_told_everything() -> None:
    async def scenario(cluster: Cluster) -> None:
        await drain(cluster)
        await cluster.members.followers["broker-1"].leave()
        assert not cluster.knows(TOPIC)
        # The home has not recorded the removal: whoever asked for it went away.
        await add(cluster)
        await eventually(lambda: cluster.knows(TOPIC))
        assert len(cluster.channel.streams) == 1

    run(scenario)


def test_who_has_left_unnoticed_is_told_everything_on_another_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(cluster: Cluster) -> None:
        await drain(cluster)
        await cluster.members.followers["broker-1"].ask(pb.FollowFrame(leave=True))
        await add(cluster)
        await eventually(lambda: cluster.knows(TOPIC))
        assert len(cluster.channel.streams) == 2

    monkeypatch.setattr(members_module, "REFUSED_S", 0.0)
    run(scenario)


def test_a_removal_that_the_home_missed_is_ended_when_the_member_says_so() -> None:
    async def scenario(cluster: Cluster) -> None:
        await drain(cluster)
        # The home dies here, or whoever asked goes: it does not record what the member has done.
        await cluster.members.followers["broker-1"].ask(pb.FollowFrame(leave=True))
        cluster.channel.lose()
        groups = cluster.home.world.engine.catalog.membership.groups
        await eventually(lambda: "broker-1" not in groups)
        await eventually(lambda: not cluster.members.followers)

    run(scenario)
