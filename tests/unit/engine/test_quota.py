"""Limits on the number of topics and groups, and on the rate of automatic creation."""

from __future__ import annotations

import pytest

from tests.support.worlds.engine_world import World
from tidemill.broker.engine.metadata.quota import AUTO_CREATE_BURST
from tidemill.common.errors import Conflict, Overloaded


def test_automatic_creation_is_limited_to_the_rate() -> None:
    world = World(auto_create_topics=True, auto_create_groups=True, auto_create_per_s=10)
    ensure = world.engine.administration.ensure
    for n in range(AUTO_CREATE_BURST // 2):
        ensure(f"t{n}", f"g{n}", world.now_ms)
    for topic, group in (("one-more", ""), ("", "one-more")):
        with pytest.raises(Overloaded, match="auto_create_per_s"):
            ensure(topic, group, world.now_ms)
    # Existing topics can be used, and administrators can create more.
    ensure("t0", "g0", world.now_ms)
    world.engine.administration.put_topic("by-hand", type_=None, queues=1, now_ms=world.now_ms)
    world.now_ms += 1_000
    for n in range(10):
        ensure(f"later{n}", "", world.now_ms)
    with pytest.raises(Overloaded):
        ensure("too-many", "", world.now_ms)


def test_the_numbers_of_topics_and_groups_are_limited() -> None:
    world = World(auto_create_topics=True, auto_create_groups=True, topics_max=5, groups_max=2)
    administration = world.engine.administration
    free = 5 - len(world.engine.catalog.topics)
    for n in range(free):
        administration.ensure(f"t{n}", "", world.now_ms)
    for n in range(2):
        administration.ensure("", f"g{n}", world.now_ms)
    with pytest.raises(Conflict, match="topics_max"):
        administration.put_topic("more", type_=None, queues=1, now_ms=world.now_ms)
    with pytest.raises(Conflict, match="groups_max"):
        administration.put_group("more", now_ms=world.now_ms)
    # Existing topics can be changed, and deleted to make room.
    administration.put_topic("t0", type_=None, queues=0, delivery_spread_ms=5, now_ms=world.now_ms)
    administration.delete_topic("t0", world.now_ms)
    administration.put_topic("more", type_=None, queues=1, now_ms=world.now_ms)
