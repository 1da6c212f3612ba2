"""Spreads of dedup keys: new lists, fences, lookups, proofs, and the end of a spread (ADR 0091)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.worlds.dedup_world import WINDOW_MS, DedupWorld
from tests.support.worlds.engine_world import TOPIC
from tests.support.worlds.spread_world import HOME, SpreadWorld, moved_key
from tidemill.broker.engine.configuration.key_spreads import MISSED_VERSIONS_MAX
from tidemill.broker.engine.dedup.deduplication import KeyLookup
from tidemill.broker.engine.dedup.old_keys import LOOK_PERIOD_MS
from tidemill.broker.engine.layout.numbers import HalfId
from tidemill.broker.engine.metadata.dedup_policy import DedupKeySource, DedupMode, KeyPlacement
from tidemill.broker.engine.metadata.membership import BROKER_GROUPS_MAX
from tidemill.broker.engine.metadata.transaction_policy import PolicyChange
from tidemill.common.errors import (
    BadRequest,
    Conflict,
    Forbidden,
    GroupDraining,
    KeyOwnerChanged,
    TopicNotFound,
)
from tidemill.message.dedup_key import owner_of_key

UNKNOWN = KeyLookup()


def spread_to_third(**options: Any) -> tuple[SpreadWorld, KeyPlacement]:
    """Return a cluster of two broker groups after a spread to a third one."""
    cluster = SpreadWorld(**options)
    cluster.join("broker-2")
    return cluster, cluster.spread()


# ---------------------------------------------------------------- new lists


def test_a_spread_makes_a_joined_broker_group_an_owner() -> None:
    cluster = SpreadWorld()
    cluster.join("broker-2")
    assert cluster.topic().placement.groups == (HOME, "broker-1")
    placement = cluster.spread()
    assert placement.groups == (HOME, "broker-1", "broker-2")
    assert placement.before == (HOME, "broker-1")
    assert placement.version == cluster.topic().version
    assert cluster.topic("broker-2").placement == placement


def test_a_spread_without_a_change_writes_nothing() -> None:
    cluster = SpreadWorld()
    before = cluster.topic()
    cluster.spread()
    assert cluster.topic() == before
    cluster.join("broker-2")
    placement = cluster.spread()
    assert cluster.spread() == placement, "an open spread accepts the same list"


def test_a_dry_spread_returns_the_new_list_and_writes_nothing() -> None:
    cluster = SpreadWorld()
    cluster.join("broker-2")
    before = cluster.topic()
    planned = cluster.home.engine.key_spreads.spread(TOPIC, is_dry=True, now_ms=0)
    assert planned.placement.groups == (HOME, "broker-1", "broker-2")
    assert cluster.topic() == before


def test_the_list_of_a_spread_survives_a_restart() -> None:
    cluster, placement = spread_to_third()
    for name, world in cluster.worlds.items():
        world.restart(power_cut=True)
        assert cluster.topic(name).placement == placement


def test_a_spread_is_rejected_without_deduplication_and_at_followers() -> None:
    cluster = SpreadWorld()
    cluster.home.turn_off()
    with pytest.raises(Conflict, match="has no deduplication"):
        cluster.spread()
    with pytest.raises(TopicNotFound):
        cluster.home.engine.key_spreads.spread("missing", is_dry=True, now_ms=0)
    with pytest.raises(Forbidden):
        cluster.worlds["broker-1"].engine.key_spreads.spread(TOPIC, is_dry=True, now_ms=0)


def test_a_spread_waits_for_the_feature_level_of_all_broker_groups() -> None:
    cluster = SpreadWorld()
    cluster.join("broker-2")
    cluster.home.engine.broker_groups.feature_levels["broker-2"] = 3
    with pytest.raises(Conflict, match=r"needs feature level 4.*broker-2"):
        cluster.spread()


def test_a_single_broker_has_nothing_to_spread() -> None:
    world = DedupWorld()
    world.turn_on()
    topic = world.engine.key_spreads.spread(TOPIC, is_dry=False, now_ms=world.now_ms)
    assert topic.placement == KeyPlacement(version=topic.version)


def test_a_second_spread_waits_for_the_end_of_the_first() -> None:
    cluster, _ = spread_to_third()
    cluster.home.engine.broker_groups.drain("broker-1", cluster.home.now_ms)
    with pytest.raises(Conflict, match="keys of broker-0, broker-1 from before"):
        cluster.spread()
    close(cluster)
    assert cluster.spread().groups == (HOME, "broker-2")


# ---------------------------------------------------------------- lookups and fences


def test_a_moved_key_that_is_known_gets_the_first_answer_of_its_old_owner() -> None:
    cluster = SpreadWorld()
    cluster.join("broker-2")
    old = cluster.topic().placement
    planned = cluster.home.engine.key_spreads.spread(TOPIC, is_dry=True, now_ms=0).placement
    key = moved_key(planned, "broker-1")
    first = cluster.send(key, "first", old)
    placement = cluster.spread()
    repeated = cluster.repeat(key, "again", placement)
    assert (repeated.message_id, repeated.queue_offset) == ("id-first", first.queue_offset)
    # A proxy with the old list gets the first answer, too.
    assert cluster.repeat(key, "again", old).message_id == "id-first"
    lookups = cluster.worlds["broker-1"].engine.deduplication.lookups
    assert lookups == {"known": 1}


def test_a_moved_key_that_is_unknown_is_stored_by_its_new_owner() -> None:
    cluster, placement = spread_to_third()
    key = moved_key(placement, "broker-1")
    cluster.send(key, "first", placement)
    assert cluster.stored("broker-2") == 1
    assert cluster.worlds["broker-1"].engine.deduplication.lookups == {"unknown": 1}
    assert cluster.worlds["broker-2"].repeat("again", key=key).message_id == "id-first"


def test_a_lookup_fences_an_old_owner_without_the_list() -> None:
    cluster = SpreadWorld()
    cluster.join("broker-2")
    old = cluster.topic().placement
    placement = cluster.spread(is_delivered=False)
    key = moved_key(placement, "broker-1")
    assert cluster.look_up("broker-1", key, placement) == UNKNOWN
    world = cluster.worlds["broker-1"]
    for _ in range(2):
        with pytest.raises(KeyOwnerChanged, match="broker-2 owns the dedup key"):
            cluster.send(key, "late", old)
        world.restart(power_cut=True)  # The fence is durable.
    assert world.engine.deduplication.rejected == {}
    kept = next(f"k{n}" for n in range(99) if owner_of_key(b"k%d" % n, placement.groups) == HOME)
    cluster.send(kept, "kept", old)


def test_an_older_frame_of_the_home_does_not_undo_a_fence() -> None:
    cluster = SpreadWorld()
    cluster.join("broker-2")
    number = len(cluster.snapshots) - 1
    placement = cluster.spread(is_delivered=False)
    cluster.look_up("broker-1", "any", placement)
    cluster.deliver("broker-1", number)
    assert cluster.topic("broker-1").placement == placement
    cluster.deliver("broker-1")
    assert cluster.topic("broker-1").placement == placement


def test_a_restored_home_replaces_the_list_of_a_fence() -> None:
    cluster = SpreadWorld()
    cluster.join("broker-2")
    old = cluster.topic()
    placement = cluster.spread()
    world = cluster.worlds["broker-1"]
    for _ in world.engine.following.follow(
        [old], (), deleted_topic_ids=(), deleted_group_ids=(), is_restored=True, now_ms=world.now_ms
    ):
        pass
    assert placement.before
    assert cluster.topic("broker-1").placement == old.placement


def test_a_lookup_with_an_older_list_is_rejected() -> None:
    cluster, placement = spread_to_third()
    older = replace(placement, version=placement.version - 1)
    with pytest.raises(KeyOwnerChanged, match=f"has version {placement.version}"):
        cluster.look_up("broker-1", "any", older)
    with pytest.raises(KeyOwnerChanged, match="the home has list"):
        cluster.look_up(HOME, "any", replace(placement, version=placement.version + 1))


def test_a_broker_group_accepts_no_wrong_list_from_a_proxy() -> None:
    cluster, placement = spread_to_third()
    topic = cluster.topic("broker-1")
    far = replace(placement, version=topic.version + MISSED_VERSIONS_MAX + 1)
    with pytest.raises(KeyOwnerChanged, match="only from the home"):
        cluster.look_up("broker-1", "any", far)
    near = replace(placement, version=topic.version + MISSED_VERSIONS_MAX)
    many = tuple([f"b{n}" for n in range(BROKER_GROUPS_MAX + 1)])
    for wrong in (
        replace(near, groups=()),
        replace(near, groups=many),
        replace(near, before=()),
        replace(near, before=many),
    ):
        with pytest.raises(BadRequest, match="a lookup has a list of 1 to"):
            cluster.look_up("broker-1", "any", wrong)
    assert cluster.topic("broker-1") == topic
    assert cluster.look_up("broker-1", "any", near) == UNKNOWN
    # The bound counts from the version of the topic, which a lookup does not change.
    with pytest.raises(KeyOwnerChanged, match="only from the home"):
        cluster.look_up("broker-1", "any", far)


def test_a_new_owner_accepts_a_moved_key_only_with_the_proof_of_its_list() -> None:
    cluster, placement = spread_to_third()
    key = moved_key(placement, HOME)
    world = cluster.worlds["broker-2"]
    for version in (0, placement.version - 1, placement.version + 1):
        with pytest.raises(KeyOwnerChanged, match="broker-0 owned the dedup key"):
            world.store("m", key=key, key_version=version)
    assert world.engine.deduplication.rejected[cluster.topic("broker-2").id, "version"] == 3
    world.store("m", key=key, key_version=placement.version)
    # A known key needs no proof.
    assert world.repeat("again", key=key).message_id == "id-m"


def test_a_new_owner_accepts_no_proof_with_a_list_from_a_lookup_alone() -> None:
    """The home may have changed `keyFrom` before the list: the proof is then about another key."""
    cluster = SpreadWorld()
    cluster.join("broker-2")
    cluster.home.turn_on(key_from=DedupKeySource.MESSAGE_ID)
    placement = cluster.spread(is_delivered=False)
    cluster.look_up("broker-2", "any", placement)
    assert cluster.topic("broker-2").placement == placement
    key = moved_key(placement, HOME)
    with pytest.raises(KeyOwnerChanged, match="broker-2 has not received this list"):
        cluster.send(key, "m", placement)
    cluster.deliver("broker-2")
    world = cluster.worlds["broker-2"]
    world.store("m", message_id=key, key_version=placement.version)
    # A broker group that owned a key before accepts it without a proof.
    cluster.look_up("broker-1", "any", placement)
    kept = next(
        key
        for key in (f"k{n}" for n in range(999))
        if {owner_of_key(key.encode(), of) for of in (placement.before, placement.groups)}
        == {"broker-1"}
    )
    cluster.worlds["broker-1"].store("kept", key=kept)


def test_the_origin_of_keys_does_not_change_while_they_move() -> None:
    cluster, _ = spread_to_third()
    cluster.report_levels()
    topic = cluster.topic()
    with pytest.raises(Conflict, match=r"change keyFrom when the spread has ended"):
        cluster.home.turn_on(key_from=DedupKeySource.MESSAGE_ID)
    assert cluster.topic() == topic
    cluster.home.turn_on(
        key_from=DedupKeySource.PROPERTY_OR_MESSAGE_ID,
        mode=DedupMode.REPLACE,
        max_wait_ms=60_000,
        window_ms=1_000,
    )
    close(cluster)
    cluster.home.turn_on(key_from=DedupKeySource.MESSAGE_ID)


def test_a_new_owner_without_the_list_rejects_its_keys() -> None:
    cluster = SpreadWorld()
    cluster.join("broker-2")
    placement = cluster.spread(is_delivered=False)
    key = moved_key(placement, HOME)
    with pytest.raises(KeyOwnerChanged, match="broker-0 owns"):
        cluster.send(key, "m", placement)
    cluster.deliver("broker-2")
    cluster.send(key, "m", placement)


def test_a_pending_message_in_mode_replace_is_replaced_at_its_old_owner() -> None:
    cluster = SpreadWorld(mode=DedupMode.REPLACE, max_wait_ms=60_000)
    cluster.join("broker-2")
    old = cluster.topic().placement
    planned = cluster.home.engine.key_spreads.spread(TOPIC, is_dry=True, now_ms=0).placement
    key = moved_key(planned, "broker-1")
    world = cluster.worlds["broker-1"]
    due_at_ms = world.now_ms + 10_000
    sent = cluster.send(key, "first", old, due_at_ms=due_at_ms)
    placement = cluster.spread()
    again = cluster.send(key, "second", placement, due_at_ms=due_at_ms + 1_000)
    assert again.queue_offset == sent.queue_offset, "D-7"
    cluster.advance(11_000)
    assert cluster.stored("broker-1") == 1
    assert world.find(cluster.topic("broker-1"), message_id="id-second")
    cluster.send(key, "third", placement)
    assert cluster.stored("broker-2") == 1


def test_a_draining_broker_group_answers_lookups_and_repeats() -> None:
    cluster = SpreadWorld()
    cluster.join("broker-2")
    old = cluster.topic().placement
    cluster.home.engine.broker_groups.drain("broker-1", cluster.home.now_ms)
    planned = cluster.home.engine.key_spreads.spread(TOPIC, is_dry=True, now_ms=0).placement
    keys = [f"k{n}" for n in range(99) if owner_of_key(b"k%d" % n, planned.before) == "broker-1"]
    cluster.send(keys[0], "first", old)
    world = cluster.worlds["broker-1"]
    home = world.engine.catalog.membership.home
    assert home is not None
    world.engine.following.accept_home(
        replace(home, is_draining=True), may_join=False, is_complete=False, now_ms=world.now_ms
    )
    placement = cluster.spread()
    assert placement.groups == (HOME, "broker-2")
    assert cluster.repeat(keys[0], "again", placement).message_id == "id-first"
    assert world.repeat("again", key=keys[0]).message_id == "id-first"
    with pytest.raises(GroupDraining):
        world.store("new", key=keys[1])
    cluster.send(keys[1], "new", placement)


# ---------------------------------------------------------------- the end of a spread


def close(cluster: SpreadWorld) -> None:
    """Let the windows of all older keys pass, and report it."""
    cluster.advance(LOOK_PERIOD_MS)
    cluster.advance(WINDOW_MS)
    cluster.advance(LOOK_PERIOD_MS)
    for name in cluster.delivered:
        cluster.report(name)
    cluster.advance(LOOK_PERIOD_MS)
    for name in cluster.delivered:
        cluster.deliver(name)


def test_a_spread_is_closed_one_window_after_all_old_owners_have_the_list() -> None:
    cluster = SpreadWorld()
    cluster.join("broker-2")
    placement = cluster.spread(is_delivered=False)
    cluster.advance(WINDOW_MS)
    cluster.deliver("broker-1")
    cluster.advance(LOOK_PERIOD_MS)
    cluster.advance(WINDOW_MS - LOOK_PERIOD_MS - 1)
    cluster.report("broker-1")
    assert cluster.topic().placement == placement, "it has had the list for less than a window"
    cluster.advance(LOOK_PERIOD_MS)
    cluster.report("broker-1")
    closed = cluster.topic().placement
    assert closed == replace(placement, before=())
    key = moved_key(placement, HOME)
    cluster.deliver("broker-2")
    cluster.send(key, "m", closed)


def test_the_end_of_a_spread_waits_for_pending_messages_from_before_the_fence() -> None:
    cluster = SpreadWorld()
    cluster.join("broker-2")
    world = cluster.worlds["broker-1"]
    old = cluster.topic().placement
    key = next(f"k{n}" for n in range(99) if owner_of_key(b"k%d" % n, old.groups) == "broker-1")
    pending = cluster.send(key, "later", old, due_at_ms=world.now_ms + 10 * WINDOW_MS)
    cluster.spread()
    close(cluster)
    assert cluster.topic().placement.before
    # A pending message from after the fence does not count.
    kept = next(
        f"k{n}"
        for n in range(99)
        if owner_of_key(b"k%d" % n, cluster.topic().placement.groups) == "broker-1"
        and f"k{n}" != key
    )
    world.store("m", key=kept, due_at_ms=world.now_ms + 10 * WINDOW_MS)
    world.cancel(pending.queue_offset)
    close(cluster)
    assert not cluster.topic().placement.before


@pytest.mark.parametrize("has_snapshot", [True, False])
def test_a_restart_does_not_change_the_time_of_a_fence(has_snapshot: bool) -> None:
    cluster, _ = spread_to_third()
    world = cluster.worlds["broker-1"]
    cluster.advance(WINDOW_MS - LOOK_PERIOD_MS)
    if has_snapshot:
        world.checkpoint()
    world.restart()
    cluster.report("broker-1")
    assert cluster.topic().placement.before
    cluster.advance(LOOK_PERIOD_MS)
    cluster.report("broker-1")
    cluster.advance(LOOK_PERIOD_MS)
    assert not cluster.topic().placement.before


@pytest.mark.parametrize(("duration_ms", "is_over"), [(WINDOW_MS - 1, False), (WINDOW_MS, True)])
def test_older_keys_are_over_one_window_after_the_fence(duration_ms: int, is_over: bool) -> None:
    cluster, placement = spread_to_third()
    topic_id = cluster.topic().id
    cluster.advance(duration_ms)
    ended = list(cluster.worlds["broker-1"].engine.key_spreads.take_ended())
    assert ended == [(topic_id, placement.version)] * is_over


def test_a_new_master_looks_for_older_keys_again() -> None:
    """Another master may have recorded the same list later, after a step-down of this one."""
    cluster, placement = spread_to_third()
    spreads = cluster.worlds["broker-1"].engine.key_spreads
    cluster.advance(WINDOW_MS)
    assert list(spreads.take_ended())
    spreads.take_over()
    assert list(spreads.take_ended()) == []
    cluster.advance(LOOK_PERIOD_MS)
    assert list(spreads.take_ended()) == [(cluster.topic().id, placement.version)]


def test_a_spread_ends_while_an_old_owner_restarts() -> None:
    cluster, placement = spread_to_third()
    world = cluster.worlds["broker-1"]
    # Keys that stay where they are; one of them is always pending.
    kept = [
        key
        for key in (f"s{n}" for n in range(999))
        if owner_of_key(key.encode(), placement.before) == "broker-1"
        and owner_of_key(key.encode(), placement.groups) == "broker-1"
    ]
    for key in kept[:4]:
        world.store("later", key=key, due_at_ms=world.now_ms + 3 * WINDOW_MS)
        for duration_ms in (WINDOW_MS, LOOK_PERIOD_MS, LOOK_PERIOD_MS):
            cluster.advance(duration_ms)
        cluster.report("broker-1")
        world.restart()
    assert world.rows(), "a message is pending"
    assert not cluster.topic().placement.before


def test_other_changes_of_a_topic_keep_the_time_of_its_fence() -> None:
    cluster, _ = spread_to_third()
    fenced_at_ms = {name: cluster.topic(name).placement.fenced_at_ms for name in cluster.worlds}
    assert min(fenced_at_ms.values()) > 0
    cluster.advance(LOOK_PERIOD_MS)
    cluster.home.set_policy(PolicyChange(first_check_ms=1_000, period_ms=1_000, attempts=1))
    cluster.note_snapshot()
    for name, at_ms in fenced_at_ms.items():
        if name != HOME:
            cluster.deliver(name)
        assert cluster.topic(name).transaction == cluster.topic().transaction
        assert cluster.topic(name).placement.fenced_at_ms == at_ms
    close(cluster)
    assert {cluster.topic(name).placement.fenced_at_ms for name in cluster.worlds} == {0}


def test_the_removal_of_an_old_owner_ends_its_lookups() -> None:
    cluster, placement = spread_to_third()
    home = cluster.home
    home.engine.broker_groups.drain("broker-1", home.now_ms)
    for _ in home.engine.broker_groups.remove("broker-1", home.now_ms):
        pass
    home.commit()
    left = cluster.topic().placement
    assert (left.groups, left.before) == ((HOME, "broker-2"), (HOME,))
    assert left.version > placement.version


def test_the_removal_of_the_joined_broker_group_closes_the_spread() -> None:
    cluster, _ = spread_to_third()
    home = cluster.home
    home.engine.broker_groups.drain("broker-2", home.now_ms)
    for _ in home.engine.broker_groups.remove("broker-2", home.now_ms):
        pass
    left = cluster.topic().placement
    assert (left.groups, left.before) == ((HOME, "broker-1"), ())


def test_many_open_spreads_are_looked_at_in_bounded_turns() -> None:
    cluster = SpreadWorld()
    for n in range(500):
        cluster.home.turn_on(topic=f"t{n}")
    cluster.join("broker-2")
    for n in range(500):
        cluster.home.engine.key_spreads.spread(f"t{n}", is_dry=False, now_ms=cluster.home.now_ms)
    cluster.home.commit()
    cluster.home.now_ms += LOOK_PERIOD_MS
    cluster.home.note_round()
    spreads = cluster.home.engine.key_spreads
    assert [spreads.run_due(cluster.home.now_ms) for _ in range(4)] == [True, True, False, False]


def test_a_spread_ends_after_a_start_from_a_checkpoint() -> None:
    cluster, _ = spread_to_third(window_ms=2_000)
    for world in cluster.worlds.values():
        world.checkpoint()
        world.restart()
    for _ in range(5):
        cluster.advance(1_500)
        for name in ("broker-1", "broker-2"):
            cluster.report(name)
    assert not cluster.topic().placement.before


def test_a_recovered_half_message_takes_its_key_only_at_the_owner() -> None:
    cluster = SpreadWorld()
    cluster.join("broker-2")
    cluster.home.set_policy(PolicyChange(first_check_ms=1_000, period_ms=1_000, attempts=1))
    cluster.note_snapshot()
    cluster.deliver("broker-1")
    world, old = cluster.worlds["broker-1"], cluster.topic().placement
    planned = cluster.home.engine.key_spreads.spread(TOPIC, is_dry=True, now_ms=0).placement
    key = moved_key(planned, "broker-1")
    half_id = HalfId(cluster.send(key, "half", old, is_half=True).half_id)
    cluster.advance(1_000)
    world.write_checks()
    cluster.advance(1_000)
    placement = cluster.spread()
    cluster.send(key, "other", placement)
    world.recover(half_id)
    assert world.rows() == []
    assert cluster.look_up("broker-1", key, placement) == UNKNOWN


def test_a_recovered_half_message_takes_no_key_that_moves_back_to_its_broker_group() -> None:
    """The broker group that owned the key in the meantime may know it until the spread ends."""
    cluster = SpreadWorld(window_ms=2_000)
    cluster.home.set_policy(PolicyChange(first_check_ms=1_000, period_ms=1_000, attempts=1))
    cluster.note_snapshot()
    cluster.deliver("broker-1")
    cluster.join("broker-2")
    world, old = cluster.worlds["broker-1"], cluster.topic().placement
    planned = cluster.home.engine.key_spreads.spread(TOPIC, is_dry=True, now_ms=0).placement
    key = moved_key(planned, "broker-1")
    assert owner_of_key(key.encode(), planned.groups) == "broker-2"
    half_id = HalfId(cluster.send(key, "half", old, is_half=True).half_id)
    cluster.advance(1_000)
    world.write_checks()
    cluster.advance(1_000)
    cluster.spread()
    cluster.advance(7_000)
    for _ in range(2):
        for name in ("broker-1", "broker-2"):
            cluster.report(name)
        cluster.advance(1_500)
    assert not cluster.topic().placement.before
    for name in ("broker-1", "broker-2"):
        cluster.deliver(name)
    cluster.send(key, "other", cluster.topic().placement)
    cluster.report_levels()
    cluster.home.engine.broker_groups.drain("broker-2", cluster.home.now_ms)
    cluster.home.commit()
    back = cluster.spread()
    assert back.before
    assert owner_of_key(key.encode(), back.groups) == "broker-1"
    world.recover(half_id)
    assert world.rows() == []
