"""Whom a proxy with several broker groups asks, and where it places messages."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from tests.support.worlds.linked_cluster import SECRETS, LinkedCluster
from tidemill.common.errors import BrokerUnreachable, GroupDraining, InvalidReceiptHandle
from tidemill.message.receipt_handle import HandleSigner
from tidemill.proxy.cluster.cluster import SendTarget
from tidemill.proxy.cluster.linked_group import LinkedGroup
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

SEEDS = ["h0:1", "h1:1", "h2:1"]
GROUPS = [f"message group {n}" for n in range(200)]


def run(scenario: Callable[[LinkedCluster], Awaitable[None]], *seeds: str) -> None:
    async def main() -> None:
        await scenario(LinkedCluster(seeds or SEEDS))

    asyncio.run(main())


def places(world: LinkedCluster, count: int = 60) -> list[SendTarget]:
    return [world.cluster.choose_target(world.topic, "") for _ in range(count)]


def group_places(world: LinkedCluster) -> dict[str, tuple[str, int] | str]:
    """Where each message group goes; or why it goes nowhere."""
    found: dict[str, tuple[str, int] | str] = {}
    for group in GROUPS:
        try:
            place = world.cluster.choose_target(world.topic, group)
            found[group] = place.broker.name, place.queue_id
        except (GroupDraining, BrokerUnreachable) as error:
            found[group] = type(error).__name__
    return found


def test_messages_go_round_all_queues_of_all_broker_groups() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.tell_all()
        found = Counter((place.broker.name, place.queue_id) for place in places(world))
        assert set(found.values()) == {10}
        assert len(found) == 6

    run(scenario)


def test_each_broker_is_asked_with_its_own_ids() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.tell_all()
        ids = {place.broker.name: place.topic_id for place in places(world)}
        assert ids == {"broker-0": 7, "broker-1": 107, "broker-2": 207}
        group = world.cluster.find_group("group")
        assert [broker.find_ids(group, world.topic) for broker in world.cluster.brokers] == [
            (8, 7),
            (108, 107),
            (208, 207),
        ]

    run(scenario)


def test_who_is_down_gets_nothing_while_another_is_up() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.tell_all()
        world.lose(1)
        assert {place.broker.name for place in places(world)} == {"broker-0", "broker-2"}
        assert all(place.may_move for place in places(world))
        world.lose(0)
        assert {place.broker.name for place in places(world)} == {"broker-2"}
        assert not any(place.may_move for place in places(world))

    run(scenario)


def test_where_all_are_down_a_message_waits_for_one() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.tell_all()
        for n in range(3):
            world.lose(n)
        assert not any(place.may_move for place in places(world))
        assert len({place.broker.name for place in places(world)}) == 3

    run(scenario)


def test_a_message_is_not_sent_twice_to_one_group() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.tell_all()
        first = world.cluster.choose_target(world.topic, "")
        second = world.cluster.choose_target(world.topic, "", tried=[first.broker])
        third = world.cluster.choose_target(world.topic, "", tried=[first.broker, second.broker])
        assert len({first.broker, second.broker, third.broker}) == 3
        assert [p.may_move for p in (first, second, third)] == [True, True, False]
        with pytest.raises(BrokerUnreachable):
            world.cluster.choose_target(
                world.topic, "", tried=[p.broker for p in (first, second, third)]
            )

    run(scenario)


def test_nothing_new_goes_to_who_drains() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.tell_all()
        world.draining.add("broker-1")
        world.tell(0)
        assert {place.broker.name for place in places(world)} == {"broker-0", "broker-2"}
        readable = world.cluster.route_queues(world.topic)
        assert [(r.broker_name, r.is_writable) for r in readable] == [
            ("broker-0", True),
            ("broker-1", False),
            ("broker-2", True),
        ]

    run(scenario)


def test_message_groups_never_move() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.tell_all()
        before = group_places(world)
        assert {place[0] for place in before.values()} == {"broker-0", "broker-1", "broker-2"}
        assert len(set(before.values())) == 6
        world.lose(1)
        assert group_places(world) == before
        world.draining.add("broker-2")
        world.tell(0)
        after = group_places(world)
        for group, place in before.items():
            assert after[group] == ("GroupDraining" if place[0] == "broker-2" else place)
        world.members.append(("broker-3", "h3:1"))
        world.draining.clear()
        world.tell_all()
        assert group_places(world) == before

    run(scenario)


def test_the_places_of_who_was_removed_are_others_and_no_other_moves() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.tell_all()
        before = group_places(world)
        world.members.pop()
        world.placements = [("broker-0", 2), ("broker-1", 2), ("broker-0", 1), ("broker-1", 1)]
        world.tell_all()
        after = group_places(world)
        for group, place in before.items():
            if place[0] == "broker-2":
                assert after[group] in {("broker-0", 0), ("broker-1", 0)}
            else:
                assert after[group] == place
        assert "h2:1" not in [broker.link.address for broker in world.cluster.brokers]

    run(scenario)


def test_a_message_group_has_no_place_where_home_and_broker_do_not_agree() -> None:
    """Who has lost the home may have heard of nothing, and a broker have left and come back."""

    async def scenario(world: LinkedCluster) -> None:
        world.tell_all()
        before = group_places(world)
        world.lose(0)
        world.placements = [("broker-1", 2), ("broker-0", 2), ("broker-2", 2)]
        world.tell(1)
        for group, place in group_places(world).items():
            is_at_1 = before[group][0] == "broker-1"
            assert place == ("BrokerUnreachable" if is_at_1 else before[group])
        world.tell_all()
        assert {place[0] for place in group_places(world).values()} == {
            "broker-0",
            "broker-1",
            "broker-2",
        }

    run(scenario)


def test_a_topic_of_before_has_its_message_groups_at_the_home() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.placements = []
        world.tell_all()
        assert {place[0] for place in group_places(world).values()} == {"broker-0"}

    run(scenario)


def test_who_has_another_incarnation_is_not_asked() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.tell_all()
        world.tell(0, home_id=9)
        assert world.cluster.brokers_of(world.topic) == [world.cluster.home]
        assert {place.broker.name for place in places(world)} == {"broker-0"}
        world.tell(1, home_id=9)
        assert [b.name for b in world.cluster.brokers_of(world.topic)] == ["broker-0", "broker-1"]

    run(scenario)


def test_a_message_group_waits_for_its_broker_to_hear_of_the_topic() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.tell(0)
        for n in (1, 2):
            world.tell(n, has_topic=False)
        ids = {p.broker.name: p.topic_id for p in map(placed(world), GROUPS)}
        assert ids == {"broker-0": 7, "broker-1": 0, "broker-2": 0}

    def placed(world: LinkedCluster) -> Callable[[str], SendTarget]:
        return lambda group: world.cluster.choose_target(world.topic, group)

    run(scenario)


def test_a_broker_of_no_or_another_cluster_is_not_asked() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.tell(0)
        world.tell(1)
        world.tell_config("h2:1", pb.ConfigUpdate(is_complete=True, broker_name="broker-2"))
        assert [broker.name for broker in world.cluster.brokers] == ["broker-0", "broker-1"]

    run(scenario)


def test_one_member_leads_to_all_others() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.tell(1, at="h1:1")
        assert set(world.links) == {"h1:1", "h0:1"}
        configured = asyncio.create_task(world.cluster.configured())
        await asyncio.sleep(0)
        assert not configured.done()
        world.tell(0)
        assert set(world.links) == {"h0:1", "h1:1", "h2:1"}
        await configured
        assert world.cluster.home.name == "broker-0"

    run(scenario, "h1:1")


def test_a_seed_that_is_no_member_is_not_used() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.tell_all()
        world.tell_config("x:1", pb.ConfigUpdate(is_complete=True, broker_name="x"))
        assert [b.name for b in world.cluster.brokers] == ["broker-0", "broker-1", "broker-2"]
        assert "x:1" not in [peer.address for peer in world.cluster.peers()]

    run(scenario, "h0:1", "x:1")


def test_a_member_that_has_moved_is_used_where_it_is() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.tell(0)
        world.tell(2)
        world.tell(1, at="h1:9")
        assert world.cluster.brokers[1].link.address == "h1:9"

    run(scenario, "h0:1", "h1:9")


def test_a_member_whose_address_another_has_taken_is_nobody() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.tell(0)
        world.tell(2, at="h1:1")  # broker-2 answers where broker-1 was
        assert [b.name for b in world.cluster.brokers] == ["broker-0", "broker-2"]
        assert "BrokerUnreachable" in group_places(world).values()

    run(scenario)


def test_a_handle_leads_to_the_broker_that_has_issued_it() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.tell_all()
        deliveries = world.cluster.deliveries("group", "topic")
        for name in ("broker-0", "broker-1", "broker-2"):
            signer = HandleSigner(SECRETS[name], name)
            signed = signer.sign("group", "topic", slot=1, delivery_id=2, visible_at_ms=3)
            broker, fields = deliveries.open(signed.handle(0).decode())
            assert (broker.name, fields.delivery_id) == (name, 2)
        signer = HandleSigner(SECRETS["broker-3"], "broker-3")
        foreign = signer.sign("group", "topic", slot=1, delivery_id=2, visible_at_ms=3)
        with pytest.raises(InvalidReceiptHandle):
            deliveries.open(foreign.handle(0).decode())

    run(scenario)


def test_a_home_that_has_lost_its_store_is_not_believed() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.tell_all()
        world.tell_config("h0:1", pb.ConfigUpdate(is_complete=True, broker_name="broker-0"))
        with pytest.raises(BrokerUnreachable, match="start it with its former data"):
            world.cluster.find_topic("topic")
        with pytest.raises(BrokerUnreachable, match="start it with its former data"):
            world.cluster.find_group("group")
        world.tell(0)
        assert world.cluster.find_topic("topic").id == 7

    run(scenario)


def test_a_handle_that_is_refused_says_nothing_of_those_behind_it() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.tell_all()
        first, second, *_ = world.cluster.brokers

        def handle(broker: LinkedGroup, group: str, delivery_id: int = 1) -> str:
            signed = broker.signer.sign(
                group, "topic", slot=1, delivery_id=delivery_id, visible_at_ms=5
            )
            return signed.handle(0).decode()

        nobodys = HandleSigner(b"x" * 32, "elsewhere").sign(
            "group", "topic", slot=1, delivery_id=1, visible_at_ms=5
        )
        deliveries = world.cluster.deliveries("group", "topic")
        for bad in (handle(second, "another"), nobodys.handle(0).decode(), "", "x" * 1_000):
            for broker in (first, second):
                for delivery_id in (1, 2):
                    with pytest.raises(InvalidReceiptHandle):
                        deliveries.open(bad)
                    found, delivery = deliveries.open(handle(broker, "group", delivery_id))
                    assert (found, delivery.delivery_id) == (broker, delivery_id)

    run(scenario)
