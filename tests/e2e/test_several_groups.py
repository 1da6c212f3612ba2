"""Three broker groups behind two proxies, as clients and an operator see them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path

import grpc
import httpx
import pytest

from tests.support.clients.api import POLL_MS_MIN, Api, api, message
from tests.support.clients.load import Load
from tests.support.processes.killing import RECOVERY_S, NoProgress, kill, until
from tests.support.processes.processes import ADMIN_S, Standalone, standalone
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.stubs.tidemill.broker.v1 import broker_pb2_grpc

ALL = {"broker-0", "broker-1", "broker-2"}
FLAGS = ("--groups=3", "--proxies=2")
PROGRESS = (10, 200)  # Messages stored between two kills: minimum and maximum.
DRAIN_S = 120.0


@pytest.mark.heavy
def test_no_promise_is_broken_when_any_broker_group_is_killed(tmp_path: Path) -> None:
    rng = random.Random(1)
    with standalone(tmp_path / "data", *FLAGS) as running:
        running.put("topics/plain", messageType="NORMAL", queues=2)
        running.put("topics/ordered", messageType="FIFO", queues=2)
        running.put("topics/delayed", messageType="DELAY", queues=2)
        running.put("groups/ordered", deliveryOrder="FIFO", maxAttempts=1000)
        for name in ("plain", "delayed"):
            running.put(f"groups/{name}", maxAttempts=1000)
        loads = [
            Load(running.grpc, "plain", "plain", rng),
            Load(running.grpc, "ordered", "ordered", rng, message_groups=6),
            Load(running.grpc, "delayed", "delayed", rng, delay_ms=3_000),
        ]
        try:
            asyncio.run(kill_under_load(running, loads, rng))
        except* NoProgress:
            statuses = "\n".join(load.status for load in loads)
            pytest.fail(
                f"no progress in {RECOVERY_S:.0f} s\n{statuses}\n{running.log.read_text()[-5000:]}"
            )
        log = running.log.read_text()
        assert running.stop() == 0
    for load in loads:
        verdict = load.history.judge()
        assert verdict.is_clean, f"{load.topic}\n{verdict}"
        assert load.sent_ok > 100
        assert load.places == ALL, load.topic
    assert "Traceback" not in log


async def kill_under_load(running: Standalone, loads: list[Load], rng: random.Random) -> None:
    """Kill the home and the followers in turn, and a proxy while a follower is down."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        runs = [tasks.create_task(load.run(producers=6, consumers=6, stop=stop)) for load in loads]
        for names in (
            ("broker-0",),
            ("broker-1", "proxy-0"),
            ("broker-2",),
            ("broker-0", "proxy-1"),
        ):
            await progress(loads, rng.randint(*PROGRESS))
            for name in names:
                await kill(running, name)
        await progress(loads, PROGRESS[1])
        stop.set()
        _, undrained = await asyncio.wait(runs, timeout=DRAIN_S)
        for run in undrained:
            run.cancel()


async def progress(loads: list[Load], messages: int) -> None:
    """Wait until each load has stored `messages` more."""
    goals = [(load, load.sent_ok + messages) for load in loads]
    await until(lambda: all(load.sent_ok >= goal for load, goal in goals))


def test_a_topic_is_everywhere_and_made_again_it_is_new_everywhere(tmp_path: Path) -> None:
    async def scenario(client: Api) -> None:
        running.put("topics/orders", messageType="NORMAL", queues=2)
        running.put("groups/billing")
        await send_everywhere(client, "orders")
        delete(running, "topics/orders")
        running.put("topics/orders", messageType="NORMAL", queues=2)
        await send_until_all_have_it(client, "orders", "billing")

    with standalone(tmp_path / "data", *FLAGS) as running:
        with_api(running, scenario)


def test_a_restart_finds_the_same_cluster_on_other_ports(tmp_path: Path) -> None:
    sent: set[bytes] = set()

    async def send(client: Api) -> None:
        sent.update(await send_everywhere(client, "orders", is_ordered=True))

    async def receive(client: Api) -> None:
        received = await receive_all(client, "orders", "billing", len(sent))
        assert {each.body for each in received} == sent

    with standalone(tmp_path / "data", *FLAGS) as running:
        running.put("topics/orders", messageType="FIFO", queues=2)
        running.put("groups/billing")
        with_api(running, send)
        assert running.stop() == 0
    with standalone(tmp_path / "data", *FLAGS) as running:
        with_api(running, receive)
    assert running.log.read_text().count("cluster founded") == 1


def test_without_the_home_traffic_continues_and_nothing_is_created(tmp_path: Path) -> None:
    async def scenario(client: Api) -> None:
        running.put("topics/orders", messageType="NORMAL", queues=2)
        running.put("groups/billing")
        await send_until_all_have_it(client, "orders", "billing")
        os.kill(running.processes["broker-0"].pid, signal.SIGSTOP)
        try:
            sent = await send_everywhere(client, "orders", prefix="frozen", count=10)
            received: set[bytes] = set()
            while not sent <= received:
                received |= {each.body for each in await receive_some(client, "orders", "billing")}
            refused = await client.send(message("unheard-of", b"m"))
            assert refused.status.code == v2.PROXY_TIMEOUT
            assert "broker-0" in refused.status.message
        finally:
            os.kill(running.processes["broker-0"].pid, signal.SIGCONT)
        while (await client.send(message("unheard-of", b"m"))).status.code != v2.OK:
            pass

    with standalone(tmp_path / "data", *FLAGS) as running:
        with_api(running, scenario)


def test_a_broker_group_drains_and_leaves(tmp_path: Path) -> None:
    async def scenario(client: Api, admin: broker_pb2_grpc.BrokerAdminAsyncStub) -> None:
        drain = pb.DrainBrokerGroupRequest(name="broker-2", requested_by="test")
        remove = pb.RemoveBrokerGroupRequest(name="broker-2", requested_by="test")
        running.put("topics/orders", messageType="FIFO", queues=2)
        running.put("groups/billing")
        sent = await send_everywhere(client, "orders", is_ordered=True)
        assert await refusal(admin.RemoveBrokerGroup(remove)) == "Conflict"
        home = pb.DrainBrokerGroupRequest(name="broker-0")
        assert await refusal(admin.DrainBrokerGroup(home)) == "Conflict"
        assert (await admin.DrainBrokerGroup(drain)).member.state == pb.MEMBER_STATE_DRAINING
        assert await refusal(admin.RemoveBrokerGroup(remove)) == "Conflict"
        left = {group.member.name: group for group in await groups(admin)}["broker-2"].backlog
        assert left.ready_count > 0
        received = await receive_all(client, "orders", "billing", len(sent))
        assert {each.body for each in received} == sent
        await admin.RemoveBrokerGroup(remove)
        assert [group.member.name for group in await groups(admin)] == ["broker-0", "broker-1"]
        # Other broker groups now store its message groups.
        await send_everywhere(client, "orders", prefix="order", count=40, is_ordered=True)
        places = {
            each.system_properties.store_host
            for each in await receive_all(client, "orders", "billing", 40)
        }
        assert places == {"broker-0", "broker-1"}

    async def main() -> None:
        home = grpc_of(running, "broker-0")
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with (
            asyncio.timeout(60),
            api(running.grpc) as client,
            grpc.aio.insecure_channel(home, options) as channel,
        ):
            await scenario(client, broker_pb2_grpc.BrokerAdminStub(channel))

    with standalone(tmp_path / "data", *FLAGS) as running:
        asyncio.run(main())


async def groups(admin: broker_pb2_grpc.BrokerAdminAsyncStub) -> list[pb.BrokerGroup]:
    return list(
        (await admin.ListBrokerGroups(pb.ListBrokerGroupsRequest(with_backlog=True))).groups
    )


async def refusal(call: Awaitable[object]) -> str:
    """Return the name of a rejected call's error."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    trailer = refused.value.trailing_metadata() or ()
    return str(dict(tuple(trailer))["tidemill-error"])


def with_api(running: Standalone, scenario: Callable[[Api], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), api(running.grpc) as client:
            await scenario(client)

    asyncio.run(main())


async def send_everywhere(
    client: Api, topic: str, *, prefix: str = "m", count: int = 60, is_ordered: bool = False
) -> set[bytes]:
    """Send messages of different message groups until each is stored; return the bodies."""
    keys = [f"{prefix}-{n}" for n in range(count)]
    for key in keys:
        one = message(topic, key.encode(), message_group=key if is_ordered else "")
        while (await client.send(one)).status.code != v2.OK:
            pass
    return {key.encode() for key in keys}


async def send_until_all_have_it(client: Api, topic: str, group: str) -> None:
    """Send until every broker group has stored some; check the received messages."""
    places: set[str] = set()
    for n in count():
        new = await send_everywhere(client, topic, prefix=f"new-{n}", count=20)
        received = await receive_all(client, topic, group, len(new))
        assert {each.body for each in received} == new
        places |= {each.system_properties.store_host for each in received}
        if places == ALL:
            return


async def receive_some(client: Api, topic: str, group: str) -> list[v2.Message]:
    """Receive and ack the messages of one poll from the brokers that answer."""
    try:
        found = await client.receive(topic, group, poll_ms=POLL_MS_MIN)
        handles = [each.system_properties.receipt_handle for each in found]
        if handles:
            await client.ack(topic, group, handles)
    except (grpc.aio.AioRpcError, AssertionError):
        return []  # The poll may have reached a hanging broker. The next poll is better.
    return found


async def receive_all(client: Api, topic: str, group: str, count: int) -> list[v2.Message]:
    """Receive and ack `count` messages."""
    received: list[v2.Message] = []
    while len(received) < count:
        found = await client.receive(topic, group)
        if found:
            received += found
            handles = [each.system_properties.receipt_handle for each in found]
            assert (await client.ack(topic, group, handles)).status.code == v2.OK
    return received


def delete(running: Standalone, path: str) -> None:
    with httpx.Client(trust_env=False, timeout=ADMIN_S) as client:
        client.delete(f"{running.admin}/api/v1/{path}").raise_for_status()


def grpc_of(running: Standalone, name: str) -> str:
    """Return the address of a broker from its log."""
    lines = [json.loads(line) for line in running.log.read_text().splitlines() if line[0] == "{"]
    return next(
        str(line["grpc"])
        for line in lines
        if line.get("event") == "broker serves" and line["process"] == name
    )
