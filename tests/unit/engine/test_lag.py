"""The lag of a consumer group at a broker group: the messages that it will be given there."""

from __future__ import annotations

from collections import Counter

from tests.support.worlds.engine_world import GROUP, TOPIC, World
from tests.unit.engine.test_broker_groups import (
    count,
    following,
    founded,
    note_begun,
    send_configuration,
)
from tidemill.broker.engine.metadata.catalog import TopicType
from tidemill.broker.engine.queries.inspection import QueueProgress

HOUR_MS = 3_600_000


def lag_of(world: World, group: str = GROUP, *, also: str = "") -> dict[str, int]:
    """Return the lag of a group by topic; topics without lag are omitted."""
    found = world.engine.catalog.find_group(group)
    assert found is not None
    named = world.engine.catalog.find_topic(also)
    also_ids = frozenset() if named is None else frozenset({named.id})
    lag: Counter[str] = Counter()
    for one in world.engine.inspection.group_progress(found, also=also_ids):
        lag[one.topic] += one.ready_count + one.in_flight_count
    return {topic: count for topic, count in lag.items() if count}


def progress_of(world: World) -> QueueProgress:
    """Return the progress of the consumer group in the only queue."""
    group = world.engine.catalog.find_group(GROUP)
    assert group is not None
    [progress] = world.engine.inspection.group_progress(group)
    return progress


def counts_of(world: World) -> tuple[int, int]:
    """Return how many messages wait and how many are in flight."""
    progress = progress_of(world)
    return progress.ready_count, progress.in_flight_count


def cluster(*, start_from_latest: bool = False) -> tuple[World, World]:
    """Return the home and a follower, with the same topic and consumer group."""
    home, follower = founded(), following()
    put = home.engine.administration
    put.put_topic("orders", type_=TopicType.NORMAL, queues=2, now_ms=home.now_ms)
    put.put_group("billing", start_from_latest=start_from_latest, now_ms=home.now_ms)
    home.commit()
    send_configuration(follower, home)
    return home, follower


def exchange(follower: World, home: World) -> None:
    """Let the home ask the follower which groups read there, and send all to it."""
    for group in follower.engine.following.take_unreported_beginnings():
        note_begun(home, group)
    send_configuration(follower, home)


def test_a_group_that_polled_at_the_home_has_a_lag_at_the_follower() -> None:
    home, follower = cluster()
    follower.send("a", "b", topic="orders", queue_id=1)
    assert lag_of(follower, "billing") == {}
    home.pop(1, group="billing", topic="orders")
    exchange(follower, home)
    assert lag_of(follower, "billing") == {"orders": 2}
    follower.restart()
    assert lag_of(follower, "billing") == {"orders": 2}
    popped = follower.pop(1, group="billing", topic="orders")
    assert lag_of(follower, "billing") == {"orders": 2}
    follower.ack(*popped)
    assert lag_of(follower, "billing") == {"orders": 1}


def test_a_group_that_polled_at_a_follower_has_a_lag_at_the_home() -> None:
    home, follower = cluster()
    home.send("a", "b", topic="orders")
    follower.pop(1, group="billing", topic="orders")
    assert lag_of(home, "billing") == {}
    exchange(follower, home)
    assert lag_of(home, "billing") == {"orders": 2}


def test_a_group_at_the_latest_has_a_lag_since_it_began_elsewhere() -> None:
    home, follower = cluster(start_from_latest=True)
    follower.send("before", topic="orders")
    for world in (home, follower):
        world.advance(HOUR_MS)
    home.pop(1, group="billing", topic="orders")
    exchange(follower, home)
    assert lag_of(follower, "billing") == {}
    follower.advance(HOUR_MS)
    follower.send("a", "b", topic="orders", queue_id=1)
    assert lag_of(follower, "billing") == {"orders": 2}
    assert {one.body for one in follower.pop(9, group="billing", topic="orders")} == {"a", "b"}


def test_a_named_topic_counts_before_the_first_poll() -> None:
    home, _ = cluster()
    home.send("a", "b", topic="orders")
    assert lag_of(home, "billing") == {}
    assert lag_of(home, "billing", also="orders") == {"orders": 2}
    latest, _ = cluster(start_from_latest=True)
    latest.send("a", "b", topic="orders")
    # Its first poll begins behind them.
    assert lag_of(latest, "billing", also="orders") == {}


def test_a_topic_with_a_subscription_counts_before_the_first_poll() -> None:
    home, _ = cluster()
    home.send("a", "b", topic="orders")
    catalog = home.engine.catalog
    home.engine.state.index.reported_subscriptions.note(
        catalog.group_ids["billing"], catalog.topic_ids["orders"]
    )
    assert lag_of(home, "billing") == {"orders": 2}
    home.engine.administration.delete_topic("orders", home.now_ms)
    home.commit()
    assert lag_of(home, "billing") == {}


def test_the_lag_of_a_group_that_found_nothing_survives_a_restart() -> None:
    world = World()
    world.topic(TOPIC)
    world.group()
    world.pop(1)
    world.restart()
    world.send("a", "b")
    assert lag_of(world) == {TOPIC: 2}


def test_messages_for_retry_count_before_the_next_poll() -> None:
    world = World()
    world.topic(TOPIC)
    world.group()
    world.send("a", "b")
    assert len(world.pop(2, invisible_ms=1_000)) == 2
    world.advance(2_000)
    world.run_due()
    assert lag_of(world) == {TOPIC: 2}
    world.restart()
    assert lag_of(world) == {TOPIC: 2}


def test_the_lag_equals_the_backlog_that_prevents_a_removal() -> None:
    home, follower = cluster()
    follower.send("a", "b", topic="orders")
    home.pop(1, group="billing", topic="orders")
    exchange(follower, home)
    backlog = count(follower)
    [item] = backlog.items
    assert (item.topic, item.group, item.ready_count, item.is_unread) == (
        "orders",
        "billing",
        2,
        True,
    )
    assert lag_of(follower, "billing") == {"orders": backlog.ready_count}


def test_the_rest_of_a_replaced_fifo_batch_counts() -> None:
    world = World(is_followed=True)
    world.group(is_ordered=True)
    world.send(*[f"m{n}" for n in range(10)])
    world.pop(10, invisible_ms=1_000)
    world.advance(1_000)
    assert counts_of(world) == (10, 0)
    [first] = world.pop(1, invisible_ms=1_000)
    assert counts_of(world) == (9, 1)
    world.restart()
    assert counts_of(world) == (9, 1)
    world.ack(first)
    assert counts_of(world) == (9, 0)
    world.fail_over()
    assert counts_of(world) == (9, 0)
    assert len(world.pop(32)) == 9


def test_the_age_of_the_lag_is_that_of_the_rest_of_a_replaced_fifo_batch() -> None:
    world = World()
    world.group(is_ordered=True)
    sent_at_ms = world.now_ms
    world.send("m0", "m1", "m2")
    world.pop(3, invisible_ms=1_000)
    world.advance(1_000)
    world.ack(*world.pop(1))
    world.send("late")
    progress = progress_of(world)
    assert progress.oldest_unacked_at_ms == progress.oldest_ready_at_ms == sent_at_ms


def test_fifo_messages_that_retention_removed_do_not_count() -> None:
    world = World()
    world.group(is_ordered=True)
    sent = [f"m{n}" for n in range(24)]
    world.send(*sent, size=50_000)
    assert len(world.pop(24, invisible_ms=1_000)) == 24
    world.advance(1_000)
    world.pop(2, invisible_ms=1_000)
    world.checkpoint()
    world.retire()
    low = progress_of(world).min_offset
    assert 2 < low < 24
    assert counts_of(world) == (24 - low, 2), "an ack may still come for those in flight"
    world.advance(1_000)
    assert counts_of(world) == (24 - low, 0)
    assert world.bodies() == sent[low:]


def test_a_broker_group_with_the_rest_of_a_replaced_fifo_batch_is_not_removed() -> None:
    home, follower = founded(), following()
    put = home.engine.administration
    put.put_topic("orders", type_=TopicType.NORMAL, queues=2, now_ms=home.now_ms)
    put.put_group("billing", is_ordered=True, now_ms=home.now_ms)
    home.commit()
    send_configuration(follower, home)
    follower.send(*[f"m{n}" for n in range(10)], topic="orders")
    follower.pop(10, group="billing", topic="orders", invisible_ms=1_000)
    follower.advance(1_000)
    follower.ack(*follower.pop(1, group="billing", topic="orders"))
    backlog = count(follower)
    assert (backlog.ready_count, backlog.in_flight_count) == (9, 0)
    assert len(follower.pop(32, group="billing", topic="orders")) == 9
    backlog = count(follower)
    assert (backlog.ready_count, backlog.in_flight_count) == (0, 9)
