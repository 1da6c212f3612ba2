"""Several broker groups of several replicas, while their masters move: topics still reach all.

After each move, an operator creates a topic and a consumer group. Clients then use them at each
broker group: a message group has one place, so its messages need the topic there.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.clients.api import METADATA, Api, api, message
from tests.support.processes.killing import until
from tests.support.processes.processes import ADMIN_S, Standalone, standalone
from tests.support.processes.replicated_standalone import (
    FLAGS,
    REPLICAS,
    ReplicatedStandalone,
    send_signal,
)
from tidemill.admin.cluster.brokers import MEMBER_UNREACHABLE_MS
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service

GROUPS = ("broker-0", "broker-1")  # the home first
MESSAGE_GROUPS = 20  # enough for each broker group to have some
PATIENT_S = 60.0  # timeout of a client on a busy machine

Move = Callable[[ReplicatedStandalone], Awaitable[None]]


async def transfer(group: ReplicatedStandalone) -> None:
    """Move the master by plan."""
    epoch = group.led()["epoch"]
    group.transfer()
    await group.in_sync(after_epoch=epoch)


async def kill(group: ReplicatedStandalone) -> None:
    """Kill the master with its supervisor. It comes back as a replica."""
    epoch = group.led()["epoch"]
    send_signal(group.pids(group.master()), signal.SIGKILL)
    await until(lambda: is_led_after(group, epoch))


async def freeze(group: ReplicatedStandalone, frozen: list[int]) -> None:
    """Freeze the machine of the master. Its connections stay open."""
    epoch = group.led()["epoch"]
    frozen += group.pids(group.master())
    send_signal(frozen, signal.SIGSTOP)
    await until(lambda: is_led_after(group, epoch))


def is_led_after(group: ReplicatedStandalone, epoch: int) -> bool:
    found = group.status()
    return found.get("epoch", 0) > epoch and "master" in found


def members(running: Standalone) -> list[dict[str, Any]]:
    """Return the broker groups as the home describes them."""
    found: list[dict[str, Any]] = running.get("broker-groups")["items"]
    return found


def known_clients(running: Standalone) -> list[str]:
    """Return the ids of the clients that proxies report to an operator."""
    with httpx.Client(trust_env=False, timeout=ADMIN_S) as client:
        answer = client.get(f"{running.admin}/api/v1/clients")
    return [one["clientId"] for one in answer.json()["clients"]] if answer.is_success else []


async def use_everywhere(running: Standalone, name: str) -> None:
    """Create a topic and a consumer group; send to and receive from each broker group."""
    await asyncio.to_thread(running.put, f"topics/{name}", messageType="FIFO", queues=2)
    await asyncio.to_thread(running.put, f"groups/{name}", deliveryOrder="FIFO")
    async with api(running.grpc, call_s=PATIENT_S) as client:
        for number in range(MESSAGE_GROUPS):
            await send(client, name, str(number))
        beat = service.HeartbeatRequest(
            client_type=v2.SIMPLE_CONSUMER, group=v2.Resource(name=name)
        )
        await client.stub.Heartbeat(beat, metadata=METADATA, timeout=PATIENT_S)
        received: list[v2.Message] = []
        while len(received) < MESSAGE_GROUPS:
            found = await client.receive(name, name)
            received += found
            if found:
                handles = [each.system_properties.receipt_handle for each in found]
                assert (await client.ack(name, name, handles)).status.code == v2.OK
    assert {each.system_properties.store_host for each in received} == set(GROUPS)


async def send(client: Api, topic: str, body: str) -> None:
    """Send a message of its own message group until it is stored."""
    while True:
        answer = await client.send(message(topic, body.encode(), message_group=body))
        if answer.status.code == v2.OK:
            return


@pytest.mark.heavy
def test_a_new_topic_reaches_each_broker_group_after_any_move_of_any_master(tmp_path: Path) -> None:
    frozen: list[int] = []
    moves: dict[str, tuple[str, Move]] = {
        "member-moved": ("broker-1", transfer),
        "home-moved": ("broker-0", transfer),
        "member-killed": ("broker-1", kill),
        "home-killed": ("broker-0", kill),
        "home-frozen": ("broker-0", partial(freeze, frozen=frozen)),
        "member-frozen": ("broker-1", partial(freeze, frozen=frozen)),
    }

    async def play(running: Standalone) -> None:
        groups = {name: ReplicatedStandalone(running, name) for name in GROUPS}
        for step, (name, move) in moves.items():
            for group in groups.values():
                await group.in_sync()
            await move(groups[name])
            try:
                await until(lambda: all("reason" not in one for one in members(running)))
                async with asyncio.timeout(PATIENT_S):
                    await use_everywhere(running, step)
                await until(lambda: known_clients(running) == ["tests"])
            finally:
                send_signal(frozen, signal.SIGCONT)
                frozen.clear()

    with standalone(tmp_path / "data", *FLAGS, "--groups=2") as running:
        asyncio.run(play(running))


@pytest.mark.heavy
def test_an_operator_sees_a_member_that_the_home_cannot_reach(tmp_path: Path) -> None:
    problem = "the home has not reached it for"

    def is_shown() -> bool:
        with httpx.Client(trust_env=False, timeout=ADMIN_S) as client:
            group = client.get(f"{running.admin}/api/v1/replicas/broker-1").json()
            ready = client.get(admin.removesuffix("/metrics") + "/readyz")
        assert ready.status_code == httpx.codes.OK
        return problem in group.get("alarm", "") and f"[!] broker-1: {problem}" in ready.text

    with standalone(tmp_path / "data", *FLAGS, "--groups=2") as running:
        home, member = (ReplicatedStandalone(running, name) for name in GROUPS)
        asyncio.run(home.in_sync())
        asyncio.run(member.in_sync())
        admin = running.processes["admin"].metrics
        assert not is_shown()
        frozen = [pid for n in range(REPLICAS) for pid in member.pids(f"broker-1-{n}")]
        send_signal(frozen, signal.SIGSTOP)
        try:
            asyncio.run(until(is_shown))
            [one] = [each for each in members(running) if each["name"] == "broker-1"]
            assert one["unreachableMs"] >= MEMBER_UNREACHABLE_MS
        finally:
            send_signal(frozen, signal.SIGCONT)
        asyncio.run(until(lambda: not is_shown()))
