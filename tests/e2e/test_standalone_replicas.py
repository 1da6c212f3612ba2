"""`standalone --replicas 3` while parts of it die, stop and move: no promise is broken."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import pytest

from tests.support.clients.api import POLL_MS_MIN, Api, api, message
from tests.support.clients.load import Load
from tests.support.processes.killing import RECOVERY_S, NoProgress, until
from tests.support.processes.processes import ADMIN_S, Standalone, standalone
from tests.support.processes.replicated_standalone import FLAGS, ReplicatedStandalone, send_signal
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

SENDS_BETWEEN = 50  # Messages of each load between two faults.
DRAIN_S = 120.0
DELAY_MS = 2_000
IN_FLIGHT_MS = 300_000  # Longer than the test.
DUE_IN_MS = 6_000  # Time for a failover after the send.
NS_PER_MS = 1_000_000
PATIENT_S = 60.0  # Timeout of a client. It includes an election, with other tests on the machine.

Fault = Callable[[ReplicatedStandalone, list[Load]], Awaitable[None]]


async def stored(loads: list[Load], count: int = SENDS_BETWEEN) -> None:
    """Wait until each load has stored `count` more messages."""
    goals = [(load, load.sent_ok + count) for load in loads]
    await until(lambda: all(load.sent_ok >= goal for load, goal in goals))


async def kill_master(
    group: ReplicatedStandalone, loads: list[Load], *, with_supervisor: bool
) -> None:
    """Kill the master twice; each time another one takes over and the killed one comes back."""
    for _ in range(2):
        epoch = group.led()["epoch"]
        pids = group.pids(group.master())
        send_signal(pids if with_supervisor else pids[1:2], signal.SIGKILL)
        await stored(loads)
        await group.in_sync(after_epoch=epoch)


async def freeze_master(
    group: ReplicatedStandalone, loads: list[Load], *, with_supervisor: bool
) -> None:
    """Freeze the master until the others have elected a new one."""
    epoch = group.led()["epoch"]
    pids = group.pids(group.master())
    frozen = pids if with_supervisor else pids[1:]
    send_signal(frozen, signal.SIGSTOP)
    try:
        await stored(loads)
    finally:
        send_signal(frozen, signal.SIGCONT)
    await group.in_sync(after_epoch=epoch)


async def kill_controller(group: ReplicatedStandalone, loads: list[Load]) -> None:
    """Kill the controller. All work continues while it is down and afterwards."""
    send_signal(group.pids("controller-0"), signal.SIGKILL)
    await stored(loads)
    await group.in_sync()


async def kill_replica(group: ReplicatedStandalone, loads: list[Load]) -> None:
    """Kill a replica that is not the master."""
    send_signal(group.pids(group.follower()), signal.SIGKILL)
    await stored(loads)
    await group.in_sync()


async def transfer(group: ReplicatedStandalone, loads: list[Load]) -> None:
    """Move the master by plan."""
    epoch = group.led()["epoch"]
    group.transfer()
    await stored(loads)
    await group.in_sync(after_epoch=epoch)


async def drain_master(group: ReplicatedStandalone, loads: list[Load]) -> None:
    """Drain the master and end the drain."""
    epoch, master = group.led()["epoch"], group.led()["master"]
    group.drain(master)
    await stored(loads)
    await until(lambda: group.status()["replicas"][master]["role"] == "retired")
    await stored(loads)
    group.drain(master, undo=True)
    await group.in_sync(after_epoch=epoch)


FAULTS: dict[str, Fault] = {
    "broker of the master killed": partial(kill_master, with_supervisor=False),
    "master killed": partial(kill_master, with_supervisor=True),
    "broker of the master frozen": partial(freeze_master, with_supervisor=False),
    "master frozen": partial(freeze_master, with_supervisor=True),
    "controller killed": kill_controller,
    "replica killed": kill_replica,
    "master moved": transfer,
    "master drained": drain_master,
}


def loads_of(running: Standalone, seed: int) -> list[Load]:
    rng = random.Random(seed)
    running.put("topics/plain", messageType="NORMAL", queues=2)
    running.put("topics/ordered", messageType="FIFO", queues=2)
    running.put("topics/delayed", messageType="DELAY", queues=2)
    running.put("groups/ordered", deliveryOrder="FIFO", maxAttempts=1000)
    for name in ("plain", "delayed"):
        running.put(f"groups/{name}", maxAttempts=1000)
    return [
        Load(running.grpc, "plain", "plain", rng),
        Load(running.grpc, "ordered", "ordered", rng, message_groups=2),
        Load(running.grpc, "delayed", "delayed", rng, delay_ms=DELAY_MS),
    ]


async def under_load(group: ReplicatedStandalone, loads: list[Load], fault: Fault) -> None:
    stop = asyncio.Event()
    await group.in_sync()
    async with asyncio.TaskGroup() as tasks:
        runs = [tasks.create_task(load.run(producers=2, consumers=2, stop=stop)) for load in loads]
        await stored(loads)
        await fault(group, loads)
        await stored(loads)
        stop.set()
        _, undrained = await asyncio.wait(runs, timeout=DRAIN_S)
        for run in undrained:
            run.cancel()


@pytest.mark.heavy
@pytest.mark.parametrize("name", FAULTS)
def test_no_promise_is_broken_by_a_fault_of_replicas(tmp_path: Path, name: str) -> None:
    with standalone(tmp_path / "data", *FLAGS) as running:
        loads = loads_of(running, seed=1)
        group = ReplicatedStandalone(running)
        try:
            asyncio.run(under_load(group, loads, FAULTS[name]))
        except* NoProgress:
            statuses = "\n".join(load.status for load in loads)
            log = running.log.read_text()[-5000:]
            pytest.fail(f"no progress in {RECOVERY_S:.0f} s\n{statuses}\n{group.status()}\n{log}")
        log = running.log.read_text()
        assert running.stop() == 0
    for load in loads:
        verdict = load.history.judge()
        assert verdict.is_clean, f"{load.topic}\n{verdict}"
    assert "Traceback" not in log


def test_replicas_are_shown_with_their_broker_group(tmp_path: Path) -> None:
    with standalone(tmp_path / "data", *FLAGS) as running:
        asyncio.run(ReplicatedStandalone(running).in_sync())
        with httpx.Client(trust_env=False, timeout=ADMIN_S) as client:
            [group] = client.get(f"{running.admin}/api/v1/broker-groups").json()["items"]
    names = [f"broker-0-{number}" for number in range(3)]
    assert [one["name"] for one in group["replicas"]] == names
    assert {one["name"]: one["role"] for one in group["replicas"]} == {
        name: "master" if name == group["master"] else "replica" for name in names
    }
    assert [one["inSync"] for one in group["replicas"]] == [True] * 3
    assert group["epoch"] >= 1


class OrderlyStop(NamedTuple):
    data: Path
    log: list[dict[str, Any]]  # of the stop


@pytest.fixture(scope="module")
def orderly_stop(tmp_path_factory: pytest.TempPathFactory) -> OrderlyStop:
    """Stop a standalone whose replicas are in sync."""
    data = tmp_path_factory.mktemp("stop") / "data"
    with standalone(data, *FLAGS) as running:
        running.put("topics/plain", messageType="NORMAL", queues=2)
        asyncio.run(ReplicatedStandalone(running).in_sync())
        before = len(running.log.read_bytes())
        assert running.stop() == 0
    lines = running.log.read_bytes()[before:].splitlines()
    return OrderlyStop(data, [json.loads(line) for line in lines])


def test_an_orderly_stop_logs_neither_warnings_nor_errors(orderly_stop: OrderlyStop) -> None:
    assert [one for one in orderly_stop.log if one["level"] != "info"] == []


def test_a_replica_stops_without_a_checkpoint(orderly_stop: OrderlyStop) -> None:
    """Only a broker alone lets its clients wait for its next start. It writes one of any log."""
    for folder in (".", "broker-0-1", "broker-0-2"):
        assert (orderly_stop.data / folder / "log").exists()
        assert not (orderly_stop.data / folder / "checkpoint").exists()


async def receive_all(client: Api, topic: str, count: int) -> list[v2.Message]:
    """Receive `count` messages. They stay in flight for the whole test."""
    found: list[v2.Message] = []
    async with asyncio.timeout(RECOVERY_S):
        while len(found) < count:
            with contextlib.suppress(grpc.aio.AioRpcError, AssertionError):
                found += await client.receive(
                    topic, "billing", poll_ms=POLL_MS_MIN, invisible_ms=IN_FLIGHT_MS
                )
    return found


async def send_all(client: Api, topic: str, bodies: Sequence[str], *, due_at_ms: int = 0) -> None:
    """Send one after the other. Each send waits until a master stores it."""
    for body in bodies:
        answer = await client.send(message(topic, body.encode(), due_at_ms=due_at_ms))
        assert answer.status.code == v2.OK, answer.status


@pytest.mark.heavy
def test_deliveries_in_flight_stay_valid_after_a_failover(tmp_path: Path) -> None:
    async def play(group: ReplicatedStandalone) -> None:
        bodies = [str(number) for number in range(100)]
        async with api(group.running.grpc, call_s=PATIENT_S) as client:
            await send_all(client, "plain", bodies)
            found = await receive_all(client, "plain", len(bodies))
            assert sorted(each.body.decode() for each in found) == sorted(bodies)
            await group.in_sync()
            send_signal(group.pids(group.master()), signal.SIGKILL)
            await send_all(client, "plain", ["later"])
            # The next receive is empty: the messages are also in flight at the new master.
            [later] = await receive_all(client, "plain", 1)
            assert later.body == b"later"
            again = await client.receive("plain", "billing", poll_ms=POLL_MS_MIN)
            assert again == []
            for each in found:
                handle = each.system_properties.receipt_handle
                answer = await client.ack("plain", "billing", [handle])
                assert answer.entries[0].status.code == v2.OK, answer
        assert group.running.lag("billing") == 1  # The later message without an ack.

    with standalone(tmp_path / "data", *FLAGS) as running:
        running.put("topics/plain", messageType="NORMAL", queues=2)
        asyncio.run(play(ReplicatedStandalone(running)))


def test_timers_of_a_dead_master_come_once_and_not_early(tmp_path: Path) -> None:
    async def play(group: ReplicatedStandalone) -> None:
        bodies = [str(number) for number in range(100)]
        due_at_ms = time.time_ns() // NS_PER_MS + DUE_IN_MS
        async with api(group.running.grpc, call_s=PATIENT_S) as client:
            await send_all(client, "delayed", bodies, due_at_ms=due_at_ms)
            await group.in_sync()
            send_signal(group.pids(group.master()), signal.SIGKILL)
            found = await receive_all(client, "delayed", len(bodies))
            assert time.time_ns() // NS_PER_MS >= due_at_ms
            for each in found:
                assert each.system_properties.delivery_attempt == 1
            assert sorted(each.body.decode() for each in found) == sorted(bodies)

    with standalone(tmp_path / "data", *FLAGS) as running:
        running.put("topics/delayed", messageType="DELAY", queues=2)
        asyncio.run(play(ReplicatedStandalone(running)))


@pytest.mark.heavy
def test_a_restart_keeps_all_messages_and_shares_those_of_one_replica(tmp_path: Path) -> None:
    async def send(running: Standalone, *bodies: str) -> None:
        async with api(running.grpc, call_s=PATIENT_S) as client:
            await send_all(client, "plain", bodies)

    async def receive(running: Standalone, count: int) -> list[str]:
        async with api(running.grpc, call_s=PATIENT_S) as client:
            return sorted(each.body.decode() for each in await receive_all(client, "plain", count))

    data = tmp_path / "data"
    with standalone(data) as running:
        running.put("topics/plain", messageType="NORMAL", queues=2)
        asyncio.run(send(running, "a"))
    with standalone(
        data
    ) as running:  # Its second epoch: a broker group does not begin at the first.
        asyncio.run(send(running, "b"))
    with standalone(data, *FLAGS) as running:
        asyncio.run(ReplicatedStandalone(running).in_sync())
        asyncio.run(send(running, "c"))
    with standalone(data, *FLAGS) as running:
        asyncio.run(ReplicatedStandalone(running).in_sync())
        send_signal(running.pids(), signal.SIGKILL)
    with standalone(data, *FLAGS) as running:
        group = ReplicatedStandalone(running)
        asyncio.run(group.in_sync())
        # The other replicas have all messages, also those that one replica had alone.
        send_signal(group.pids(group.master()), signal.SIGKILL)
        assert asyncio.run(receive(running, 3)) == ["a", "b", "c"]


@pytest.mark.heavy
def test_several_replicated_groups_survive_failovers_behind_several_proxies(tmp_path: Path) -> None:
    async def play(groups: list[ReplicatedStandalone], load: Load) -> None:
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task(load.run(producers=4, consumers=4, stop=stop))
            await stored([load])
            for group in groups:  # The home broker group first.
                await group.in_sync()
                epoch = group.led()["epoch"]
                send_signal(group.pids(group.master()), signal.SIGKILL)
                await stored([load])
                await group.in_sync(after_epoch=epoch)
            # Decisions of the home reach the other broker groups at their current masters.
            await asyncio.to_thread(groups[0].running.put, "topics/more", queues=4)
            async with api(load.endpoint, call_s=PATIENT_S) as client:
                await send_all(client, "more", [str(number) for number in range(20)])
            stop.set()
            await run

    flags = *FLAGS, "--groups=2", "--proxies=2"
    with standalone(tmp_path / "data", *flags) as running:
        running.put("topics/plain", messageType="NORMAL", queues=2)
        running.put("groups/plain", maxAttempts=1000)
        load = Load(running.grpc, "plain", "plain", random.Random(1))
        asyncio.run(
            play([ReplicatedStandalone(running), ReplicatedStandalone(running, "broker-1")], load)
        )
        assert running.stop() == 0
    verdict = load.history.judge()
    assert verdict.is_clean, str(verdict)
    assert load.places == {"broker-0", "broker-1"}
