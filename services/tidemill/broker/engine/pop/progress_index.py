"""The index of all progress: by (group, topic, queue), by group and by topic.

When a group or a topic is deleted, its progress is void at once. The pop state forgets it later, in
slices. Until then it stays in `deleted`.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from operator import itemgetter
from typing import TypeAlias, TypeVar, final

from tidemill.broker.engine.layout.numbers import GroupId, QueueId, TopicId
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.pop.delivery_table import DeliveryTable
from tidemill.broker.engine.pop.linked_lists import NIL
from tidemill.broker.engine.pop.owner_numbers import OwnerNumbers
from tidemill.broker.engine.pop.progress import GroupSlots, OrderedState, PopProgress
from tidemill.broker.engine.pop.reported_subscriptions import ReportedSubscriptions

ProgressKey: TypeAlias = tuple[GroupId, TopicId, QueueId]
READERS_LOOK_MAX = 32_768  # queues scanned to find the groups of a topic, 30 ns each


@final
class ProgressIndex:
    """All progress, the owner numbers, and the progress of deleted groups and topics."""

    def __init__(self, catalog: Catalog, table: DeliveryTable) -> None:
        self._catalog = catalog
        self.by_key: dict[ProgressKey, PopProgress] = {}
        self._of_group: dict[GroupId, dict[ProgressKey, PopProgress]] = {}
        self.slots: dict[GroupId, GroupSlots] = {}
        self._of_topic: dict[TopicId, dict[ProgressKey, PopProgress]] = {}
        # Progress of deleted groups and topics that is not forgotten yet.
        self.deleted: deque[dict[ProgressKey, PopProgress]] = deque()
        self.numbers = OwnerNumbers(table)
        # Of groups that may have no progress yet.
        self.reported_subscriptions = ReportedSubscriptions(catalog)

    def find_or_add(self, group_id: GroupId, topic_id: TopicId, queue_id: QueueId) -> PopProgress:
        """Return the progress of a group in a queue. Add it if it is missing."""
        key = group_id, topic_id, queue_id
        progress = self.by_key.get(key)
        if progress is None:
            progress = self._new_progress(key, index=self.numbers.next())
            progress.slots = self.slots_of(group_id)
            self.numbers.add(progress)
            self.by_key[key] = progress
            self._of_group.setdefault(group_id, {})[key] = progress
            self._of_topic.setdefault(topic_id, {})[key] = progress
        return progress

    def peek(self, key: ProgressKey) -> PopProgress:
        """Return the progress of a group in a queue, or a new one that is not added."""
        progress = self.by_key.get(key)
        return self._new_progress(key, index=NIL) if progress is None else progress

    def _new_progress(self, key: ProgressKey, *, index: int) -> PopProgress:
        group_id, topic_id, queue_id = key
        topic, group = self._catalog.topics.get(topic_id), self._catalog.groups.get(group_id)
        return PopProgress(
            index=index,
            group_id=group_id,
            topic_id=topic_id,
            named_topic_id=topic.retry_of[1] if topic is not None and topic.retry_of else topic_id,
            queue=self._catalog.queue(topic_id, queue_id),
            ordered=OrderedState() if group is not None and group.is_ordered else None,
        )

    def slots_of(self, group_id: GroupId) -> GroupSlots:
        """Return the number of slots that a group uses."""
        slots = self.slots.get(group_id)
        if slots is None:
            slots = self.slots[group_id] = GroupSlots()
        return slots

    def forget_slots(self) -> None:
        """Forget the slots of all groups. The caller counts them again."""
        self.slots.clear()

    def of_group(self, group_id: GroupId) -> list[PopProgress]:
        """Return the progress of a group in all queues that it reads."""
        return list(self._of_group.get(group_id, {}).values())

    def has_popped(self, group_id: GroupId) -> bool:
        """Return whether a group has begun to read any topic."""
        return group_id in self._of_group

    def topic_ids_of(self, group_id: GroupId) -> set[TopicId]:
        """Return the topics that a group has begun to read."""
        # Without a Python loop: a group may have tens of thousands of keys.
        topic_ids = set(map(itemgetter(1), self._of_group.get(group_id, ())))
        return topic_ids & self._catalog.topics.keys()

    def group_ids_of(self, topic_id: TopicId) -> set[GroupId]:
        """Return groups that have begun to read a topic.

        Only the first `READERS_LOOK_MAX` queues of its readers are scanned, so that some groups
        may be missing.
        """
        keys = islice(self._of_topic.get(topic_id, ()), READERS_LOOK_MAX)
        return set(map(itemgetter(0), keys)) & self._catalog.groups.keys()

    def find_readers(self, topic_id: TopicId) -> set[GroupId] | None:
        """Return all groups that have begun to read a topic; None if it has too many readers."""
        is_few = len(self._of_topic.get(topic_id, ())) <= READERS_LOOK_MAX
        return self.group_ids_of(topic_id) if is_few else None

    # ------------------------------------------------------------ deletion

    def delete_group(self, group_id: GroupId) -> None:
        """Move the progress of a group to `deleted`."""
        self._delete(self._of_group.pop(group_id, None))
        self.slots.pop(group_id, None)  # A sweep empties them, and counts down in its progress.

    def delete_topic(self, topic_id: TopicId) -> None:
        """Move the progress of a topic to `deleted`."""
        self._delete(self._of_topic.pop(topic_id, None))

    def _delete(self, progress: dict[ProgressKey, PopProgress] | None) -> None:
        if progress:
            self.deleted.append(progress)

    def take_deleted(self) -> PopProgress | None:
        """Remove one progress from `deleted` and return it, None if `deleted` is empty."""
        while self.deleted:
            if self.deleted[0]:
                return self.deleted[0].popitem()[1]
            self.deleted.popleft()
        return None

    def remove(self, progress: PopProgress) -> bool:
        """Remove a progress with only void deliveries. Return False if it was removed before."""
        group_id, topic_id = progress.group_id, progress.topic_id
        key = group_id, topic_id, progress.queue.queue_id
        if self.by_key.get(key) is not progress:
            return False  # Its group and its topic were deleted one after the other.
        del self.by_key[key]
        _remove_key(self._of_group, group_id, key)
        _remove_key(self._of_topic, topic_id, key)
        return True

    def renumber(self) -> None:
        """Give new numbers to all progress. No slot in use may name a removed one."""
        self.numbers.renumber(list(self.by_key.values()))


_Id = TypeVar("_Id", GroupId, TopicId)


def _remove_key(
    of_each: dict[_Id, dict[ProgressKey, PopProgress]], id_: _Id, key: ProgressKey
) -> None:
    known = of_each.get(id_)
    if known is not None:
        known.pop(key, None)
        if not known:
            del of_each[id_]
