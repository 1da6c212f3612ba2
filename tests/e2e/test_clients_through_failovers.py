"""Clients of a proxy while masters are killed, stopped and moved: nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.support.clients.api import CALL_S
from tests.support.clients.history import Outcome
from tests.support.clients.load import Load
from tests.support.processes.controlled_group import (
    ControlledGroup,
    controlled_group,
    proxy_of,
    reasons_since,
)
from tidemill.controller.election.history import HANDED_OVER

LIMIT_S = 180.0
PATIENT_S = 30.0  # Timeout of a client on a slow machine.
SENDS_BETWEEN = 50  # Acknowledged sends between two failovers.


def play(
    folder: Path,
    faults: Callable[[ControlledGroup, Load], Awaitable[None]],
    *,
    call_s: float = CALL_S,
) -> Load:
    """Run producers and consumers while `faults` happen; return their history."""

    async def run(endpoint: str, group: ControlledGroup) -> Load:
        load = Load(endpoint, "orders", "billing", random.Random(5), call_s=call_s)
        stop = asyncio.Event()
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(load.run(producers=3, consumers=2, stop=stop))
            await sends(load, SENDS_BETWEEN)
            await faults(group, load)
            stop.set()
            await running
        return load

    with controlled_group(folder) as group:
        group.await_in_sync()
        with proxy_of(group) as proxy:
            return asyncio.run(run(proxy.grpc, group))


async def sends(load: Load, count: int) -> None:
    """Wait until `count` more sends are acknowledged, or until the test's timeout."""
    wanted = load.sent_ok + count
    while load.sent_ok < wanted:  # noqa: ASYNC110  # No event reports a send.
        await asyncio.sleep(0.01)


async def failed_over(group: ControlledGroup, epoch: int) -> int:
    """Wait until an epoch has begun and all three replicas are in sync; return the master."""
    found = await asyncio.to_thread(
        group.await_group, lambda one: one.view.epoch >= epoch and len(one.view.sss) == 3
    )
    return int(found.view.master.replica_id)


def test_masters_that_are_killed_under_load_take_nothing_with_them(tmp_path: Path) -> None:
    async def kill_twice(group: ControlledGroup, load: Load) -> None:
        for _ in range(2):
            before = await asyncio.to_thread(group.await_in_sync)
            broker = group.replicas[before.view.master.replica_id].broker_pid
            os.kill(broker, signal.SIGKILL)
            await asyncio.to_thread(group.led_by_another, before)
            await sends(load, SENDS_BETWEEN)
        await asyncio.to_thread(group.await_in_sync)

    load = play(tmp_path, kill_twice)
    verdict = load.history.judge()
    assert verdict.is_clean, str(verdict)
    assert load.sent_ok > 2 * SENDS_BETWEEN


def test_a_planned_transfer_causes_no_client_errors(tmp_path: Path) -> None:
    reasons: list[str] = []

    async def transfer(group: ControlledGroup, load: Load) -> None:
        before = await asyncio.to_thread(group.group)
        target = (before.view.master.replica_id + 1) % 3
        await asyncio.to_thread(group.move_master, target)
        await sends(load, SENDS_BETWEEN)
        after = await asyncio.to_thread(group.await_in_sync)
        reasons.extend(reasons_since(before, after))

    load = play(tmp_path, transfer, call_s=PATIENT_S)
    verdict = load.history.judge()
    assert verdict.is_clean, str(verdict)
    assert HANDED_OVER in reasons
    # On a busy machine a master may seem down, which causes an additional election.
    if set(reasons) == {HANDED_OVER}:
        assert {send.outcome for send in load.history.sends.values()} == {Outcome.OK}
