"""Deduplication that is turned off, and on again, in a cluster: a spread to no owner (ADR 0091)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.worlds.dedup_world import DedupWorld
from tests.support.worlds.engine_world import TOPIC
from tests.support.worlds.spread_world import ADDRESSES, HOME, SpreadWorld
from tidemill.broker.engine.dedup.old_keys import LOOK_PERIOD_MS
from tidemill.broker.engine.metadata.dedup_policy import (
    NO_PLACEMENT,
    KeyPlacement,
    decode_placement,
    placement_item,
)
from tidemill.broker.engine.metadata.transaction_policy import PolicyChange
from tidemill.broker.server.wire import config_frames
from tidemill.common.errors import Conflict, KeyOwnerChanged
from tidemill.message.dedup_key import owner_of_key


def key_of(cluster: SpreadWorld, name: str) -> str:
    """Return a key that a broker group owns by the list of the home."""
    groups = cluster.topic().placement.groups
    return next(f"k{n}" for n in range(999) if owner_of_key(b"k%d" % n, groups) == name)


def turn_off(cluster: SpreadWorld) -> None:
    cluster.home.turn_off()
    cluster.note_snapshot()


def turn_on(cluster: SpreadWorld, **options: Any) -> None:
    cluster.report_levels()
    cluster.home.turn_on(**options)
    cluster.note_snapshot()


def report(cluster: SpreadWorld, *names: str) -> None:
    """Bring the topics of the home to broker groups, and their reports to the home."""
    for name in names:
        cluster.deliver(name)
    cluster.advance(LOOK_PERIOD_MS)
    for name in names:
        cluster.report(name)


def waited_for(cluster: SpreadWorld) -> tuple[str, ...]:
    assert cluster.topic().dedup is None
    return cluster.topic().placement.before


def test_a_member_that_missed_the_end_stores_new_messages_after_the_next_start() -> None:
    """D-4: the member got both changes in one frame, and answered from its old keys."""
    cluster = SpreadWorld()
    key = key_of(cluster, "broker-1")
    cluster.send(key, "first", cluster.topic().placement)
    turn_off(cluster)
    with pytest.raises(Conflict, match="may still know its keys: broker-1; turn it on when"):
        cluster.home.turn_on()
    assert waited_for(cluster) == ("broker-1",)
    report(cluster, "broker-1")
    assert waited_for(cluster) == ()
    turn_on(cluster)
    cluster.deliver("broker-1")
    cluster.send(key, "second", cluster.topic().placement)
    assert cluster.stored("broker-1") == 2
    assert cluster.worlds["broker-1"].repeat("third", key=key).message_id == "id-second"


def test_an_old_owner_that_missed_the_end_stores_no_key_of_the_next_owners() -> None:
    """D-5: the next list may have other owners, and the old owner still had its own list."""
    cluster = SpreadWorld()
    cluster.join("broker-2")
    old = cluster.topic().placement
    turn_off(cluster)
    with pytest.raises(Conflict):
        cluster.home.turn_on()
    report(cluster, "broker-1")
    turn_on(cluster)
    for name in ("broker-1", "broker-2"):
        cluster.deliver(name)
    new = cluster.topic().placement
    key = next(
        f"k{n}"
        for n in range(999)
        if owner_of_key(b"k%d" % n, old.groups) == "broker-1"
        and owner_of_key(b"k%d" % n, new.groups) == "broker-2"
    )
    cluster.send(key, "new", new)
    with pytest.raises(KeyOwnerChanged):
        cluster.send(key, "late", old)


def test_the_home_waits_for_the_owners_before_an_open_spread() -> None:
    cluster = SpreadWorld(owners=(HOME,), window_ms=1_000)
    cluster.join("broker-1")
    cluster.report_levels()
    cluster.spread()
    cluster.advance(LOOK_PERIOD_MS)
    report(cluster, "broker-1")
    cluster.join("broker-2")
    cluster.home.engine.broker_groups.drain("broker-1", cluster.home.now_ms)
    cluster.report_levels()
    assert "broker-1" not in cluster.spread().groups
    assert cluster.topic().placements == ((HOME, 1),)
    turn_off(cluster)
    assert waited_for(cluster) == ("broker-1", "broker-2")
    report(cluster, "broker-2")
    assert waited_for(cluster) == ("broker-1",)
    with pytest.raises(Conflict, match="keys: broker-1;"):
        cluster.home.turn_on()
    # Another report of the same broker group changes nothing.
    version = cluster.topic().version
    cluster.home.engine.key_spreads.note_ended(
        "broker-2", [(cluster.topic().id, cluster.topic().placement.version)], cluster.home.now_ms
    )
    assert cluster.topic().version == version
    report(cluster, "broker-1", "broker-2")
    turn_on(cluster)


def test_the_home_waits_for_the_broker_groups_of_message_groups() -> None:
    """Their keys do not depend on the owners of other keys."""
    cluster = SpreadWorld()
    cluster.home.engine.broker_groups.drain("broker-1", cluster.home.now_ms)
    cluster.spread()
    for _ in range(3):
        cluster.advance(120_000)
        cluster.report("broker-1")
    assert (cluster.topic().placement.groups, cluster.topic().placement.before) == ((HOME,), ())
    assert cluster.topic().placements == ((HOME, 1), ("broker-1", 1))
    turn_off(cluster)
    assert waited_for(cluster) == ("broker-1",)


@pytest.mark.parametrize("is_member", [True, False])
def test_the_end_survives_restarts(is_member: bool) -> None:
    cluster = SpreadWorld()
    cluster.send(key_of(cluster, "broker-1"), "first", cluster.topic().placement)
    turn_off(cluster)
    if is_member:
        cluster.deliver("broker-1")
        world = cluster.worlds["broker-1"]
    else:
        world = cluster.home
    world.checkpoint()
    world.restart(power_cut=True)
    assert waited_for(cluster) == ("broker-1",)
    report(cluster, "broker-1")
    assert waited_for(cluster) == ()


def test_a_member_reports_only_what_it_has_recorded() -> None:
    cluster = SpreadWorld()
    turn_off(cluster)
    cluster.advance(LOOK_PERIOD_MS)
    cluster.report("broker-1")
    assert waited_for(cluster) == ("broker-1",)


def test_other_changes_keep_the_broker_groups_that_the_home_waits_for() -> None:
    cluster = SpreadWorld()
    turn_off(cluster)
    off = cluster.topic()
    turn_off(cluster)
    assert cluster.topic() == off
    cluster.home.set_policy(PolicyChange(first_check_ms=1_000, period_ms=1_000, attempts=1))
    cluster.note_snapshot()
    assert waited_for(cluster) == ("broker-1",)
    report(cluster, "broker-1")
    assert waited_for(cluster) == ()


def test_the_removal_of_a_lost_broker_group_allows_the_next_start() -> None:
    cluster = SpreadWorld()
    cluster.join("broker-2")
    turn_off(cluster)
    cluster.remove("broker-1")
    assert waited_for(cluster) == ()
    turn_on(cluster)
    assert cluster.topic().placement.groups == (HOME, "broker-2")


def test_a_broker_without_members_turns_it_on_again_at_once() -> None:
    for world in (DedupWorld(), SpreadWorld(owners=(HOME,)).home):
        world.turn_on()
        world.turn_off()
        topic = world.engine.catalog.topics[world.engine.catalog.topic_ids[TOPIC]]
        assert topic.placement == NO_PLACEMENT
        world.turn_on()


def test_a_fence_of_a_proxy_does_not_turn_it_on() -> None:
    cluster = SpreadWorld()
    cluster.join("broker-2")
    placement = cluster.spread(is_delivered=False)
    turn_off(cluster)
    report(cluster, "broker-1", "broker-2")
    with pytest.raises(KeyOwnerChanged):
        cluster.look_up("broker-1", "k", placement)
    off = cluster.topic("broker-1")
    newer = replace(placement, version=cluster.topic().version + 1)
    with pytest.raises(KeyOwnerChanged):
        cluster.look_up("broker-1", "k", newer)
    assert cluster.topic("broker-1") == off
    assert off.dedup is None
    turn_on(cluster)
    cluster.deliver("broker-1")
    assert cluster.topic("broker-1").placement == cluster.topic().placement


def test_a_home_restored_from_a_backup_ends_it_at_its_members() -> None:
    cluster = SpreadWorld()
    key = key_of(cluster, "broker-1")
    turn_off(cluster)
    off = cluster.topic()
    report(cluster, "broker-1")
    turn_on(cluster)
    cluster.deliver("broker-1")
    cluster.send(key, "first", cluster.topic().placement)
    world = cluster.worlds["broker-1"]
    for _ in world.engine.following.follow(
        [off], (), deleted_topic_ids=(), deleted_group_ids=(), is_restored=True, now_ms=world.now_ms
    ):
        pass
    world.commit()
    assert (cluster.topic("broker-1").dedup, world.rows()) == (None, [])
    cluster.advance(LOOK_PERIOD_MS)
    assert list(world.engine.key_spreads.take_ended()) == [(off.id, off.placement.version)]


def test_the_end_replaces_a_list_of_any_version() -> None:
    """Otherwise the broker group would report the end of another list, and the home would wait."""
    cluster = SpreadWorld()
    placement = replace(cluster.topic().placement, version=99, before=("broker-1",))
    cluster.look_up("broker-1", "k", placement)
    turn_off(cluster)
    report(cluster, "broker-1")
    assert waited_for(cluster) == ()


def test_the_frame_of_a_topic_names_the_broker_groups_that_the_home_waits_for() -> None:
    cluster = SpreadWorld()
    turn_off(cluster)
    read = config_frames.read_topic(config_frames.topic_config(cluster.topic()))
    assert read == cluster.topic()


def begin_without_member() -> tuple[SpreadWorld, str, KeyPlacement]:
    """Turn deduplication off and on while broker group 1 is down and not a member.

    Returns a key that broker group 1 still knows, and the list before.
    """
    cluster = SpreadWorld()
    key, old = key_of(cluster, "broker-1"), cluster.topic().placement
    cluster.send(key, "first", old)
    turn_off(cluster)
    cluster.remove("broker-1")
    turn_on(cluster)
    return cluster, key, old


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_broker_group_that_is_added_again_forgets_the_keys_of_an_earlier_start(
    is_restarted: bool,
) -> None:
    """D-4: it was down from before the end until after the next start."""
    cluster, key, _ = begin_without_member()
    cluster.join("broker-1")
    world = cluster.worlds["broker-1"]
    if is_restarted:
        world.checkpoint()
        world.restart(power_cut=True)
    assert world.rows() == []
    cluster.report_levels()
    cluster.send(key, "second", cluster.spread())
    assert cluster.stored("broker-1") == 2
    assert cluster.repeat(key, "third", cluster.topic().placement).message_id == "id-second"


def test_a_broker_group_that_is_added_again_owns_no_keys_before_it_has_the_topics() -> None:
    """Its feature level is unknown until it has received the configuration of the home."""
    cluster = SpreadWorld()
    turn_off(cluster)
    cluster.remove("broker-1")
    cluster.home.engine.broker_groups.add("broker-1", ADDRESSES["broker-1"], cluster.home.now_ms)
    with pytest.raises(Conflict, match="broker groups are below it: broker-1"):
        cluster.home.turn_on()
    turn_on(cluster)
    assert "broker-1" in cluster.topic().placement.groups


def test_a_list_of_another_start_is_no_fence() -> None:
    """The broker group may know keys of the earlier start, and would answer from them."""
    cluster, key, old = begin_without_member()
    new = replace(old, version=99, since=cluster.topic().placement.since, before=("broker-1",))
    topic = cluster.topic("broker-1")
    with pytest.raises(KeyOwnerChanged, match="another start of the deduplication"):
        cluster.look_up("broker-1", key, new)
    assert cluster.topic("broker-1") == topic


def test_the_list_of_another_start_replaces_a_fence_of_any_version() -> None:
    cluster = SpreadWorld()
    key = key_of(cluster, "broker-1")
    wrong = replace(cluster.topic().placement, version=99, before=("broker-1",))
    cluster.look_up("broker-1", key, wrong)
    turn_off(cluster)
    cluster.remove("broker-1")
    turn_on(cluster)
    cluster.join("broker-1")
    assert cluster.topic("broker-1").placement == cluster.topic().placement


def test_a_restored_home_that_counts_to_the_same_start_ends_it_at_its_members() -> None:
    """The backup is from before the first start, and the next one gets the same version."""
    cluster = SpreadWorld()
    key = key_of(cluster, "broker-1")
    cluster.send(key, "first", cluster.topic().placement)
    world = cluster.worlds["broker-1"]
    for _ in world.engine.following.follow(
        [cluster.topic()],
        (),
        deleted_topic_ids=(),
        deleted_group_ids=(),
        is_restored=True,
        now_ms=world.now_ms,
    ):
        pass
    world.commit()
    assert world.rows() == []
    cluster.send(key, "second", cluster.topic().placement)
    assert cluster.stored("broker-1") == 2


def test_spreads_and_removals_keep_the_start() -> None:
    cluster = SpreadWorld(window_ms=1_000)
    since = cluster.topic().placement.since
    assert since == cluster.topic().version
    key = key_of(cluster, "broker-1")
    cluster.join("broker-2")
    cluster.report_levels()
    cluster.send(key, "first", cluster.topic().placement)
    assert cluster.spread().since == since
    assert len(cluster.worlds["broker-1"].rows()) == 1
    cluster.advance(2 * LOOK_PERIOD_MS)
    report(cluster, "broker-1")
    cluster.advance(LOOK_PERIOD_MS)
    assert cluster.topic().placement.before == ()
    assert cluster.topic().placement.since == since
    cluster.remove("broker-2")
    assert cluster.topic().placement.since == since


def test_the_frame_and_the_item_of_a_topic_have_the_start() -> None:
    cluster = SpreadWorld()
    topic = cluster.topic()
    assert config_frames.read_topic(config_frames.topic_config(topic)) == topic
    assert decode_placement(placement_item(topic.placement)) == topic.placement
    cluster.home.checkpoint()
    cluster.home.restart(power_cut=True)
    assert cluster.topic() == topic
