"""Creators of topics: users and first uses, in the log, at followers, and below their level."""

from __future__ import annotations

import pytest

from tests.support.worlds.engine_world import World
from tests.unit.engine.test_broker_groups import following, send_configuration
from tidemill.broker.engine.layout.record import UnknownRecord
from tidemill.broker.engine.metadata.catalog import TopicType, topic_item
from tidemill.broker.engine.metadata.topic_creator import (
    CREATOR_LEVEL,
    FIRST_USE,
    TopicCreator,
    decode_creator,
)
from tidemill.broker.server.wire import config_frames

OPS = TopicCreator(user="ops")
NO_USER = TopicCreator()


def create(world: World, name: str, creator: TopicCreator | None, queues: int = 1) -> None:
    world.engine.administration.put_topic(
        name, type_=TopicType.NORMAL, queues=queues, creator=creator, now_ms=world.now_ms
    )
    world.commit()


def creators(world: World) -> dict[str, TopicCreator | None]:
    return {topic.name: topic.creator for topic in world.engine.catalog.topics.values()}


def fill(world: World) -> dict[str, TopicCreator | None]:
    create(world, "by-user", OPS)
    create(world, "without-user", NO_USER)
    create(world, "unknown", None)
    world.engine.administration.ensure("used", "", world.now_ms)
    world.commit()
    return {"by-user": OPS, "without-user": NO_USER, "unknown": None, "used": FIRST_USE}


@pytest.mark.parametrize("has_snapshot", [False, True])
def test_a_restart_keeps_the_creators(*, has_snapshot: bool) -> None:
    world = World()
    expected = fill(world)
    if has_snapshot:
        for _ in world.engine.checkpoints.write():
            pass
    world.restart()
    assert creators(world) == expected


def test_a_change_by_another_user_keeps_the_creator() -> None:
    world = World()
    create(world, "orders", OPS)
    create(world, "orders", TopicCreator(user="other"), queues=2)
    assert creators(world) == {"orders": OPS}


def test_a_log_below_the_level_has_no_creator() -> None:
    world = World(feature_level=CREATOR_LEVEL - 1)
    expected = fill(world)
    assert creators(world) == dict.fromkeys(expected)
    for topic in world.engine.catalog.topics.values():
        assert "creator" not in topic_item(topic)["topic"]


def test_a_follower_has_the_creators_from_its_level_on() -> None:
    home, follower, older = World(), following(), World(feature_level=CREATOR_LEVEL - 1)
    expected = fill(home)
    send_configuration(follower, home)
    assert creators(follower) == expected
    send_configuration(older, home)
    assert creators(older) == dict.fromkeys(expected)


@pytest.mark.parametrize("creator", [OPS, NO_USER, FIRST_USE, None])
def test_a_frame_keeps_the_creator(creator: TopicCreator | None) -> None:
    world = World()
    create(world, "orders", creator)
    [topic] = world.engine.catalog.topics.values()
    assert config_frames.read_topic(config_frames.topic_config(topic)).creator == creator


def test_an_unknown_field_of_a_creator_is_refused() -> None:
    with pytest.raises(UnknownRecord):
        decode_creator({"user": "ops", "later": 1})
