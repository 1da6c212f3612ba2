"""Two replicas of three, and all of them, killed under load; one that stands still.

Rows 5, 6 and 11 of the fault matrix (`tests/support/worlds/fault_rows.py`).
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.test_clients_through_failovers import SENDS_BETWEEN, sends
from tests.e2e.test_partitions import all_in_sync, epoch_of, play
from tests.support.clients.load import Load
from tests.support.processes.controlled_group import ControlledGroup

pytestmark = pytest.mark.heavy
QUIET_S = 2.0  # in which a group that may confirm nothing answers nothing
STOPPED_S = 5.0  # longer than a member may lag


async def start(group: ControlledGroup, *numbers: int) -> None:
    for number in numbers:
        await asyncio.to_thread(group.start_replica, number)


def test_one_of_three_replicas_confirms_nothing_until_another_returns(tmp_path: Path) -> None:
    async def faults(group: ControlledGroup, load: Load) -> None:
        for number in (0, 1):
            await asyncio.to_thread(group.replicas[number].end)
        await asyncio.sleep(QUIET_S)
        before = load.sent_ok
        await asyncio.sleep(QUIET_S)
        assert load.sent_ok == before, "it is alone"
        await start(group, 1)
        await sends(load, SENDS_BETWEEN)
        await start(group, 0)
        await all_in_sync(group)

    play(tmp_path, faults)


def test_all_that_were_killed_elect_one_of_them_without_an_operator(tmp_path: Path) -> None:
    async def faults(group: ControlledGroup, load: Load) -> None:
        for number in (1, 0, 2):
            await asyncio.to_thread(group.replicas[number].end)
        await start(group, 2, 1, 0)
        await asyncio.to_thread(group.await_group, lambda one: one.view.epoch >= 2)
        await sends(load, SENDS_BETWEEN)
        await all_in_sync(group)

    play(tmp_path, faults)


def test_a_replica_that_stands_still_leaves_the_set_and_comes_back(tmp_path: Path) -> None:
    async def faults(group: ControlledGroup, load: Load) -> None:
        broker = group.replicas[2].broker_pid
        os.kill(broker, signal.SIGSTOP)
        try:
            await asyncio.to_thread(group.await_in_sync, 2)
            await sends(load, SENDS_BETWEEN)
            await asyncio.sleep(STOPPED_S)
        finally:
            os.kill(broker, signal.SIGCONT)
        await all_in_sync(group)
        assert await epoch_of(group) == 1
        await sends(load, SENDS_BETWEEN)

    play(tmp_path, faults)
