"""Security items on their way from the home to a member of the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from tests.component.broker.test_members import Cluster, Stream
from tests.component.broker.test_restored_home import RestoredHome
from tests.support.security_items import MODE_ON, change, delete, put, table_of
from tests.support.worlds.engine_world import TOPIC
from tests.support.worlds.proxy_world import eventually
from tests.support.worlds.round_world import RoundWorld
from tidemill.broker.engine.configuration import security as security_module
from tidemill.broker.engine.layout.config import encode_item
from tidemill.broker.server.members import member_connection
from tidemill.broker.server.members.home_service import BrokerHomeService
from tidemill.broker.server.wire import security_frames
from tidemill.security.quotas import QuotaKind, QuotaLimit, TrafficQuota
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

Scenario = Callable[[Cluster], Awaitable[None]]


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security_frames, "PAGE_BYTES", 300)
    monkeypatch.setattr(security_module, "ITEMS_A_ROUND", 2)
    monkeypatch.setattr(member_connection, "REPORT_PERIOD_S", 0.01)


async def change_in_round(broker: RoundWorld, *items: dict[str, Any]) -> None:
    """Change the items of a broker that runs."""
    await broker.rounds.call_slices(
        lambda engine, turn: engine.security.change(
            items, expected_version=engine.catalog.security.version, now_ms=turn.now_ms
        )
    )


def are_equal(one: RoundWorld, other: RoundWorld) -> bool:
    return table_of(one.world.engine) == table_of(other.world.engine)


def change_home(home: RoundWorld, *items: dict[str, Any]) -> None:
    """Change the items of a home that does not run yet."""
    home.world.engine.broker_groups.feature_levels["broker-1"] = 3
    change(home.world, *items)
    home.world.engine.take_config_changes()


def run(scenario: Scenario, *items: dict[str, Any], level: int = 3) -> None:
    """Run a scenario whose home has items before its member, with a log of `level`, connects."""

    async def main() -> None:
        cluster = Cluster(level=level)
        change_home(cluster.home, *items)
        async with (
            asyncio.timeout(20),
            cluster.follower.running(),
            cluster.home.running(),
            cluster.members.running(),
        ):
            await scenario(cluster)

    asyncio.run(main())


USERS = [put(f"user {n}", "x" * 50) for n in range(20)]


def updates_of(cluster: Cluster) -> list[pb.ConfigUpdate]:
    """Return the updates on the last stream."""
    written = cluster.channel.streams[-1].written
    return [config for frame in written for config in frame.configs]


def test_a_member_gets_the_table_in_pages_and_then_each_change() -> None:
    async def scenario(cluster: Cluster) -> None:
        await eventually(lambda: cluster.is_connected)
        assert are_equal(cluster.home, cluster.follower)
        first, *pages = updates_of(cluster)
        assert first.security_follows
        assert not first.security_items
        assert len(pages) > 5
        assert [page.is_security_complete for page in pages] == [False] * (len(pages) - 1) + [True]
        assert all(sum(map(len, page.security_items)) <= 300 for page in pages)
        await change_in_round(cluster.home, put("user 0", "new"), delete("user 1"), put("more"))
        await eventually(lambda: are_equal(cluster.home, cluster.follower))
        [update] = updates_of(cluster)[1 + len(pages) :]
        assert (len(update.security_items), update.security_version) == (3, 24)

    run(scenario, *USERS, MODE_ON)


def test_a_home_without_items_sends_no_pages() -> None:
    async def scenario(cluster: Cluster) -> None:
        await eventually(lambda: cluster.is_connected)
        [update] = updates_of(cluster)
        assert update.is_security_complete
        assert not update.security_follows
        await change_in_round(cluster.home, put("a"))
        await change_in_round(cluster.home, delete("a"))
        await eventually(lambda: table_of(cluster.follower.world.engine) == (2, {}))
        cluster.channel.lose()
        await eventually(lambda: not cluster.is_connected)
        await eventually(lambda: cluster.is_connected)
        assert updates_of(cluster)[0].security_version == 2

    run(scenario)


def test_changes_while_pages_are_sent_are_not_lost() -> None:
    async def scenario(cluster: Cluster) -> None:
        await eventually(lambda: len(cluster.channel.streams[-1:]) == 1)
        await eventually(lambda: len(updates_of(cluster)) >= 3)
        assert not cluster.is_connected, "not all pages are sent"
        await change_in_round(cluster.home, put("user 0", "new"), delete("user 19"))
        await change_in_round(cluster.home, put("user 18", "new"), delete("user 0"), put("more"))
        await eventually(lambda: cluster.is_connected)
        await eventually(lambda: are_equal(cluster.home, cluster.follower))

    run(scenario, *USERS)


def test_a_reconnected_member_deletes_what_the_home_has_deleted() -> None:
    async def scenario(cluster: Cluster) -> None:
        await eventually(lambda: cluster.is_connected)
        cluster.channel.is_up = False
        cluster.channel.lose()
        await eventually(lambda: not cluster.is_connected)
        await change_in_round(cluster.home, *(delete(f"user {n}") for n in range(10)), put("more"))
        cluster.channel.is_up = True
        await eventually(lambda: cluster.is_connected)
        assert are_equal(cluster.home, cluster.follower)
        cluster.follower.world.restart()
        assert are_equal(cluster.home, cluster.follower)

    run(scenario, *USERS, MODE_ON)


def test_a_member_follows_a_restored_home_with_a_lower_version() -> None:
    async def main() -> None:
        cluster = Cluster()
        change_home(cluster.home, *USERS, MODE_ON)
        async with asyncio.timeout(20), cluster.follower.running(), cluster.home.running():
            async with cluster.members.running():
                await eventually(lambda: cluster.is_connected)
                assert are_equal(cluster.home, cluster.follower)
            restored = RestoredHome(cluster)
            change_home(restored.home, put("user 3", "older"), put("only here"))
            async with restored.running():
                await eventually(lambda: are_equal(restored.home, cluster.follower))
        assert table_of(cluster.follower.world.engine)[0] == 2

    asyncio.run(main())


def test_a_member_gets_the_table_when_its_feature_level_rises() -> None:
    async def scenario(cluster: Cluster) -> None:
        follower = cluster.follower.world.engine
        await eventually(lambda: cluster.is_connected)
        assert table_of(follower) == (0, {})
        assert len(updates_of(cluster)) == 1, "the home sends no pages below level 3"
        await cluster.follower.rounds.call(
            lambda engine, _turn: setattr(engine, "allowed_level", 3)
        )
        await eventually(lambda: are_equal(cluster.home, cluster.follower))

    run(scenario, *USERS, level=2)


def test_a_member_with_too_many_bytes_in_wait_gets_the_whole_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(member_connection, "UPDATES_BYTES_MAX", 400)

    async def scenario(cluster: Cluster) -> None:
        await eventually(lambda: cluster.is_connected)
        cluster.follower.syncs.gate.clear()
        for n in range(10):
            await change_in_round(cluster.home, put(f"{n}", "x" * 100))
        cluster.follower.syncs.gate.set()
        await eventually(lambda: are_equal(cluster.home, cluster.follower))
        assert sum(update.is_complete for update in updates_of(cluster)) == 2

    run(scenario)


def test_a_page_of_an_older_stream_does_not_replace_a_newer_table() -> None:
    async def scenario(cluster: Cluster) -> None:
        await eventually(lambda: cluster.is_connected)
        before = table_of(cluster.follower.world.engine)
        answers: list[pb.FollowReply] = []
        late = Stream(
            cluster.channel.service,
            lambda message: answers.append(pb.FollowReply.FromString(message)),
        )
        for frame in cluster.channel.streams[0].written[:2]:
            late.write(frame.SerializeToString())
        await eventually(lambda: len(answers) == 2)
        assert {answer.error for answer in answers} == {"Conflict"}
        assert table_of(cluster.follower.world.engine) == before
        late.cancel()

    run(scenario, *USERS)


def test_a_member_of_a_restored_home_without_items_forgets_its_own() -> None:
    async def main() -> None:
        cluster = Cluster()
        change_home(cluster.home, *USERS, MODE_ON)
        async with asyncio.timeout(20), cluster.follower.running(), cluster.home.running():
            async with cluster.members.running():
                await eventually(lambda: cluster.is_connected)
            restored = RestoredHome(cluster)
            async with restored.running():
                follower = cluster.follower.world.engine
                await eventually(lambda: table_of(follower) == (0, {}))

    asyncio.run(main())


def frame_of(sequence: int, *configs: pb.ConfigUpdate) -> bytes:
    """Return a frame of a home."""
    frame = pb.FollowFrame(
        membership=pb.Membership(cluster_id="c", home_name="home", home_address="h:1"),
        member=pb.ClusterMember(name="broker-1", state=pb.MEMBER_STATE_ACTIVE),
        configs=configs,
        life="life",
        epoch=1,
        sequence=sequence,
    )
    return frame.SerializeToString()


def pages_of(items: list[dict[str, Any]]) -> list[pb.ConfigUpdate]:
    """Return the complete configuration of a home with items, and its pages."""
    home = RoundWorld()
    change(home.world, *items)
    pages = security_frames.SecurityPages(home.world.engine.catalog.security)
    updates = [pb.ConfigUpdate(is_complete=True)]
    pages.announce(updates[0])
    while not updates[-1].is_security_complete:
        updates.append(pages.next_page())
    return updates


async def with_follower(
    scenario: Callable[[RoundWorld, Callable[[], Stream], list[pb.FollowReply]], Awaitable[None]],
) -> None:
    """Run a scenario with a follower, a function that opens streams to it, and its replies."""
    follower = Cluster().follower
    service = BrokerHomeService(follower.rounds)
    replies: list[pb.FollowReply] = []

    def note(message: bytes) -> None:
        replies.append(pb.FollowReply.FromString(message))

    async with asyncio.timeout(20), follower.running():
        await scenario(follower, lambda: Stream(service, note), replies)


def test_a_newer_frame_ends_the_replacement_of_a_table() -> None:
    """The home has lost a stream while the follower replaces its table, in several rounds."""

    async def scenario(
        follower: RoundWorld, open_stream: Callable[[], Stream], replies: list[pb.FollowReply]
    ) -> None:
        first, second = open_stream(), open_stream()
        configs = pages_of(USERS)
        for sequence, config in enumerate(configs, 1):
            first.write(frame_of(sequence, config))
        security = follower.world.engine.catalog.security
        await eventually(lambda: security.version > 3)
        second.write(frame_of(1_000))
        await eventually(lambda: len(replies) == len(configs) + 1)
        [error] = [reply for reply in replies if reply.error]
        assert error.message == "a newer frame of the home has arrived"
        assert security.version < len(USERS)
        for sequence, config in enumerate(configs, 1_001):
            second.write(frame_of(sequence, config))
        await eventually(lambda: security.version == len(USERS))
        first.cancel()
        second.cancel()

    asyncio.run(with_follower(scenario))


def test_a_page_may_delete_an_item_of_an_earlier_page() -> None:
    async def scenario(
        follower: RoundWorld, open_stream: Callable[[], Stream], replies: list[pb.FollowReply]
    ) -> None:
        *configs, last = pages_of(USERS)
        deletion = {"op": "deleteUser", "name": "user 0", "version": 21}
        last.security_items.append(encode_item(deletion))
        last.security_version = 21
        stream = open_stream()
        for sequence, config in enumerate([*configs, last], 1):
            stream.write(frame_of(sequence, config))
        await eventually(lambda: len(replies) == len(configs) + 1)
        version, items = table_of(follower.world.engine)
        assert version == 21
        assert len(items) == 19
        assert ("user", "user 0") not in items
        stream.cancel()

    asyncio.run(with_follower(scenario))


def test_an_unreadable_page_is_rejected() -> None:
    async def scenario(
        follower: RoundWorld, open_stream: Callable[[], Stream], replies: list[pb.FollowReply]
    ) -> None:
        configs = pages_of(USERS)
        configs[1].security_items.append(b"{}")
        stream = open_stream()
        stream.write(frame_of(1, configs[0]))
        stream.write(frame_of(2, configs[1]))
        await eventually(lambda: len(replies) == 2)
        assert [reply.error for reply in replies] == ["", "BadRequest"]
        assert table_of(follower.world.engine) == (0, {})
        stream.cancel()

    asyncio.run(with_follower(scenario))


def test_a_member_reports_the_stocks_of_quotas() -> None:
    async def scenario(cluster: Cluster) -> None:
        reported: list[tuple[str, list[pb.QuotaStock]]] = []

        def note(name: str, stocks: Sequence[pb.QuotaStock], _took_ms: int) -> None:
            reported.append((name, list(stocks)))

        cluster.members.on_stocks = note
        cluster.member._on_stocks = note
        limits = {QuotaLimit.STORED_BYTES: 1_000, QuotaLimit.PENDING_TIMERS: 5}
        quota = TrafficQuota(kind=QuotaKind.PREFIX, value=TOPIC, limits=limits)
        await change_in_round(cluster.home, quota.to_item())
        await eventually(lambda: cluster.is_connected and cluster.knows(TOPIC))
        world = cluster.follower.world
        world.send("a", size=100)
        world.background()
        size = world.engine.live_bytes.bytes_of_topic(world.topic())
        before = len(reported)
        await eventually(lambda: len(reported) > before)
        name, [stock] = reported[-1]
        assert (name, stock.quota, stock.stored_bytes) == ("broker-1", quota.name, size)
        assert (stock.pending_timers, stock.age_ms) == (0, 0)
        frames = cluster.channel.streams[0].written
        assert not frames[0].count_stocks
        assert sum(frame.count_stocks for frame in frames) >= len(reported)

    run(scenario)
