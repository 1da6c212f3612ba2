"""Since when groups that start at the latest read their topics, at whichever broker group.

Each broker group meets a consumer group when it polls there first. What was stored there since it
began elsewhere is not news that it has missed, but its own (ADR 0025).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tidemill.broker.engine.layout.numbers import TopicId
from tidemill.broker.engine.metadata.catalog import Beginnings, Catalog, ConsumerGroup, Topic

# Topics of one group; such a group reads a few. Of more, each broker group decides for itself.
BEGUN_TOPICS_MAX: Final = 128
# By how much the clocks of two broker groups may differ: a group that begins gets what was stored
# so long before it elsewhere, which is a few messages too many and never one too few.
CLOCKS_DIFFER_MS: Final = 2_000


def merge_beginnings(*many: Iterable[tuple[int, int]], catalog: Catalog) -> Beginnings:
    """Return the earliest of each topic that is alive, and that was there by then."""
    found: dict[int, int] = {}
    for each in many:
        for topic_id, begun_at_ms in each:
            topic = _find_by_homes_id(topic_id, catalog)
            if topic is not None and _is_of(topic, begun_at_ms):
                found[topic_id] = min(begun_at_ms, found.get(topic_id, begun_at_ms))
    return tuple(sorted(found.items())[:BEGUN_TOPICS_MAX])


def _is_of(topic: Topic, begun_at_ms: int) -> bool:
    """Whether a beginning is of this topic, and not of one that had its number before.

    A home that was restored from a backup gives numbers out again.
    """
    return begun_at_ms + CLOCKS_DIFFER_MS >= topic.created_at_ms


def _find_by_homes_id(topic_id: int, catalog: Catalog) -> Topic | None:
    home = catalog.membership.home
    if home is not None and home.name == catalog.broker_name:
        return catalog.topics.get(TopicId(topic_id))
    return catalog.topics.get(catalog.topic_ids_at_home.get(topic_id, TopicId(0)))


def home_id_of(topic: Topic, catalog: Catalog) -> int | None:
    """Return the id under which the home has a topic; None: it has it not, or there is no home."""
    home = catalog.membership.home
    if home is None or topic.is_system:
        return None
    return topic.id if home.name == catalog.broker_name else topic.home_id or None


def begun_since_ms(group: ConsumerGroup, topic: Topic, catalog: Catalog) -> int | None:
    """Return since when a topic's messages are the group's; None: since it polls here first."""
    begun_at_ms = dict(group.begun).get(home_id_of(topic, catalog) or 0)
    if begun_at_ms is None or not _is_of(topic, begun_at_ms):
        return None
    return max(begun_at_ms - CLOCKS_DIFFER_MS, 0)
