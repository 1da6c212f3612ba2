"""A home that returns with an older store: the process that is followed, and reused ids."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random

import pytest
from structlog.testing import capture_logs

from tests.component.broker.test_members import ADDRESSES, Cluster
from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.disk.offline_world import finish
from tests.support.worlds.proxy_world import eventually
from tests.support.worlds.round_world import RoundWorld, idle
from tidemill.broker.engine.engine import Engine
from tidemill.broker.offline.copy import copy
from tidemill.broker.server.members import member_connection
from tidemill.broker.server.members.cluster_members import ClusterMembers
from tidemill.broker.server.members.home_service import BrokerHomeService
from tidemill.broker.server.round.turn import Turn


class RestoredHome:
    """The home of a cluster with a store from before a topic was created."""

    def __init__(self, cluster: Cluster, *, life: str = "second") -> None:
        self.home = RoundWorld(broker_name="broker-0")
        self.home.world.now_ms += 60_000
        self.home.world.engine.broker_groups.found(ADDRESSES, self.home.world.now_ms)
        self.home.world.commit()
        self.home.world.engine.take_config_changes()
        self.members = ClusterMembers(self.home.rounds, cluster.channel.connect, life=life)

    @property
    def reason(self) -> str:
        return self.members.connections["broker-1"].reason

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self.home.running(), self.members.running():
            yield


async def put(world: RoundWorld, topic: str) -> int:
    def do(engine: Engine, turn: Turn) -> int:
        put_topic = engine.administration.put_topic
        return put_topic(topic, type_=None, queues=1, now_ms=turn.now_ms).id

    return await world.rounds.call(do)


def run(scenario: Callable[[Cluster], Awaitable[None]]) -> None:
    async def main() -> None:
        cluster = Cluster()
        async with asyncio.timeout(20), cluster.follower.running(), cluster.home.running():
            await scenario(cluster)

    asyncio.run(main())


def restores(members: ClusterMembers) -> float:
    [family] = [one for one in members.collect() if one.name.endswith("restores")]
    return family.samples[0].value


def test_a_reused_id_is_a_different_topic() -> None:
    async def scenario(cluster: Cluster) -> None:
        catalog = cluster.follower.world.engine.catalog
        async with cluster.members.running():
            await eventually(lambda: cluster.is_connected)
            before = await put(cluster.home, "invoices")
            await eventually(lambda: cluster.knows("invoices"))
            invoices_id = catalog.topic_ids["invoices"]
        restored = RestoredHome(cluster)
        async with restored.running():
            assert await put(restored.home, "payments") == before
            await eventually(lambda: cluster.knows("payments"))
            assert not cluster.knows("invoices")
            assert catalog.topic_ids["payments"] != invoices_id
            followers = ClusterMembers(cluster.follower.rounds, cluster.channel.connect, life="")
            assert restores(followers) == 1

    run(scenario)


def test_a_topic_with_equal_name_and_id_is_different_if_it_was_created_again() -> None:
    async def scenario(cluster: Cluster) -> None:
        catalog = cluster.follower.world.engine.catalog
        async with cluster.members.running():
            await eventually(lambda: cluster.is_connected)
            await put(cluster.home, "invoices")
            await eventually(lambda: cluster.knows("invoices"))
            before = catalog.topic_ids["invoices"]
        restored = RestoredHome(cluster)
        async with restored.home.running():
            restored.home.clock.advance(60_000)
            await put(restored.home, "invoices")
            async with restored.members.running():
                await eventually(lambda: catalog.topic_ids.get("invoices", before) != before)

    run(scenario)


def test_a_copy_beside_the_home_is_not_followed() -> None:
    async def scenario(cluster: Cluster) -> None:
        async with cluster.members.running():
            await eventually(lambda: cluster.is_connected)
            copy = RestoredHome(cluster)
            async with copy.running():
                await eventually(lambda: "another process of broker-0 is connected" in copy.reason)
                await put(cluster.home, "invoices")
                await eventually(lambda: cluster.knows("invoices"))

    run(scenario)


def test_a_copy_with_a_higher_epoch_is_not_followed() -> None:
    async def scenario(cluster: Cluster) -> None:
        async with cluster.members.running():
            await eventually(lambda: cluster.is_connected)
            backup = FaultyDisk(Random(5))
            finish(copy(cluster.home.world.disk, backup))
            await put(cluster.home, "invoices")
            await eventually(lambda: cluster.knows("invoices"))
            trial = RoundWorld(broker_name="broker-0", disk=backup)
            assert trial.world.engine.log.epoch > cluster.home.world.engine.log.epoch
            members = ClusterMembers(trial.rounds, cluster.channel.connect, life="copy")
            async with trial.running(), members.running():
                follower = members.connections["broker-1"]
                await eventually(
                    lambda: "another process of broker-0 is connected" in follower.reason
                )
                assert cluster.knows("invoices")

    run(scenario)


def elected(world: RoundWorld, cluster: Cluster, life: str) -> ClusterMembers:
    """Return the members of a home with replicas. No controller answers in these tests."""
    connect = cluster.channel.connect
    return ClusterMembers(world.rounds, connect, life=life, controllers=["controller-0:1"])


def test_the_next_master_of_the_home_is_followed_while_the_former_one_hangs() -> None:
    async def scenario(cluster: Cluster) -> None:
        async with elected(cluster.home, cluster, "former").running():
            await eventually(lambda: len(cluster.home.world.engine.broker_groups.connected) > 0)
            disk = FaultyDisk(Random(5))
            finish(copy(cluster.home.world.disk, disk))
            following = RoundWorld(broker_name="broker-0", disk=disk)
            assert following.world.engine.log.epoch > cluster.home.world.engine.log.epoch
            async with following.running(), elected(following, cluster, "next").running():
                await put(following, "invoices")
                await eventually(lambda: cluster.knows("invoices"))
                # The former master awakes.
                await put(cluster.home, "payments")
                await put(following, "refunds")
                await eventually(lambda: cluster.knows("refunds"))
                assert not cluster.knows("payments")

    run(scenario)


def test_a_former_master_does_not_pass_for_a_restored_home(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(cluster: Cluster) -> None:
        disk = FaultyDisk(Random(5))
        async with elected(cluster.home, cluster, "former").running():
            await eventually(lambda: len(cluster.home.world.engine.broker_groups.connected) > 0)
            finish(copy(cluster.home.world.disk, disk))
        following = RoundWorld(broker_name="broker-0", disk=disk)
        async with following.running(), elected(following, cluster, "next").running():
            await put(following, "invoices")
            await eventually(lambda: cluster.knows("invoices"))
        # No replica confirms what the former master records, as if its sync never ended. The member
        # has been restarted, so it does not remember the processes that were replaced.
        cluster.channel.service = BrokerHomeService(cluster.follower.rounds)
        cluster.home.syncs.gate.clear()
        log = cluster.home.world.engine.log
        before = log.log_end
        members = elected(cluster.home, cluster, "former")
        try:
            async with members.running():
                former = members.connections["broker-1"]
                await eventually(lambda: former._instead_of is not None)
                await eventually(lambda: log.log_end > before)
                await idle()
                assert cluster.knows("invoices")
                assert not any(
                    one.HasField("instead_of") for one in cluster.channel.streams[-1].written
                )
        finally:
            cluster.home.syncs.gate.set()

    monkeypatch.setattr(member_connection, "REFUSED_S", 0.0)
    monkeypatch.setattr(member_connection, "RECONNECT_MAX_S", 0.0)
    run(scenario)


def test_a_restored_home_with_a_higher_epoch_is_logged_and_counted() -> None:
    async def scenario(cluster: Cluster) -> None:
        backup = FaultyDisk(Random(5))
        async with cluster.members.running():
            await eventually(lambda: cluster.is_connected)
            finish(copy(cluster.home.world.disk, backup))
            await put(cluster.home, "invoices")
            await eventually(lambda: cluster.knows("invoices"))
        restored = RoundWorld(broker_name="broker-0", disk=backup)
        members = ClusterMembers(restored.rounds, cluster.channel.connect, life="restored")
        with capture_logs() as logs:
            async with restored.running(), members.running():
                await eventually(lambda: not cluster.knows("invoices"))
        followers = ClusterMembers(cluster.follower.rounds, cluster.channel.connect, life="")
        assert restores(followers) == 1
        [line] = [one for one in logs if one["event"].startswith("home was restored")]
        assert (line["log_level"], line["topics"]) == ("error", ["invoices"])

    run(scenario)


def test_a_restart_after_a_deletion_is_not_a_restored_home() -> None:
    async def scenario(cluster: Cluster) -> None:
        async with cluster.members.running():
            await eventually(lambda: cluster.is_connected)
            await put(cluster.home, "invoices")
            await put(cluster.home, "payments")
            await eventually(lambda: cluster.knows("payments"))
        await cluster.home.rounds.call(
            lambda engine, turn: engine.administration.delete_topic("invoices", turn.now_ms)
        )
        again = RoundWorld(broker_name="broker-0", disk=cluster.home.world.disk.after_kill())
        members = ClusterMembers(again.rounds, cluster.channel.connect, life="again")
        async with again.running(), members.running():
            await eventually(lambda: not cluster.knows("invoices"))
        followers = ClusterMembers(cluster.follower.rounds, cluster.channel.connect, life="")
        assert restores(followers) == 0

    run(scenario)


def test_a_replaced_home_stays_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(cluster: Cluster) -> None:
        async with cluster.members.running():
            await eventually(lambda: cluster.is_connected)
        async with RestoredHome(cluster).running():
            catalog = cluster.follower.world.engine.catalog

            def is_followed() -> bool:
                home = catalog.membership.home
                return home is not None and home.life == "second"

            await eventually(is_followed)
            back = ClusterMembers(cluster.home.rounds, cluster.channel.connect, life="first")
            async with back.running():
                follower = back.connections["broker-1"]
                await eventually(lambda: "has replaced this one" in follower.reason)

    monkeypatch.setattr(member_connection, "REFUSED_S", 0.0)
    run(scenario)


def test_a_restarted_follower_remembers_the_home_that_it_followed() -> None:
    async def scenario(cluster: Cluster) -> None:
        async with cluster.members.running():
            await eventually(lambda: cluster.is_connected)
        cluster.follower.world.commit()
        cluster.follower.world.restart()
        home = cluster.follower.world.engine.catalog.membership.home
        assert home is not None
        assert (home.epoch, home.life) == (1, "first")

    run(scenario)
