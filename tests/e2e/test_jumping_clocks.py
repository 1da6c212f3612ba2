"""Wall clocks of replicas and controllers that jump by an hour, under load: row 29 of the matrix.

Decisions between machines do not use wall clocks, so no master is replaced. Timers wait for ten
seconds after a jump and then follow the clock (T-17). No timer fires early or twice, and
all timers fire when the clock is right again.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.e2e.test_clients_through_failovers import SENDS_BETWEEN, sends
from tests.support.clients.load import Load
from tests.support.eventually import eventually
from tests.support.processes.controlled_group import (
    WITHIN_MS,
    AnnouncedProcess,
    ControlledGroup,
    controlled_group,
    proxy_of,
)
from tests.support.processes.wrong_clocks import WrongClocks
from tidemill.broker.engine.timer.firing_clock import HOLD_MS

pytestmark = pytest.mark.heavy
HOUR_S = 3_600
DELAY_MS = 3_000
LIMIT_S = 240.0
Jumps = Callable[[ControlledGroup, WrongClocks, Load, Load], Awaitable[None]]


def play(folder: Path, jumps: Jumps, *, clients: int = 2) -> tuple[Load, Load]:
    """Run clients of a plain and a delayed topic while clocks jump; return their histories."""
    clocks = WrongClocks(folder)

    async def run(endpoint: str, group: ControlledGroup) -> tuple[Load, Load]:
        rng, stop = random.Random(5), asyncio.Event()
        plain = Load(endpoint, "plain", "of-plain", rng)
        delayed = Load(endpoint, "delayed", "of-delayed", rng, delay_ms=DELAY_MS)
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            for load in (plain, delayed):
                tasks.create_task(load.run(producers=clients, consumers=clients, stop=stop))
            await work(plain, delayed)
            await jumps(group, clocks, plain, delayed)
            stop.set()
        return plain, delayed

    with controlled_group(folder, variables=clocks.variables) as group:
        group.await_in_sync()
        with proxy_of(group) as proxy:
            loads = asyncio.run(run(proxy.grpc, group))
    for load in loads:
        verdict = load.history.judge()
        assert verdict.is_clean, f"{load.topic}\n{verdict}"
    return loads


async def work(*loads: Load) -> None:
    """Wait until the clients have stored more messages of each topic."""
    await asyncio.gather(*(sends(load, SENDS_BETWEEN) for load in loads))


async def is_held(master: AnnouncedProcess, *, is_so: bool) -> None:
    """Wait until the timers of a master hold after a jump, or run again."""

    def look() -> bool:
        return bool(master.metric("rocketmq_timer_clock_hold")) is is_so

    await asyncio.to_thread(eventually, look, within_ms=WITHIN_MS)


@pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S], ids=["ahead", "back"])
def test_a_clock_jump_causes_no_election_and_holds_timers(tmp_path: Path, ahead_s: int) -> None:
    jumped_s: list[float] = []
    sent_before_right: set[str] = set()

    async def jumps(
        group: ControlledGroup, clocks: WrongClocks, plain: Load, delayed: Load
    ) -> None:
        before = await asyncio.to_thread(group.await_in_sync)
        master: int = before.view.master.replica_id
        for name in ("controller", f"replica {(master + 1) % 3}"):
            clocks.set(name, ahead_s)
            await work(plain, delayed)
        assert not delayed.early
        jumped_s.append(time.monotonic())
        clocks.set(f"replica {master}", ahead_s)
        await is_held(group.replicas[master], is_so=True)
        await work(plain, delayed)
        await is_held(group.replicas[master], is_so=False)
        await work(plain, delayed)
        for name in ("controller", *(f"replica {n}" for n in range(3))):
            clocks.set(name, 0)
        await is_held(group.replicas[master], is_so=True)
        await work(plain, delayed)
        await is_held(group.replicas[master], is_so=False)
        sent_before_right.update(delayed.history.sends)
        await work(plain, delayed)
        after = await asyncio.to_thread(group.group)
        led = (before.view.epoch, before.view.master)
        assert (after.view.epoch, after.view.master) == led, "who is there no wall clock says"

    _, delayed = play(tmp_path, jumps)
    sooner = [key for key, at_s in delayed.early.items() if at_s < jumped_s[0] + HOLD_MS / 1_000]
    assert not sooner, "a jump is waited out"
    assert delayed.early.keys() <= sent_before_right, "the clock is right again"
    if ahead_s < 0:
        assert not delayed.early


@pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S], ids=["ahead", "back"])
def test_a_replica_with_a_different_clock_takes_over(tmp_path: Path, ahead_s: int) -> None:
    async def jumps(
        group: ControlledGroup, clocks: WrongClocks, plain: Load, delayed: Load
    ) -> None:
        before = await asyncio.to_thread(group.await_in_sync)
        master: int = before.view.master.replica_id
        others = [f"replica {n}" for n in range(3) if n != master]
        for name in others:
            clocks.set(name, ahead_s)
        await work(plain)  # A busy master is killed with acks that no replica has.
        os.kill(group.replicas[master].broker_pid, signal.SIGKILL)
        await asyncio.to_thread(group.led_by_another, before)
        await work(plain, delayed)
        after = await asyncio.to_thread(group.await_in_sync)
        for name in others:
            clocks.set(name, 0)
        await is_held(group.replicas[after.view.master.replica_id], is_so=True)
        await work(plain, delayed)

    play(tmp_path, jumps, clients=8)
