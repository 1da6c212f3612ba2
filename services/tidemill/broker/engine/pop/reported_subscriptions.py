"""The subscriptions of live consumers, as proxies report them.

They are in no record: a broker that starts learns them again from the proxies. Only the lag of a
group that has not polled yet depends on them.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final, final

from tidemill.broker.engine.layout.numbers import GroupId, TopicId
from tidemill.broker.engine.metadata.catalog import Catalog

GROUPS_MAX: Final = 16_384  # beyond it, the longest known group is forgotten
TOPICS_A_GROUP_MAX: Final = 128  # as many as a record of a group names


@final
class ReportedSubscriptions:
    """Which topics the consumers of each group subscribe to."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._of_group: dict[GroupId, dict[TopicId, None]] = {}

    def note(self, group_id: GroupId, topic_id: TopicId) -> None:
        """Note that a consumer of a group subscribes to a topic, if both exist."""
        if group_id not in self._catalog.groups or topic_id not in self._catalog.topics:
            return
        of_group = self._of_group.get(group_id)
        if of_group is None:
            if len(self._of_group) >= GROUPS_MAX:
                del self._of_group[next(iter(self._of_group))]
            of_group = self._of_group[group_id] = {}
        if len(of_group) < TOPICS_A_GROUP_MAX:
            of_group[topic_id] = None

    def topics_of(self, group_id: GroupId) -> AbstractSet[TopicId]:
        """Return the topics of a group. Some of them may be deleted."""
        return self._of_group.get(group_id, {}).keys()
