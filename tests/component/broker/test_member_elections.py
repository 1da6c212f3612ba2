"""Elections of a member's broker group: the connection of the home moves, stays, or is opened."""

from __future__ import annotations

import asyncio

import pytest

from tests.component.broker.test_members import Cluster, run
from tests.support.worlds.proxy_world import eventually
from tidemill.broker.server.members import member_connection

WITHIN_S = 5.0  # much shorter than the pause that an election ends


async def connect_to(cluster: Cluster, replica: int, *, version: int) -> None:
    cluster.elect(master=replica, version=version)
    await eventually(lambda: cluster.member.dialled == f"replica-{replica}:1")
    await eventually(lambda: cluster.is_connected)


def test_a_connected_master_that_is_elected_again_is_kept_and_costs_one_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(cluster: Cluster) -> None:
        await connect_to(cluster, 2, version=1)
        dialled, asked = len(cluster.channel.dialled), 0
        masters = cluster.members._routes.masters
        known = masters.master_of

        def master_of(address: str) -> str:
            nonlocal asked
            asked += 1
            return known(address)

        monkeypatch.setattr(masters, "master_of", master_of)
        cluster.elect(master=2, version=2)
        for _ in range(100):
            await asyncio.sleep(0)
        assert asked == 1, "the loop waits for the next election"
        assert cluster.is_connected
        assert len(cluster.channel.dialled) == dialled

    run(scenario)


def test_a_move_after_a_second_election_of_the_master_is_noticed() -> None:
    async def scenario(cluster: Cluster) -> None:
        await connect_to(cluster, 2, version=1)
        for version in (2, 3):
            cluster.elect(master=2, version=version)
            for _ in range(10):
                await asyncio.sleep(0)
        async with asyncio.timeout(WITHIN_S):
            await connect_to(cluster, 0, version=4)

    run(scenario)


def test_an_election_ends_the_pause_before_the_next_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(member_connection, "RECONNECT_MAX_S", 60.0)

    async def scenario(cluster: Cluster) -> None:
        await connect_to(cluster, 2, version=1)
        cluster.channel.is_up = False
        cluster.channel.lose()
        await eventually(lambda: not cluster.is_connected)
        cluster.channel.is_up = True
        for _ in range(10):
            await asyncio.sleep(0)
        async with asyncio.timeout(WITHIN_S):
            await connect_to(cluster, 2, version=2)

    run(scenario)


def test_lost_connections_leave_no_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_connection, "RECONNECT_MAX_S", 0.01)

    async def scenario(cluster: Cluster) -> None:
        await connect_to(cluster, 2, version=1)
        for _ in range(3):
            cluster.channel.lose()
            await eventually(lambda: not cluster.is_connected)
            await eventually(lambda: cluster.is_connected)
        names = [task.get_name() for task in asyncio.all_tasks()]
        assert names.count("election of broker-1") == 1
        assert names.count("serve broker-1") == 1

    run(scenario)


def test_a_member_is_not_connected_while_its_next_master_is_dialled() -> None:
    async def scenario(cluster: Cluster) -> None:
        await connect_to(cluster, 2, version=1)
        states: list[bool] = []

        class Dials(list[str]):
            def append(self, address: str) -> None:
                states.append(cluster.is_connected)
                super().append(address)

        cluster.channel.dialled = Dials()
        await connect_to(cluster, 0, version=2)
        assert states == [False]

    run(scenario)
