"""Partitions and slow links between replicas, controllers and clients under load.

Rows 12 to 19 of the fault matrix (`tests/support/worlds/fault_rows.py`). A history checker fails
the test if an acknowledged message is lost or taken back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Awaitable, Callable
from itertools import chain
from pathlib import Path

import pytest

from tests.e2e.test_clients_through_failovers import SENDS_BETWEEN, failed_over, sends
from tests.support.clients.load import Load
from tests.support.eventually import eventually
from tests.support.processes.controlled_group import (
    WITHIN_MS,
    AnnouncedProcess,
    ControlledGroup,
    controlled_group,
    proxy_of,
    reasons_since,
)
from tests.support.processes.tcp_links import BACK, FORTH, tcp_links
from tidemill.controller.election.history import HANDED_OVER

pytestmark = pytest.mark.heavy
LIMIT_S = 120.0
FAR_S = 0.1  # Delay in each direction.
SLOW_BYTES_PER_S = 1 << 20
PROXIES = 3
REPORTS = (
    6  # One per second and proxy. By the last one, the master has been unreachable long enough.
)

Faults = Callable[[ControlledGroup, Load], Awaitable[None]]


def play(folder: Path, faults: Faults, *, controllers: int = 1) -> Load:
    """Run producers and consumers while `faults` happen; return their history."""

    async def run(endpoint: str, group: ControlledGroup) -> Load:
        load = Load(endpoint, "orders", "billing", random.Random(5))
        stop = asyncio.Event()
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(load.run(producers=3, consumers=2, stop=stop))
            await sends(load, SENDS_BETWEEN)
            await faults(group, load)
            stop.set()
            await running
        return load

    with tcp_links() as links, controlled_group(folder, links, controllers=controllers) as group:
        group.await_in_sync()
        with proxy_of(group) as proxy:
            load = asyncio.run(run(proxy.grpc, group))
    verdict = load.history.judge()
    assert verdict.is_clean, str(verdict)
    return load


async def epoch_of(group: ControlledGroup) -> int:
    found = await asyncio.to_thread(group.group)
    return int(found.view.epoch)


async def all_in_sync(group: ControlledGroup) -> None:
    await asyncio.to_thread(group.await_in_sync)


def test_a_master_that_no_replica_reaches_gives_way(tmp_path: Path) -> None:
    async def faults(group: ControlledGroup, load: Load) -> None:
        group.to_replica[0].cut()
        # The master reaches its controllers and reports that it is blocked. They elect a new one.
        await asyncio.to_thread(group.await_group, lambda one: one.view.epoch >= 2)
        await sends(load, SENDS_BETWEEN)
        group.to_replica[0].heal()
        assert await failed_over(group, 2) in (1, 2)
        await sends(load, SENDS_BETWEEN)

    play(tmp_path, faults)


def test_a_master_unreachable_for_controllers_keeps_its_role(tmp_path: Path) -> None:
    async def faults(group: ControlledGroup, load: Load) -> None:
        for link in group.to_controllers[0]:
            link.cut()
        found = await asyncio.to_thread(
            group.await_group, lambda one: one.replicas[0].silent_ms > 2_000
        )
        await sends(load, SENDS_BETWEEN)
        assert (found.view.epoch, found.view.master.replica_id) == (1, 0)
        assert await epoch_of(group) == 1, "the replicas still reach their master"
        for link in group.to_controllers[0]:
            link.heal()
        await all_in_sync(group)

    play(tmp_path, faults)


def test_a_master_that_is_cut_off_from_all_is_replaced_and_cuts_its_tail(tmp_path: Path) -> None:
    async def faults(group: ControlledGroup, load: Load) -> None:
        for link in (group.to_replica[0], *group.to_controllers[0]):
            link.cut()
        await asyncio.to_thread(group.await_group, lambda one: one.view.epoch >= 2)
        await sends(load, SENDS_BETWEEN)
        for link in (group.to_replica[0], *group.to_controllers[0]):
            link.heal()
        assert await failed_over(group, 2) in (1, 2)

    play(tmp_path, faults)


def test_a_replica_unreachable_for_controllers_acks_and_is_not_elected(tmp_path: Path) -> None:
    async def faults(group: ControlledGroup, load: Load) -> None:
        for link in group.to_controllers[1]:
            link.cut()
        found = await asyncio.to_thread(
            group.await_group, lambda one: one.replicas[1].silent_ms > 2_000
        )
        assert len(found.view.sss) == 3, "it acks"
        await sends(load, SENDS_BETWEEN)
        os.kill(group.replicas[0].broker_pid, signal.SIGKILL)
        found = await asyncio.to_thread(group.await_group, lambda one: one.view.epoch >= 2)
        assert found.view.master.replica_id != 1
        for link in group.to_controllers[1]:
            link.heal()
        await sends(load, SENDS_BETWEEN)
        await all_in_sync(group)

    play(tmp_path, faults)


@pytest.mark.parametrize("direction", [FORTH, BACK], ids=["to the master", "from the master"])
def test_a_link_cut_in_one_direction_causes_a_failover(tmp_path: Path, direction: int) -> None:
    async def faults(group: ControlledGroup, load: Load) -> None:
        group.to_replica[0].cut(direction)
        await asyncio.to_thread(group.await_group, lambda one: one.view.epoch >= 2)
        await sends(load, SENDS_BETWEEN)
        group.to_replica[0].heal()
        assert await failed_over(group, 2) in (1, 2)

    play(tmp_path, faults)


def test_a_slow_network_causes_no_election(tmp_path: Path) -> None:
    async def faults(group: ControlledGroup, load: Load) -> None:
        links = [*group.to_replica.values(), *chain(*group.to_controllers.values())]
        for link in links:
            link.slow(delay_s=FAR_S, bytes_per_s=SLOW_BYTES_PER_S)
        for _ in range(3):
            await sends(load, SENDS_BETWEEN)
            group.to_replica[0].reset()
        await sends(load, SENDS_BETWEEN)
        assert await epoch_of(group) == 1
        for link in links:
            link.heal()
        await all_in_sync(group)

    play(tmp_path, faults)


def test_a_leading_controller_that_stands_still_is_followed_by_another(tmp_path: Path) -> None:
    async def faults(group: ControlledGroup, load: Load) -> None:
        first = group.controllers[0]
        os.kill(first.pid, signal.SIGSTOP)
        group.controllers.reverse()
        try:
            os.kill(group.replicas[0].broker_pid, signal.SIGKILL)
            await sends(load, SENDS_BETWEEN)
            await asyncio.to_thread(group.await_group, lambda one: one.view.epoch >= 2)
        finally:
            os.kill(first.pid, signal.SIGCONT)
        await all_in_sync(group)
        found = await asyncio.to_thread(group.group)
        assert found.view.epoch == 2, "the resumed controller changed the epoch"

    play(tmp_path, faults, controllers=2)


def test_a_master_that_proxies_do_not_reach_hands_over_when_they_are_most(tmp_path: Path) -> None:
    async def reports(controller: AnnouncedProcess, count: int) -> None:
        """Wait until the controller has `count` more reports of unreachable masters."""

        def heard() -> float:
            return controller.metric(
                "rocketmq_controller_request_total", request_type="report_unreachable"
            )

        wanted = await asyncio.to_thread(heard) + count
        await asyncio.to_thread(eventually, lambda: heard() >= wanted, within_ms=WITHIN_MS)

    async def faults(
        group: ControlledGroup, proxies: list[AnnouncedProcess], loads: list[Load]
    ) -> None:
        before = await asyncio.to_thread(group.await_in_sync)
        to_master = group.to_replica[before.view.master.replica_id]
        to_master.cut_off(proxies[0].pid)
        await reports(group.controller, REPORTS)
        # One of three proxies: the other proxies reach the master, so the master stays.
        await asyncio.gather(*(sends(load, SENDS_BETWEEN) for load in loads[1:]))
        after = await asyncio.to_thread(group.group)
        assert after.view.epoch == before.view.epoch
        assert len(after.view.sss) == 3, "a replica lost the master"
        to_master.cut_off(proxies[1].pid)
        after = await asyncio.to_thread(group.led_by_another, before)
        assert reasons_since(before, after)[0] == HANDED_OVER
        # The link to the previous master is still cut.
        await asyncio.gather(*(sends(load, SENDS_BETWEEN) for load in loads))
        to_master.heal()
        await all_in_sync(group)
        last = await asyncio.to_thread(group.group)
        assert last.view.epoch == after.view.epoch, "a second election took place"

    async def run(group: ControlledGroup, proxies: list[AnnouncedProcess]) -> list[Load]:
        loads = [
            Load(one.grpc, f"orders-{n}", f"billing-{n}", random.Random(n))
            for n, one in enumerate(proxies)
        ]
        stop = asyncio.Event()
        async with asyncio.timeout(2 * LIMIT_S), asyncio.TaskGroup() as tasks:
            runs = [
                tasks.create_task(one.run(producers=2, consumers=1, stop=stop)) for one in loads
            ]
            await asyncio.gather(*(sends(load, SENDS_BETWEEN) for load in loads))
            await faults(group, proxies, loads)
            stop.set()
            await asyncio.gather(*runs)
        return loads

    # A recent election would protect the master for half a minute.
    unguarded = ["--flapping-guard-ms=0"]
    with contextlib.ExitStack() as running:
        links = running.enter_context(tcp_links())
        group = running.enter_context(controlled_group(tmp_path, links, controller_flags=unguarded))
        group.await_in_sync()
        proxies = [
            running.enter_context(proxy_of(group, name=f"proxy-{n}")) for n in range(PROXIES)
        ]
        loads = asyncio.run(run(group, proxies))
    for load in loads:
        verdict = load.history.judge()
        assert verdict.is_clean, f"{load.topic}\n{verdict}"
