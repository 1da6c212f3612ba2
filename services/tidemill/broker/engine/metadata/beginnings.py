"""The topics that consumer groups read at any broker group, and since when.

A consumer group begins to read a topic with its first poll. Each broker group learns of it, because
the messages that it stores there belong to the group: all of them, or those since the begin if the
group starts at the latest message (ADR 0025). The lag of the group counts them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tidemill.broker.engine.layout.numbers import TopicId
from tidemill.broker.engine.metadata.catalog import Beginnings, Catalog, ConsumerGroup, Topic

# Topics of one group; such a group reads a few. For more topics, each broker group decides for
# itself.
BEGUN_TOPICS_MAX: Final = 128
# Largest difference between the clocks of two broker groups. A group also gets messages that were
# stored this long before its begin elsewhere: a few too many, and never one too few.
CLOCKS_DIFFER_MS: Final = 2_000


def merge_beginnings(*many: Iterable[tuple[int, int]], catalog: Catalog) -> Beginnings:
    """Return the earliest begin of each live topic that already existed then."""
    found: dict[int, int] = {}
    for each in many:
        for topic_id, begun_at_ms in each:
            topic = _find_by_homes_id(topic_id, catalog)
            if topic is not None and _is_of(topic, begun_at_ms):
                found[topic_id] = min(begun_at_ms, found.get(topic_id, begun_at_ms))
    return tuple(sorted(found.items())[:BEGUN_TOPICS_MAX])


def _is_of(topic: Topic, begun_at_ms: int) -> bool:
    """Return whether a begin belongs to this topic and not to an earlier one with the same id.

    A home that was restored from a backup assigns ids a second time.
    """
    return begun_at_ms + CLOCKS_DIFFER_MS >= topic.created_at_ms


def _find_by_homes_id(topic_id: int, catalog: Catalog) -> Topic | None:
    home = catalog.membership.home
    if home is None or home.name == catalog.broker_name:
        return catalog.topics.get(TopicId(topic_id))
    return catalog.topics.get(catalog.topic_ids_at_home.get(topic_id, TopicId(0)))


def home_id_of(topic: Topic, catalog: Catalog) -> int | None:
    """Return the topic's id at the home; None if the home does not have it.

    A broker without a home may become one, and its ids then stay.
    """
    if topic.is_system:
        return None
    home = catalog.membership.home
    is_home = home is None or home.name == catalog.broker_name
    return topic.id if is_home else topic.home_id or None


def topics_begun(group: ConsumerGroup, catalog: Catalog) -> set[TopicId]:
    """Return the topics here that a group has begun to read at any broker group."""
    found = set()
    for topic_id, begun_at_ms in group.begun:
        topic = _find_by_homes_id(topic_id, catalog)
        if topic is not None and _is_of(topic, begun_at_ms):
            found.add(topic.id)
    return found


def begun_since_ms(group: ConsumerGroup, topic: Topic, catalog: Catalog) -> int | None:
    """Return the time since which a topic's messages belong to the group.

    None means that the group begins with its first poll at this broker group.
    """
    begun_at_ms = dict(group.begun).get(home_id_of(topic, catalog) or 0)
    if begun_at_ms is None or not _is_of(topic, begun_at_ms):
        return None
    return max(begun_at_ms - CLOCKS_DIFFER_MS, 0)
