"""Topics of the broker itself: retry topics, dead-letter topics, the hidden timer topic."""

from __future__ import annotations

from tidemill.broker.engine.layout.config import ConfigItem
from tidemill.broker.engine.layout.entry import Recorder
from tidemill.broker.engine.layout.numbers import GroupId, TopicId
from tidemill.broker.engine.metadata.catalog import Catalog, Topic, TopicType, topic_item


def ensure_system_topic(
    catalog: Catalog,
    recorder: Recorder,
    name: str,
    now_ms: int,
    *,
    retry_of: tuple[GroupId, TopicId] | None = None,
    queues: int = 1,
) -> Topic:
    """Return a topic of the broker itself. Create it if it is new."""
    topic = catalog.find_topic(name)
    # An orphan may have that name, if its group was deleted and created again.
    if topic is None or topic.retry_of != retry_of:
        topic = Topic(
            id=TopicId(catalog.next_id),
            version=1,
            name=name,
            type=TopicType.NORMAL,
            queues=queues,
            retry_of=retry_of,
            is_system=True,
        )
        recorder.append(ConfigItem(topic_item(topic)), now_ms)
    return topic
