"""Sessions of supervisors and routes of proxies, over real connections to a controller."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import httpx
import pytest
from google.protobuf.message import Message

from tests.support.clocks import ManualClock
from tests.support.worlds.memory_meta_store import Contents, MemoryStore
from tests.support.worlds.proxy_world import eventually
from tidemill.admin.activity.problems import find_problems
from tidemill.admin.app import create_app
from tidemill.admin.cluster.broker_client import BrokerClient
from tidemill.admin.cluster.brokers import Brokers
from tidemill.admin.cluster.controllers import ControllerClients
from tidemill.admin.routes import overview
from tidemill.admin.routes.overview import find_loss
from tidemill.common.errors import BrokerGroupNotFound, BrokerGroupUnreachable, Conflict
from tidemill.common.replica_group import ReplicaId
from tidemill.controller.election.forgetting import SILENCE_MS
from tidemill.controller.election.replacement import UNSEEN_MAX
from tidemill.controller.election.sessions import ElectionTiming
from tidemill.controller.group import BrokerGroupControl
from tidemill.controller.groups import BrokerGroupControls
from tidemill.controller.metrics import ControllerMetrics
from tidemill.controller.server.grpc_server import controller_server
from tidemill.controller.server.service import SERVICE, ControllerService
from tidemill.controller.settings import ControllerSettings
from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire
from tidemill.stubs.tidemill.replication.v1 import replication_pb2 as replication
from tidemill.transport.aio.call import RpcMethod
from tidemill.transport.aio.channel import Channel, connected
from tidemill.transport.aio.process_service import ProcessService
from tidemill.transport.aio.tls import Certificates
from tidemill.transport.grpc.status import RpcCode, RpcError
from tidemill.transport.http2.limits import Limits
from tidemill.transport.replica_wire import from_member, from_view
from tidemill.transport.routes.master_routes import MasterRoutes

NAME = "broker-0"
WAIT_S = 20.0
CALL_S = 10.0
M = TypeVar("M", bound=Message)


def no_client(_address: str) -> contextlib.AbstractAsyncContextManager[BrokerClient]:
    raise AssertionError("a dry run needs no broker")


class Stream:
    """One stream with the messages that it received, in order."""

    def __init__(self, channel: Channel, path: str) -> None:
        self.received: asyncio.Queue[bytes] = asyncio.Queue()
        self.rpc = channel.open(f"/{SERVICE}/{path}", self.received.put_nowait)
        self._number = 0
        self._kept: dict[str, list[wire.SessionDown]] = {}  # unread messages by kind
        # Most streams of these tests last as long as their connection.
        self.rpc.outcome.add_done_callback(lambda outcome: outcome.exception())

    def send(self, **message: Message) -> int:
        self._number += 1
        up = wire.SessionUp(number=self._number, **message)  # type: ignore[arg-type]  # By name.
        self.rpc.write(up.SerializeToString())
        return self._number

    async def next(self, kind: str) -> wire.SessionDown:
        """Return the next message of a kind."""
        kept = self._kept.setdefault(kind, [])
        while not kept:
            down = wire.SessionDown.FromString(await self.received.get())
            self._kept.setdefault(down.WhichOneof("message") or "", []).append(down)
        return kept.pop(0)


class World(NamedTuple):
    address: str
    clock: ManualClock
    store: MemoryStore
    groups: BrokerGroupControls
    connect: Callable[[], contextlib.AbstractAsyncContextManager[Channel]]


@contextlib.asynccontextmanager
async def controller(*, min_in_sync: int | None = 2) -> AsyncIterator[World]:
    clock, store, counted = ManualClock(), MemoryStore(Contents()), ControllerMetrics()

    def make(name: str) -> BrokerGroupControl:
        return BrokerGroupControl(
            name, store, clock=clock, timing=ElectionTiming(), rank=lambda: 0, metrics=counted
        )

    groups = BrokerGroupControls(store, make, founds_with=min_in_sync)
    service = ControllerService(
        groups, clock=clock, timing=ElectionTiming(), metrics=counted, is_leading=lambda: True
    )
    settings = ControllerSettings(grpc_port=0, drain_timeout_ms=100)
    watching = asyncio.ensure_future(groups.run())
    process = ProcessService(
        "controller",
        "controller-7",
        settings,
        clock.wall_ms,
        is_ready=lambda: True,
        certificates=Certificates([]),
    )
    async with controller_server(service, process, settings, None) as server:
        yield World(
            server.address,
            clock,
            store,
            groups,
            lambda: connected(
                server.address, Limits(), message_bytes_max=1 << 20, timeout_s=CALL_S
            ),
        )
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching


def play(scenario: Callable[[World], Awaitable[None]], *, min_in_sync: int | None = 2) -> None:
    async def run() -> None:
        async with asyncio.timeout(WAIT_S), controller(min_in_sync=min_in_sync) as world:
            await scenario(world)

    asyncio.run(run())


def member(replica: int, run: str = "a") -> replication.ReplicaRun:
    return replication.ReplicaRun(replica_id=replica, incarnation=run * 32)


def beat(of: replication.ReplicaRun) -> wire.Heartbeat:
    return wire.Heartbeat(member=of, health=wire.HEALTH_OK, log_end=100)


async def join(channel: Channel, replica: int, run: str = "a", instead_of: str = "") -> Stream:
    """Attach, register and send a heartbeat."""
    stream, me = Stream(channel, "Session"), member(replica, run)
    stream.send(attach=wire.Attach(group=NAME, member=me))
    await stream.next("welcome")
    number = stream.send(
        register=wire.Register(
            member=me,
            store_uuid=f"store-{replica}",
            address=f"10.0.0.{replica}:10911",
            is_clean=True,
            instead_of=instead_of,
        )
    )
    answer = (await stream.next("answer")).answer
    assert (answer.number, answer.WhichOneof("result")) == (number, "done")
    stream.send(heartbeat=beat(me))
    await stream.next("beat")
    return stream


async def view_of_epoch(stream: Stream, epoch: int) -> replication.ReplicationView:
    while True:
        view = (await stream.next("view")).view
        if view.epoch >= epoch:
            return view


def test_the_first_replica_founds_a_group_and_another_takes_over() -> None:
    async def scenario(world: World) -> None:
        async with world.connect() as one, world.connect() as other:
            first = await join(one, 0)
            founded = await view_of_epoch(first, 1)
            assert (founded.master.replica_id, founded.min_in_sync) == (0, 2)
            second = await join(other, 1)
            seen = world.store.contents.records[NAME].record
            first.send(
                proposal=wire.Proposal(
                    epoch=1, version=seen.version, master=member(0), sss=[member(0), member(1)]
                )
            )
            assert (await first.next("answer")).answer.WhichOneof("result") == "done"
            # The death arrives over another connection.
            second.send(death=wire.DeathCertificate(member=member(0), how="killed"))
            after = await view_of_epoch(second, 2)
            assert after.master == member(1)
            assert list(after.sss) == [member(1)]

    play(scenario)


def test_a_replaced_run_is_fenced_at_its_next_heartbeat() -> None:
    async def scenario(world: World) -> None:
        async with world.connect() as one, world.connect() as other:
            first = await join(one, 0)
            await join(other, 0, run="b", instead_of="a" * 32)
            first.send(heartbeat=beat(member(0)))
            answer = (await first.next("answer")).answer
            assert answer.WhichOneof("result") == "fenced"

    play(scenario)


def test_heartbeats_do_not_wait_for_the_store() -> None:
    async def scenario(world: World) -> None:
        async with world.connect() as one:
            first = await join(one, 0)
            world.store.is_unreachable = True
            number = first.send(proposal=wire.Proposal(epoch=9, version=9, master=member(0)))
            answer = (await first.next("answer")).answer
            assert (answer.number, answer.WhichOneof("result")) == (number, "unavailable")
            first.send(heartbeat=beat(member(0)))
            await first.next("beat")

    play(scenario)


def test_a_controller_that_creates_no_groups_rejects_an_unknown_group() -> None:
    async def scenario(world: World) -> None:
        async with world.connect() as one:
            stream = Stream(one, "Session")
            stream.send(attach=wire.Attach(group=NAME, member=member(0)))
            with pytest.raises(RpcError) as refused:
                await stream.rpc.wait_ended()
            assert refused.value.code is RpcCode.NOT_FOUND

    play(scenario, min_in_sync=None)


def test_routes_are_sent_at_once_and_after_each_change() -> None:
    async def scenario(world: World) -> None:
        async with world.connect() as one, world.connect() as other:
            routes = Stream(other, "WatchRoutes")
            routes.rpc.write(wire.WatchRoutesRequest(proxy="proxy-0").SerializeToString())
            first = wire.RouteUpdate.FromString(await routes.received.get())
            assert first.is_complete
            assert not first.groups
            await join(one, 0)
            while True:
                update = wire.RouteUpdate.FromString(await routes.received.get())
                if NAME in update.groups and update.groups[NAME].epoch == 1:
                    break
            assert update.groups[NAME].addresses[0] == "10.0.0.0:10911"

    play(scenario)


def test_the_admin_process_uses_any_controller_that_answers() -> None:
    async def scenario(world: World) -> None:
        async with world.connect() as one:
            first = await join(one, 0)
            await view_of_epoch(first, 1)
            controllers = ControllerClients(["127.0.0.1:1", world.address])
            [group] = await controllers.groups()
            assert group.view.epoch == 1
            with pytest.raises(BrokerGroupNotFound):
                await controllers.groups("nobody")
            with pytest.raises(Conflict):
                await controllers.transfer(NAME, 2)
        with pytest.raises(BrokerGroupUnreachable, match="no controller answers"):
            await ControllerClients(["127.0.0.1:1"]).groups()
        with pytest.raises(Conflict, match="has no controllers"):
            await ControllerClients([]).groups()

    play(scenario)


def test_the_overview_has_a_problem_while_no_controller_answers() -> None:
    async def scenario(world: World) -> None:
        async with world.connect() as one:
            await join(one, 0)
            assert await find_loss(ControllerClients([world.address])) == ""
        assert await find_loss(ControllerClients([])) == "", "a cluster without replicas"
        loss = await find_loss(ControllerClients(["127.0.0.1:1"]))
        assert loss.startswith("no controller answers: 127.0.0.1:1: ")
        [problem] = find_problems([], [], [], controller_loss=loss)
        assert (problem.code, problem.object) == ("ControllerNoLeader", "controllers")
        assert loss in problem.text

    play(scenario)


@contextlib.asynccontextmanager
async def hung_controller() -> AsyncIterator[str]:
    """Serve connections without an answer, as a stopped process, and yield the address."""
    ends = asyncio.Event()

    async def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ends.wait()
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}"
        ends.set()


def test_the_overview_has_a_problem_while_all_controllers_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert overview.CONTROLLERS_S < overview.ANSWER_S, "else the part has no answer"

    async def scenario(world: World) -> None:
        async with hung_controller() as hung:
            answered = await find_loss(ControllerClients([hung, world.address]))
            assert answered == "", "another controller answers"
            monkeypatch.setattr(overview, "CONTROLLERS_S", 0.1)
            loss = await find_loss(ControllerClients([hung, hung]))
            reason = f"{hung}: it has not answered within 0.1 s"
            assert loss == f"no controller answers: {reason}; {reason}"

    play(scenario)


async def dead(world: World, number: int) -> None:
    """Wait until the controller has the death of a replica."""
    group = await world.groups.get(NAME)
    run = from_member(member(number))
    await eventually(lambda: group.sessions()[run].is_dead)


def test_an_incomplete_replica_becomes_master_only_by_force() -> None:
    async def scenario(world: World) -> None:
        async with world.connect() as one, world.connect() as other:
            first = await join(one, 0)
            await view_of_epoch(first, 1)
            await join(other, 1)
            controllers = ControllerClients([world.address])
            with pytest.raises(Conflict):
                await controllers.transfer(NAME, 1)
            with pytest.raises(Conflict, match="stop them first"):
                await controllers.force(NAME, 1, "a slip")
            first.send(death=wire.DeathCertificate(member=member(0), how="killed"))
            await dead(world, 0)
            forced = await controllers.force(NAME, 1, "the other disk is gone")
            assert forced.view.master == member(1)
            assert forced.view.unclean_since == forced.view.epoch == 2

    play(scenario)


# One application for all calls, because creating it takes longer than the calls.
APP = create_app(
    Brokers([], no_client, timeout_ms=1),
    None,  # type: ignore[arg-type]  # Another resource.
)


async def planned(world: World, method: str, path: str, body: Any = None) -> httpx.Response:
    """Make a dry run by the REST API."""
    APP.state.controllers = ControllerClients([world.address])
    transport = httpx.ASGITransport(APP)
    async with httpx.AsyncClient(transport=transport, base_url="http://admin/api/v1") as http:
        return await http.request(
            method, f"/replicas/{NAME}{path}", params={"dryRun": "true"}, json=body
        )


def test_a_dry_run_shows_the_change_of_replicas_and_makes_none() -> None:
    async def scenario(world: World) -> None:
        async with world.connect() as one, world.connect() as other:
            first = await join(one, 0)
            await view_of_epoch(first, 1)
            second = await join(other, 1)
            group = await world.groups.get(NAME)
            before = group.stored
            for path, body, reason in (
                (":transfer", {"target": 1}, "only a live member of the sync state set"),
                (":drain", {"replica": 1}, "without replica 1 the group has 1 of the 2 replicas"),
                (":setMinInSync", {"minInSync": 3}, "is outside 1 to 2"),
                (":replace", {"target": 1, "reason": "a slip"}, "stop them first"),
            ):
                refused = await planned(world, "POST", path, body)
                assert refused.status_code == 409, refused.text
                assert reason in refused.json()["detail"]
            refused = await planned(world, "DELETE", "")
            assert "is live; stop it first" in refused.json()["detail"]
            shown = (await planned(world, "POST", ":setMinInSync", {"minInSync": 1})).json()
            assert (shown["dryRun"], shown["minInSync"], shown["lostBytes"]) == (True, 1, 0)
            assert group.stored == before
            # The last master has confirmed 100 bytes, and replica 1 has 60 of them.
            said = beat(member(0))
            said.confirm = 100
            first.send(heartbeat=said)
            await first.next("beat")
            late = beat(member(1))
            late.log_end = 60
            world.clock.advance(60_000)
            second.send(heartbeat=late)
            await second.next("beat")
            wish = {"target": 1, "reason": "the other disk is gone"}
            before = group.stored
            shown = (await planned(world, "POST", ":replace", wish)).json()
            assert (shown["master"], shown["epoch"], shown["lostBytes"]) == (1, 2, 40)
            assert [one["epoch"] for one in shown["history"]] == [1]
            first.send(death=wire.DeathCertificate(member=member(0), how="killed"))
            await dead(world, 0)
            shown = (await planned(world, "POST", ":replace", wish)).json()
            assert "lostBytes" not in shown
            assert "have no heartbeat of a replica in sync" in shown["unknown"]
            assert group.stored == before

    play(scenario)


def test_an_older_controller_refuses_a_dry_run_and_changes_nothing() -> None:
    class OlderController:
        """A controller without the call `PlanChange`."""

        def methods(self) -> Mapping[str, RpcMethod]:
            return {}

        async def drain(self) -> None:
            """Nothing is in progress."""

    async def scenario() -> None:
        settings = ControllerSettings(grpc_port=0, drain_timeout_ms=100)
        process = ProcessService(
            "controller",
            "controller-7",
            settings,
            lambda: 1,
            is_ready=lambda: True,
            certificates=Certificates([]),
        )
        service = cast("ControllerService", OlderController())
        async with controller_server(service, process, settings, None) as server:
            controllers = ControllerClients([server.address])
            with pytest.raises(Conflict, match="older version without this call; nothing was"):
                await controllers.force(NAME, 1, "a reason", is_dry=True)

    asyncio.run(scenario())


def test_a_second_process_with_another_store_is_fenced() -> None:
    async def scenario(world: World) -> None:
        async with world.connect() as one, world.connect() as other:
            first = await join(one, 0)
            await view_of_epoch(first, 1)
            slip, me = Stream(other, "Session"), member(0, "b")
            slip.send(attach=wire.Attach(group=NAME, member=me))
            await slip.next("welcome")
            register = wire.Register(
                member=me,
                store_uuid="empty",
                address="10.0.0.9:10911",
                is_clean=True,
                instead_of="a" * 32,
            )
            slip.send(register=register)
            answer = (await slip.next("answer")).answer
            assert "is running at 10.0.0.0:10911 with another store" in answer.fenced
            # After a death, another store has to wait for a while.
            first.send(death=wire.DeathCertificate(member=member(0), how="killed"))
            first.send(heartbeat=beat(member(0)))
            await first.next("beat")
            slip.send(register=register)
            assert "was live a moment ago" in (await slip.next("answer")).answer.refused
            world.clock.advance(ElectionTiming().other_store_ms + 1)
            slip.send(register=register)
            assert (await slip.next("answer")).answer.WhichOneof("result") == "done"

    play(scenario)


def test_a_forced_master_gets_an_epoch_above_all_that_replicas_have_seen() -> None:
    async def scenario(world: World) -> None:
        async with world.connect() as one, world.connect() as other:
            for channel, replica, log_end in ((one, 0, 100), (other, 1, 150)):
                stream = await join(channel, replica)
                said = beat(member(replica))
                said.epoch_seen, said.version_seen, said.log_end = 7, 40 + replica, log_end
                stream.send(heartbeat=said)
                await stream.next("beat")
            group = await world.groups.get(NAME)
            group.alarm = ""
            controllers = ControllerClients([world.address])
            while not (found := (await controllers.groups(NAME))[0].alarm):  # noqa: ASYNC110
                await asyncio.sleep(0)  # Until its task has looked.
            assert "replicas have seen epoch 7 and the record has" in found
            assert f"`tidemill broker-group transfer {NAME} --unclean --to 1" in found
            forced = await controllers.force(NAME, 1, "the store of the controllers is lost")
            # A silent replica may have led a later epoch, so the new epoch is far above.
            epoch = 7 + UNSEEN_MAX + 1
            assert (forced.view.epoch, forced.view.unclean_since) == (epoch, epoch)
            # Replicas accept no version below the versions that they have seen.
            assert forced.view.version == 41 + UNSEEN_MAX + 1

    play(scenario)


def test_only_replica_0_or_a_replica_with_an_epoch_creates_a_group() -> None:
    async def scenario(world: World) -> None:
        async with world.connect() as one, world.connect() as other:
            stray = Stream(one, "Session")
            stray.send(attach=wire.Attach(group=NAME, member=member(1)))
            with pytest.raises(RpcError, match="start its replica 0"):
                await stray.rpc.wait_ended()
            assert not world.store.contents.records
            await view_of_epoch(await join(other, 0), 1)
            # A replica with an epoch belongs to a group with a lost record, so it creates one.
            lost = Stream(other, "Session")
            lost.send(attach=wire.Attach(group="lost", member=member(1), epoch_seen=7))
            await lost.next("welcome")
            assert "lost" in world.store.contents.records

    play(scenario)


def test_one_address_cannot_use_up_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.controller.groups.FOUNDED_PER_ADDRESS_MAX", 3)

    async def scenario(world: World) -> None:
        async with world.connect() as one:
            streams = [Stream(one, "Session") for _ in range(10)]
            for number, stream in enumerate(streams):
                # All at once: the last one attaches before the first group is stored.
                stream.send(attach=wire.Attach(group=f"made-up-{number}", member=member(0)))
            done: set[asyncio.Task[None]] = set()
            open_ = {asyncio.ensure_future(stream.rpc.wait_ended()) for stream in streams}
            while len(done) < 7:
                more, open_ = await asyncio.wait(open_, return_when=asyncio.FIRST_COMPLETED)
                done |= more
            assert "has founded 3 broker groups" in str(done.pop().exception())
            assert len(world.store.contents.records) == 3
            for each in open_:
                each.cancel()
            # Another address can still create a group.
            group = await world.groups.get_or_create(NAME, is_founder=True, address="another")
            assert group.name == NAME

    play(scenario)


def test_a_group_beyond_the_limit_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.controller.groups.GROUPS_MAX", 1)

    async def scenario(world: World) -> None:
        async with world.connect() as one, world.connect() as other:
            await join(one, 0)
            stray = Stream(other, "Session")
            stray.send(attach=wire.Attach(group="another", member=member(0)))
            with pytest.raises(RpcError, match="the limit of 1 groups"):
                await stray.rpc.wait_ended()
            assert set(world.store.contents.records) == {NAME}

    play(scenario)


def test_a_session_that_never_attaches_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.controller.server.session.ATTACH_WITHIN_S", 0.0)

    async def scenario(world: World) -> None:
        async with world.connect() as one:
            with pytest.raises(RpcError) as ended:
                await Stream(one, "Session").rpc.wait_ended()
            assert ended.value.code is RpcCode.DEADLINE_EXCEEDED

    play(scenario)


@pytest.mark.parametrize("path", ["Session", "WatchRoutes"])
def test_replicas_and_proxies_share_one_limit_of_streams(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.controller.server.service.STREAMS_MAX", 1)

    async def scenario(world: World) -> None:
        async with world.connect() as one, world.connect() as other:
            watch = Stream(one, "WatchRoutes")
            watch.rpc.write(wire.WatchRoutesRequest(proxy="p").SerializeToString())
            await watch.received.get()
            beyond = Stream(other, path)
            beyond.rpc.write(wire.WatchRoutesRequest(proxy="q").SerializeToString())
            with pytest.raises(RpcError) as refused:
                await beyond.rpc.wait_ended()
            assert refused.value.code is RpcCode.RESOURCE_EXHAUSTED

    play(scenario)


def test_one_address_cannot_use_up_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.controller.server.service.STREAMS_PER_ADDRESS_MAX", 1)

    async def scenario(world: World) -> None:
        async with world.connect() as one:
            await join(one, 0)
            beyond = Stream(one, "Session")
            beyond.send(attach=wire.Attach(group=NAME, member=member(1)))
            with pytest.raises(
                RpcError, match=r"the limit of 1 open streams from 127\.0\.0\.1 is reached"
            ):
                await beyond.rpc.wait_ended()

    play(scenario)


def test_a_group_without_live_replicas_can_be_forgotten() -> None:
    async def scenario(world: World) -> None:
        async with world.connect() as one:
            await view_of_epoch(await join(one, 0), 1)
            controllers = ControllerClients([world.address])
            with pytest.raises(Conflict, match="replica 0 is live"):
                await controllers.forget(NAME)
            # It may only stand still, and then it would lead a group without a record.
            world.clock.advance(ElectionTiming().session_timeout_ms + 1)
            with pytest.raises(Conflict, match="replica 0 has been silent for 1 s"):
                await controllers.forget(NAME)
            world.clock.advance(SILENCE_MS)
            await controllers.forget(NAME)
            assert not world.store.contents.records
            while NAME in world.groups.by_name:  # noqa: ASYNC110  # Until the watch has seen it.
                await asyncio.sleep(0)
            with pytest.raises(BrokerGroupNotFound):
                await controllers.groups(NAME)

    play(scenario)


def test_proxies_follow_a_group_that_was_forgotten_and_created_again() -> None:
    async def scenario(world: World) -> None:
        routes = MasterRoutes([world.address], None, connect=connected, name="proxy-0", cluster="c")
        async with world.connect() as one, world.connect() as again, routes.following():
            await view_of_epoch(await join(one, 0), 1)
            group = await world.groups.get(NAME)
            # The version of the new record stays below this one for a long time.
            await group.change(lambda record, _: record._replace(version=record.version + 100))
            await eventually(lambda: NAME in routes.masters.routes)
            await eventually(lambda: routes.masters.routes[NAME].version > 100)
            world.clock.advance(SILENCE_MS + 1)
            await ControllerClients([world.address]).forget(NAME)
            await view_of_epoch(await join(again, 0, run="b"), 1)
            await eventually(lambda: NAME in routes.masters.routes)
            await eventually(lambda: routes.masters.routes[NAME].version < 100)

    play(scenario)


def test_a_controller_that_hangs_delays_one_call_of_an_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(world: World) -> None:
        connections = []

        async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.append(writer)

        async with world.connect() as one, await asyncio.start_server(hang, "127.0.0.1") as server:
            await view_of_epoch(await join(one, 0), 1)
            host, port = server.sockets[0].getsockname()
            controllers = ControllerClients([f"{host}:{port}", world.address])
            for _ in range(3):
                [group] = await controllers.groups()
                assert group.name == NAME
            assert len(connections) == 1
            connections[0].close()

    monkeypatch.setattr("tidemill.admin.cluster.controllers.CALL_TIMEOUT_S", 0.5)
    play(scenario)


def test_a_replica_of_a_forgotten_group_registers_again() -> None:
    async def scenario(world: World) -> None:
        async with world.connect() as one, world.connect() as again:
            stream = await join(one, 0)
            await view_of_epoch(stream, 1)
            controllers = ControllerClients([world.address])
            world.clock.advance(SILENCE_MS + 1)
            await controllers.forget(NAME)
            # The controller ends the silent stream, because its messages have no effect.
            with pytest.raises(RpcError):
                await stream.rpc.wait_ended()
            back, me = Stream(again, "Session"), member(0)
            back.send(attach=wire.Attach(group=NAME, member=me, epoch_seen=1))
            assert (await back.next("welcome")).welcome.registered_incarnation == ""
            register = wire.Register(
                member=me, store_uuid="store-0", address="10.0.0.0:10911", is_clean=True
            )
            back.send(register=register)
            await back.next("answer")
            seen = beat(me)
            seen.epoch_seen = 1
            back.send(heartbeat=seen)
            # No master is elected, and the remedy of the alarm works.
            group = world.groups.by_name[NAME]
            await eventually(lambda: "have seen epoch 1" in group.alarm)
            assert f"broker-group transfer {NAME} --unclean --to 0" in group.alarm
            await controllers.force(NAME, target=0, reason="it was forgotten")
            assert (await view_of_epoch(back, 2)).master.replica_id == 0

    play(scenario)


def test_an_operator_sets_min_in_sync_within_the_number_of_replicas() -> None:
    async def scenario(world: World) -> None:
        async with world.connect() as one, world.connect() as other:
            first = await join(one, 0)
            await view_of_epoch(first, 1)
            controllers = ControllerClients([world.address])
            # With one replica, an operator may lower min-in-sync to 1.
            alone = await controllers.set_min_in_sync(NAME, 1)
            assert alone.view.min_in_sync == 1
            with pytest.raises(Conflict, match="outside 1 to 1"):
                await controllers.set_min_in_sync(NAME, 2)
            await join(other, 1)
            assert (await controllers.set_min_in_sync(NAME, 2)).view.min_in_sync == 2
            world.clock.advance(ElectionTiming().session_timeout_ms + 1)
            with pytest.raises(Conflict, match="no live master"):
                await controllers.set_min_in_sync(NAME, 1)
            group = await world.groups.get(NAME)
            group.has_spec = True
            with pytest.raises(Conflict, match="BrokerGroup resource"):
                await controllers.set_min_in_sync(NAME, 1)

    play(scenario)


def test_operators_read_groups_and_force_a_master() -> None:
    async def call(channel: Channel, name: str, request: Message, kind: type[M]) -> M:
        stream = Stream(channel, name)
        stream.rpc.write(request.SerializeToString())
        await stream.rpc.wait_ended()
        return kind.FromString(stream.received.get_nowait())

    async def scenario(world: World) -> None:
        async with world.connect() as one, world.connect() as other:
            first = await join(one, 0)
            await view_of_epoch(first, 1)
            found = await call(
                other, "GetGroups", wire.GetGroupsRequest(), wire.BrokerGroupStatusList
            )
            [group] = found.groups
            assert group.view.master == member(0)
            assert [each.reason for each in group.history] == ["the group was founded"]
            assert group.replicas[0].heartbeat.log_end == 100
            with pytest.raises(RpcError) as refused:
                await call(
                    other,
                    "TransferMaster",
                    wire.TransferMasterRequest(group=NAME, target=2),
                    wire.BrokerGroupStatus,
                )
            assert refused.value.code is RpcCode.FAILED_PRECONDITION
            forced = await call(
                other,
                "ForceMaster",
                wire.ForceMasterRequest(group=NAME, target=0),
                wire.BrokerGroupStatus,
            )
            # It leads already, so no other election interrupts its clients.
            assert (forced.view.epoch, forced.view.unclean_since) == (1, 0)
            with pytest.raises(RpcError) as unknown:
                await call(
                    other, "GetGroups", wire.GetGroupsRequest(group="x"), wire.BrokerGroupStatusList
                )
            assert unknown.value.code is RpcCode.NOT_FOUND

    play(scenario)


def test_only_proxies_that_follow_routes_may_report_a_master() -> None:
    async def scenario(world: World) -> None:
        async with world.connect() as one, world.connect() as other:
            first = await join(one, 0)
            await view_of_epoch(first, 1)
            report = wire.ReportUnreachableRequest(proxy="proxy-0", group=NAME, master="host-0:1")
            stranger = Stream(other, "ReportUnreachable")
            stranger.rpc.write(report.SerializeToString())
            with pytest.raises(RpcError, match="follows no routes here"):
                await stranger.rpc.wait_ended()
            routes = Stream(other, "WatchRoutes")
            asked = wire.WatchRoutesRequest(proxy="proxy-0")
            routes.rpc.write(asked.SerializeToString())
            await routes.received.get()
            known = Stream(other, "ReportUnreachable")
            known.rpc.write(report.SerializeToString())
            await known.rpc.wait_ended()
            wire.Done.FromString(known.received.get_nowait())

    play(scenario)


def test_a_follower_of_routes_without_a_name_is_not_counted_as_a_proxy() -> None:
    async def scenario(world: World) -> None:
        async with world.connect() as one, world.connect() as other:
            await view_of_epoch(await join(one, 0), 1)
            routes = MasterRoutes([world.address], connect=connected)
            async with routes.following():
                await eventually(lambda: NAME in routes.masters.routes)
                report = wire.ReportUnreachableRequest(group=NAME, master="host-0:1")
                stranger = Stream(other, "ReportUnreachable")
                stranger.rpc.write(report.SerializeToString())
                with pytest.raises(RpcError, match="follows no routes here"):
                    await stranger.rpc.wait_ended()

    play(scenario)


def test_a_proxy_reports_how_long_a_master_was_unreachable() -> None:
    async def scenario(world: World) -> None:
        async with world.connect() as one, world.connect() as other:
            first = await join(one, 0)
            view = from_view(await view_of_epoch(first, 1))
            routes = MasterRoutes([], None, connect=connected, name="proxy-0", cluster="c")
            routes.masters.learn(NAME, view)
            master = view.address_of(ReplicaId(0))
            routes.masters.dial(master)
            assert routes._unreachable(now_s=5.0) == []
            routes.masters.note_failure(master, master)
            assert [each.unreachable_ms for each in routes._unreachable(now_s=10.0)] == [0]
            [report] = routes._unreachable(now_s=13.5)
            assert (report.group, report.master, report.unreachable_ms) == (NAME, master, 3_500)
            following = Stream(other, "WatchRoutes")
            asked = wire.WatchRoutesRequest(proxy="proxy-0")
            following.rpc.write(asked.SerializeToString())
            await following.received.get()
            await routes._report(other, report)
            routes.masters.accept_master(master, master)
            assert routes._unreachable(now_s=14.0) == []
            routes.masters.note_failure(master, master)
            assert [each.unreachable_ms for each in routes._unreachable(now_s=20.0)] == [0]

    play(scenario)


def test_a_run_registered_elsewhere_is_asked_to_hand_over_and_fenced_here() -> None:
    async def scenario(world: World) -> None:
        async with world.connect() as one, world.connect() as other:
            me = member(0)
            # The stream to a second controller is open before the replica registers.
            here = Stream(other, "Session")
            here.send(attach=wire.Attach(group=NAME, member=me))
            await here.next("welcome")
            elsewhere = await join(one, 0)
            view = await view_of_epoch(elsewhere, 1)
            assert view.master == me
            here.send(heartbeat=beat(me))
            await here.next("beat")
            group = await world.groups.get(NAME)
            for listener in list(group.listeners):
                listener.hand_over(epoch=1, target=ReplicaId(2))
            asked = (await here.next("hand_over")).hand_over
            assert (asked.epoch, asked.target) == (1, 2)
            await join(one, 0, run="b", instead_of=me.incarnation)
            here.send(heartbeat=beat(me))
            assert "another run" in (await here.next("answer")).answer.fenced

    play(scenario)


def test_a_replica_that_is_not_live_is_not_made_master() -> None:
    """A mistake would take the eligibility of all complete replicas."""

    async def scenario(world: World) -> None:
        async with world.connect() as one, world.connect() as other:
            first = await join(one, 0)
            await view_of_epoch(first, 1)
            second = await join(other, 1)
            second.send(death=wire.DeathCertificate(member=member(1), how="killed"))
            await dead(world, 1)
            for number in (1, 2):
                with pytest.raises(Conflict):
                    await ControllerClients([world.address]).force(NAME, number, "a slip")
            [group] = await ControllerClients([world.address]).groups()
            assert (group.view.epoch, group.view.master) == (1, member(0))

    play(scenario)
