"""The topics and consumer groups that a request names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.common.errors import BadRequest, GroupNotFound, TopicNotFound
from tidemill.message.resource_names import HIDDEN_TOPIC_PREFIX

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.metadata.catalog import ConsumerGroup, Topic


def find_topic(engine: Engine, name: str) -> Topic:
    """Return the topic of that name. Raises TopicNotFound."""
    topic = engine.catalog.find_topic(name)
    if topic is None or name.startswith(HIDDEN_TOPIC_PREFIX):
        raise TopicNotFound(f"there is no topic {name!r}")
    return topic


def find_group(engine: Engine, name: str) -> ConsumerGroup:
    """Return the consumer group of that name. Raises GroupNotFound."""
    group = engine.catalog.find_group(name)
    if group is None:
        raise GroupNotFound(f"there is no consumer group {name!r}")
    return group


def check_queue_id(topic: Topic, queue_id: int) -> None:
    """Raise BadRequest unless the topic has this queue."""
    if queue_id >= topic.queues:
        raise BadRequest(
            f"topic {topic.name!r} has the queues 0 to {topic.queues - 1}, not {queue_id}"
        )
