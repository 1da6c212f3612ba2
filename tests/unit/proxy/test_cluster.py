"""The choice of broker groups: for requests, and as targets of messages."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from tests.support.worlds.linked_cluster import SECRETS, LinkedCluster
from tidemill.common.errors import (
    BrokerUnreachable,
    GroupDraining,
    InvalidReceiptHandle,
    KeyOwnerChanged,
    VersionUnsupported,
)
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


def targets(world: LinkedCluster, count: int = 60) -> list[SendTarget]:
    return [world.cluster.choose_target(world.topic, "") for _ in range(count)]


def group_places(world: LinkedCluster) -> dict[str, tuple[str, int] | str]:
    """Return the target of each message group, or the error."""
    found: dict[str, tuple[str, int] | str] = {}
    for group in GROUPS:
        try:
            target = world.cluster.choose_target(world.topic, group)
            found[group] = target.broker.name, target.queue_id
        except (GroupDraining, BrokerUnreachable) as error:
            found[group] = type(error).__name__
    return found


def test_messages_rotate_over_all_queues_of_all_broker_groups() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.send_all_configs()
        found = Counter((target.broker.name, target.queue_id) for target in targets(world))
        assert set(found.values()) == {10}
        assert len(found) == 6

    run(scenario)


def test_each_broker_group_has_its_own_ids() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.send_all_configs()
        ids = {target.broker.name: target.topic_id for target in targets(world)}
        assert ids == {"broker-0": 7, "broker-1": 107, "broker-2": 207}
        group = world.cluster.find_group("group")
        assert [broker.find_ids(group, world.topic) for broker in world.cluster.brokers] == [
            (8, 7),
            (108, 107),
            (208, 207),
        ]

    run(scenario)


def test_a_down_broker_gets_no_message_while_another_is_up() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.send_all_configs()
        world.lose(1)
        assert {target.broker.name for target in targets(world)} == {"broker-0", "broker-2"}
        assert all(target.may_move for target in targets(world))
        world.lose(0)
        assert {target.broker.name for target in targets(world)} == {"broker-2"}
        assert not any(target.may_move for target in targets(world))

    run(scenario)


def test_a_message_waits_for_a_broker_if_all_are_down() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.send_all_configs()
        for n in range(3):
            world.lose(n)
        assert not any(target.may_move for target in targets(world))
        assert len({target.broker.name for target in targets(world)}) == 3

    run(scenario)


def test_a_tried_broker_group_is_not_chosen_again() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.send_all_configs()
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


def test_a_draining_broker_group_gets_no_new_message() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.send_all_configs()
        world.draining.add("broker-1")
        world.send_config(0)
        assert {target.broker.name for target in targets(world)} == {"broker-0", "broker-2"}
        readable = world.cluster.route_queues(world.topic)
        assert [(r.broker_name, r.is_writable) for r in readable] == [
            ("broker-0", True),
            ("broker-1", False),
            ("broker-2", True),
        ]

    run(scenario)


def test_message_groups_never_move() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.send_all_configs()
        before = group_places(world)
        assert {target[0] for target in before.values()} == {"broker-0", "broker-1", "broker-2"}
        assert len(set(before.values())) == 6
        world.lose(1)
        assert group_places(world) == before
        world.draining.add("broker-2")
        world.send_config(0)
        after = group_places(world)
        for group, target in before.items():
            assert after[group] == ("GroupDraining" if target[0] == "broker-2" else target)
        world.members.append(("broker-3", "h3:1"))
        world.draining.clear()
        world.send_all_configs()
        assert group_places(world) == before

    run(scenario)


def test_only_message_groups_of_a_removed_broker_group_move() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.send_all_configs()
        before = group_places(world)
        world.members.pop()
        world.placements = [("broker-0", 2), ("broker-1", 2), ("broker-0", 1), ("broker-1", 1)]
        world.send_all_configs()
        after = group_places(world)
        for group, target in before.items():
            if target[0] == "broker-2":
                assert after[group] in {("broker-0", 0), ("broker-1", 0)}
            else:
                assert after[group] == target
        assert "h2:1" not in [broker.link.address for broker in world.cluster.brokers]

    run(scenario)


def test_a_message_group_has_no_target_while_home_and_broker_disagree() -> None:
    """The configuration of the home may be old, and a broker group may have left and returned."""

    async def scenario(world: LinkedCluster) -> None:
        world.send_all_configs()
        before = group_places(world)
        world.lose(0)
        world.placements = [("broker-1", 2), ("broker-0", 2), ("broker-2", 2)]
        world.send_config(1)
        for group, target in group_places(world).items():
            is_at_1 = before[group][0] == "broker-1"
            assert target == ("BrokerUnreachable" if is_at_1 else before[group])
        world.send_all_configs()
        assert {target[0] for target in group_places(world).values()} == {
            "broker-0",
            "broker-1",
            "broker-2",
        }

    run(scenario)


def test_a_topic_without_placements_has_its_message_groups_at_the_home() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.placements = []
        world.send_all_configs()
        assert {target[0] for target in group_places(world).values()} == {"broker-0"}

    run(scenario)


def test_a_broker_with_another_incarnation_gets_no_request() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.send_all_configs()
        world.send_config(0, home_id=9)
        assert world.cluster.brokers_of(world.topic) == [world.cluster.home]
        assert {target.broker.name for target in targets(world)} == {"broker-0"}
        world.send_config(1, home_id=9)
        assert [b.name for b in world.cluster.brokers_of(world.topic)] == ["broker-0", "broker-1"]

    run(scenario)


def test_a_message_group_waits_until_its_broker_knows_the_topic() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.send_config(0)
        for n in (1, 2):
            world.send_config(n, has_topic=False)
        ids = {p.broker.name: p.topic_id for p in map(target_of(world), GROUPS)}
        assert ids == {"broker-0": 7, "broker-1": 0, "broker-2": 0}

    def target_of(world: LinkedCluster) -> Callable[[str], SendTarget]:
        return lambda group: world.cluster.choose_target(world.topic, group)

    run(scenario)


def test_a_broker_outside_the_cluster_gets_no_request() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.send_config(0)
        world.send_config(1)
        world.apply_config("h2:1", pb.ConfigUpdate(is_complete=True, broker_name="broker-2"))
        assert [broker.name for broker in world.cluster.brokers] == ["broker-0", "broker-1"]

    run(scenario)


def test_one_member_leads_to_all_others() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.send_config(1, at="h1:1")
        assert set(world.links) == {"h1:1", "h0:1"}
        configured = asyncio.create_task(world.cluster.configured())
        await asyncio.sleep(0)
        assert not configured.done()
        world.send_config(0)
        assert set(world.links) == {"h0:1", "h1:1", "h2:1"}
        await configured
        assert world.cluster.home.name == "broker-0"

    run(scenario, "h1:1")


def test_a_seed_that_is_not_a_member_is_not_used() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.send_all_configs()
        world.apply_config("x:1", pb.ConfigUpdate(is_complete=True, broker_name="x"))
        assert [b.name for b in world.cluster.brokers] == ["broker-0", "broker-1", "broker-2"]
        assert "x:1" not in [peer.address for peer in world.cluster.peers()]

    run(scenario, "h0:1", "x:1")


def test_operators_are_answered_through_the_masters() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.send_all_configs()
        world.cluster.brokers[1].link._stream._dialled = "h1:2"
        assert world.cluster.masters() == ["h0:1", "h1:2", "h2:1"]

    run(scenario, "h0:1")


def test_a_moved_member_is_used_at_its_new_address() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.send_config(0)
        world.send_config(2)
        world.send_config(1, at="h1:9")
        assert world.cluster.brokers[1].link.address == "h1:9"

    run(scenario, "h0:1", "h1:9")


def test_a_member_without_a_known_address_is_not_used() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.send_config(0)
        world.send_config(2, at="h1:1")  # broker-2 answers where broker-1 was
        assert [b.name for b in world.cluster.brokers] == ["broker-0", "broker-2"]
        assert "BrokerUnreachable" in group_places(world).values()

    run(scenario)


def test_a_handle_leads_to_its_issuer() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.send_all_configs()
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


def test_a_home_with_a_new_store_is_not_used() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.send_all_configs()
        world.apply_config("h0:1", pb.ConfigUpdate(is_complete=True, broker_name="broker-0"))
        with pytest.raises(BrokerUnreachable, match="start it with its former data"):
            world.cluster.find_topic("topic")
        with pytest.raises(BrokerUnreachable, match="start it with its former data"):
            world.cluster.find_group("group")
        world.send_config(0)
        assert world.cluster.find_topic("topic").id == 7

    run(scenario)


def test_an_invalid_handle_does_not_affect_later_handles() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.send_all_configs()
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


def test_the_only_owner_of_dedup_keys_may_be_another_broker_group_than_the_home() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.send_all_configs()

        def owner(*groups: str) -> str:
            topic = pb.TopicConfig(placement=pb.KeyPlacement(broker_groups=groups))
            topic.MergeFrom(world.topic)
            target = world.cluster.choose_target(world.topic, "")
            return world.cluster.key_owners.choose(topic, target, b"key", "").broker.name

        assert owner() == world.cluster.home.name == "broker-0"
        assert owner("broker-1") == "broker-1"

    run(scenario)


def test_the_old_owner_of_a_key_is_that_of_the_list_before() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.key_placement = pb.KeyPlacement(
            broker_groups=["broker-1"], version=2, before=["broker-2"]
        )
        world.send_all_configs()
        target = world.cluster.choose_target(world.topic, "")
        owners = world.cluster.key_owners
        owner = owners.choose(world.topic, target, b"key", "").broker
        old = owners.find_old(world.topic, owner, b"key")
        assert old is not None
        assert (owner.name, old.broker.name, old.topic_id) == ("broker-1", "broker-2", 207)
        assert owners.find_old(world.topic, old.broker, b"key") is None
        world.send_config(2, has_topic=False)
        with pytest.raises(BrokerUnreachable, match="has not received the topic"):
            owners.find_old(world.topic, owner, b"key")
        world.serves_key_lookups = False
        world.send_config(2)
        with pytest.raises(VersionUnsupported, match="older than this proxy"):
            owners.find_old(world.topic, owner, b"key")

    run(scenario)


def test_a_send_waits_for_another_list_of_any_broker_group() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.send_all_configs()
        owners, error = world.cluster.key_owners, KeyOwnerChanged("another list")
        known = owners.known_lists("topic")
        with pytest.raises(KeyOwnerChanged, match="another list"):
            await owners.wait_for_change("topic", known, error, 1)
        waiting = asyncio.create_task(owners.wait_for_change("topic", known, error, 60_000))
        await asyncio.sleep(0)
        world.send_config(1)
        await asyncio.sleep(0)
        assert not waiting.done(), "the same list"
        world.key_placement = pb.KeyPlacement(broker_groups=["broker-1"], version=2)
        world.send_config(2)
        await waiting
        assert owners.known_lists("topic") != known

    run(scenario)


def test_a_key_of_a_draining_owner_needs_a_spread() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.key_placement = pb.KeyPlacement(broker_groups=["broker-1"], version=1)
        world.draining.add("broker-1")
        world.send_all_configs()
        target = world.cluster.choose_target(world.topic, "")
        with pytest.raises(GroupDraining, match=r"is draining; run: tidemill topic spread topic$"):
            world.cluster.key_owners.choose(world.topic, target, b"key", "")
        # The home would reject another spread.
        world.key_placement.before.append("broker-2")
        world.send_all_configs()
        remedy = "broker-group add broker-1 ADDRESS; or wait until the open spread"
        with pytest.raises(GroupDraining, match=remedy):
            world.cluster.key_owners.choose(world.topic, target, b"key", "")

    run(scenario)
