"""A home and a follower in one process: the updates of the follower, and rejected frames."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests.support.audit_changes import records_of
from tests.support.worlds.engine_world import GROUP, TOPIC
from tests.support.worlds.proxy_world import eventually
from tests.support.worlds.round_world import RoundWorld, idle
from tidemill.broker.engine.metadata.membership import BrokerGroup
from tidemill.broker.server.members import member_connection
from tidemill.broker.server.members.cluster_members import ClusterMembers
from tidemill.broker.server.members.home_service import BrokerHomeService
from tidemill.broker.server.members.member_connection import MemberConnection
from tidemill.common.errors import BrokerUnreachable, Conflict
from tidemill.common.feature_level import FEATURE_LEVEL
from tidemill.common.replica_group import ReplicaId, ReplicaRun, ReplicationView
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire
from tidemill.transport.grpc.status import RpcCode, RpcError
from tidemill.transport.replica_wire import to_view

ADDRESSES = {"broker-0": "h0:1", "broker-1": "h1:1"}


class Stream:
    """A call of Follow: the home's end writes, the follower's iterates and sends."""

    part_heard_at_s = 0.0  # messages arrive whole

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

    async def wait_ended(self) -> None:
        await asyncio.shield(self._outcome)

    async def send(self, message: bytes) -> None:
        self._on_message(message)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        return await self._requests.get()


class Channel:
    """The connection to the follower, which fails unless `is_up`."""

    heard_at_s = 0.0

    def __init__(self, follower: RoundWorld) -> None:
        self.service = BrokerHomeService(follower.rounds)
        self.streams: list[Stream] = []
        self.is_up = True
        self.failure: Exception | None = None
        self.dialled: list[str] = []

    @contextlib.asynccontextmanager
    async def connect(self, address: str, *_: object, **__: object) -> AsyncIterator[Channel]:
        self.dialled.append(address)
        if self.failure is not None:
            raise self.failure
        if not self.is_up:
            raise RpcError(RpcCode.UNAVAILABLE, "the follower is down")
        yield self

    def open(self, _path: str, on_message: Callable[[bytes], None]) -> Stream:
        stream = Stream(self.service, on_message)
        self.streams.append(stream)
        return stream

    def lose(self) -> None:
        self.streams[-1].fail(RpcError(RpcCode.UNAVAILABLE, "the stream was lost"))


class Cluster:
    def __init__(self, *, level: int = FEATURE_LEVEL) -> None:
        """Make a home, and a member with a log of a feature level."""
        self.home = RoundWorld(broker_name="broker-0")
        self.follower = RoundWorld(broker_name="broker-1", feature_level=level)
        world = self.follower.world
        world.engine.administration.delete_topic(TOPIC, world.now_ms)
        world.engine.administration.delete_group(GROUP, world.now_ms)
        world.commit()
        self.home.world.engine.broker_groups.found(ADDRESSES, self.home.world.now_ms)
        self.home.world.commit()
        self.home.world.engine.take_config_changes()
        self.channel = Channel(self.follower)
        self.members = ClusterMembers(self.home.rounds, self.channel.connect, life="first")

    @property
    def is_connected(self) -> bool:
        return self.members.connections["broker-1"].is_connected

    def knows(self, topic: str) -> bool:
        return self.follower.world.engine.catalog.find_topic(topic) is not None

    @property
    def member(self) -> MemberConnection:
        return self.members.connections["broker-1"]

    def metric(self, end: str = "connected") -> float:
        (family,) = [one for one in self.members.collect() if one.name.endswith(end)]
        (sample,) = family.samples
        return sample.value

    def elect(self, *, master: int, version: int) -> None:
        """Report the view of a controller: another replica of the member is its master."""
        view = ReplicationView(
            epoch=version,
            version=version,
            master=ReplicaRun(ReplicaId(master), "run"),
            sss=frozenset(),
            eligible=frozenset(),
            min_in_sync=2,
            addresses=tuple((ReplicaId(n), f"replica-{n}:1") for n in range(3)),
        )
        update = wire.RouteUpdate(groups={"broker-1": to_view(view)})
        self.members._routes._apply_update(set(), update.SerializeToString())

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


def test_a_member_gets_the_whole_configuration_and_then_each_change() -> None:
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


def test_the_home_learns_since_when_a_group_reads_from_the_latest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(member_connection, "REPORT_PERIOD_S", 0.01)

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


def test_a_change_is_sent_only_when_it_is_committed() -> None:
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


def test_a_reconnected_member_gets_the_whole_configuration_again() -> None:
    async def scenario(cluster: Cluster) -> None:
        await eventually(lambda: cluster.is_connected)
        cluster.channel.is_up = False
        cluster.channel.lose()
        await eventually(lambda: not cluster.is_connected)
        await eventually(lambda: not cluster.home.world.engine.broker_groups.connected)
        assert cluster.metric() == 0
        await cluster.put("more")
        cluster.channel.is_up = True
        await eventually(lambda: cluster.is_connected)
        assert cluster.knows("more")
        assert cluster.metric() == 1

    run(scenario)


def test_a_member_is_called_at_its_next_master() -> None:
    async def scenario(cluster: Cluster) -> None:
        await eventually(lambda: cluster.is_connected)
        cluster.elect(master=2, version=1)
        await eventually(lambda: cluster.channel.dialled == ["h1:1", "replica-2:1"])
        await eventually(lambda: cluster.is_connected)
        await cluster.put("more")
        await eventually(lambda: cluster.knows("more"))
        # The route to the present master changes nothing.
        cluster.elect(master=2, version=2)
        await cluster.put("most")
        await eventually(lambda: cluster.knows("most"))
        assert len(cluster.channel.dialled) == 2

    run(scenario)


def test_all_replicas_of_a_member_are_called_until_one_is_the_master() -> None:
    async def scenario(cluster: Cluster) -> None:
        await eventually(lambda: cluster.is_connected)
        cluster.channel.is_up = False
        cluster.elect(master=0, version=1)
        replicas = {f"replica-{n}:1" for n in range(3)}
        await eventually(lambda: replicas <= {*cluster.channel.dialled})
        cluster.channel.is_up = True
        await eventually(lambda: cluster.is_connected)

    run(scenario)


def test_the_time_without_answers_of_a_member_is_measured() -> None:
    async def scenario(cluster: Cluster) -> None:
        assert cluster.member.unreachable_s() > 0
        await eventually(lambda: cluster.is_connected)
        await cluster.put("more")
        await eventually(lambda: cluster.knows("more"))
        await eventually(lambda: cluster.metric("unreachable_seconds") == 0)
        # The member is connected and does not answer: it can store nothing.
        cluster.follower.syncs.gate.clear()
        await cluster.put("most")
        await eventually(lambda: cluster.metric("unreachable_seconds") > 0)
        assert cluster.is_connected
        cluster.follower.syncs.gate.set()
        await eventually(lambda: cluster.metric("unreachable_seconds") == 0)
        cluster.channel.is_up = False
        cluster.channel.lose()
        await eventually(lambda: cluster.metric("unreachable_seconds") > 0)
        before = cluster.member.unreachable_s()
        await eventually(lambda: cluster.member.unreachable_s() > before + 0.5)

    run(scenario)


def test_a_member_far_behind_gets_the_whole_configuration_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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

    monkeypatch.setattr(member_connection, "UPDATES_MAX", 2)
    run(scenario)


def test_a_late_frame_is_rejected() -> None:
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


def test_a_broker_at_a_wrong_address_gets_no_configuration() -> None:
    async def scenario(cluster: Cluster) -> None:
        moved = BrokerGroup(name="broker-9", address="h1:1")
        cluster.home.world.engine.catalog.membership.groups["broker-9"] = moved
        await cluster.put("a change")
        await cluster.home.rounds.call(
            lambda engine, turn: engine.broker_groups.drain("broker-9", turn.now_ms)
        )
        await eventually(lambda: "broker-9" in cluster.members.connections)
        follower = cluster.members.connections["broker-9"]
        await eventually(lambda: "this is broker-1, not broker-9" in follower.reason)

    run(scenario)


def test_a_frame_to_a_disconnected_member_fails() -> None:
    async def scenario(cluster: Cluster) -> None:
        await eventually(lambda: cluster.is_connected)
        follower = cluster.members.connections["broker-1"]
        with pytest.raises(Conflict, match="is not draining"):
            await follower.exchange(pb.FollowFrame(leave=True))
        cluster.channel.is_up = False
        cluster.channel.lose()
        await eventually(lambda: not cluster.is_connected)
        with pytest.raises(BrokerUnreachable, match="is not connected"):
            await follower.exchange(pb.FollowFrame(count_backlog=True))

    run(scenario)


def test_a_late_reply_is_not_taken_for_the_next_one() -> None:
    async def scenario(cluster: Cluster) -> None:
        await eventually(lambda: cluster.is_connected)
        follower = cluster.members.connections["broker-1"]
        stream = cluster.channel.streams[0]
        cluster.follower.syncs.gate.clear()
        # The follower sends no reply before this record is durable.
        recording = asyncio.create_task(
            cluster.follower.rounds.call(
                lambda engine, turn: engine.administration.record(
                    {"op": "nextId", "nextId": 50}, turn.now_ms
                )
            )
        )
        await idle()
        counting = asyncio.create_task(follower.exchange(pb.FollowFrame(count_backlog=True)))
        await eventually(lambda: stream.written[-1].count_backlog)
        late = pb.FollowReply(sequence=1, error="Conflict", message="of an earlier frame")
        await stream.send(late.SerializeToString())
        cluster.follower.syncs.gate.set()
        assert (await counting).HasField("backlog")
        await recording

    run(scenario)


def test_a_member_is_tried_again_after_an_unexpected_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(cluster: Cluster) -> None:
        await eventually(lambda: "unexpected" in cluster.members.connections["broker-1"].reason)
        cluster.channel.failure = None
        await eventually(lambda: cluster.is_connected)

    monkeypatch.setattr(member_connection, "REFUSED_S", 0.0)
    run(scenario, failure=ZeroDivisionError("an unexpected error"))


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


def test_a_member_that_left_and_is_added_again_gets_the_whole_configuration() -> None:
    async def scenario(cluster: Cluster) -> None:
        await drain(cluster)
        await cluster.members.connections["broker-1"].request_leave()
        assert not cluster.knows(TOPIC)
        # The home has not recorded the removal, because its caller was cancelled.
        await add(cluster)
        await eventually(lambda: cluster.knows(TOPIC))
        assert len(cluster.channel.streams) == 1

    run(scenario)


def test_an_unnoticed_leave_leads_to_a_new_stream_after_the_member_is_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(cluster: Cluster) -> None:
        await drain(cluster)
        await cluster.members.connections["broker-1"].exchange(pb.FollowFrame(leave=True))
        await add(cluster)
        await eventually(lambda: cluster.knows(TOPIC))
        assert len(cluster.channel.streams) == 2

    monkeypatch.setattr(member_connection, "REFUSED_S", 0.0)
    run(scenario)


def test_the_home_finishes_a_removal_that_the_member_has_recorded() -> None:
    async def scenario(cluster: Cluster) -> None:
        await drain(cluster)
        # The home stops here, so it does not record that the member has left.
        await cluster.members.connections["broker-1"].exchange(pb.FollowFrame(leave=True))
        cluster.channel.lose()
        groups = cluster.home.world.engine.catalog.membership.groups
        await eventually(lambda: "broker-1" not in groups)
        await eventually(lambda: not cluster.members.connections)
        [record] = records_of(cluster.home.world.engine)
        assert (record["resource"], record["action"]) == ("BrokerGroup:broker-1", "Delete")

    run(scenario)
