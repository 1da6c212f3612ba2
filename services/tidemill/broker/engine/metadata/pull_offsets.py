"""Pull offsets that groups have reported: a part of the catalog (ADR 0046).

There is one item per (group, topic, queue), independent of pops. It is deleted with its group or
topic, or by an item of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

from tidemill.broker.engine.layout.numbers import GroupId, QueueId, TopicId

if TYPE_CHECKING:
    from collections.abc import Mapping

# At one broker. A snapshot, and the deletion of a topic or a group, visit all of their items in one
# turn, in a few milliseconds.
PULL_OFFSETS_MAX: Final = 20_000
# Reserved for groups with few offsets. A group that pulls everything leaves room for others.
RESERVED_OFFSETS: Final = 4_000
FEW_OFFSETS: Final = 64  # eight topics of eight queues each
# An item with this offset deletes the pull offset.
FORGOTTEN: Final = 2**63 - 1
ITEM_PREFIX: Final = "pull "  # of the keys of these items

Key: TypeAlias = tuple[GroupId, TopicId, QueueId]


@final
class PullOffsets:
    """Pull offsets by group, topic and queue."""

    def __init__(self) -> None:
        self._offsets: dict[Key, int] = {}
        # Keys of each group and of each topic, which are deleted with them.
        self._of_group: dict[GroupId, dict[Key, None]] = {}
        self._of_topic: dict[TopicId, dict[Key, None]] = {}
        self._largest: GroupId | None = None  # the group with the most offsets; None: unknown

    @property
    def all(self) -> Mapping[Key, int]:
        """All pull offsets."""
        return self._offsets

    def find(self, key: Key) -> int | None:
        """Return the pull offset of a key; None if the group has not reported one."""
        return self._offsets.get(key)

    def of_group(self, group_id: GroupId) -> list[Key]:
        """Return the keys of a group."""
        return list(self._of_group.get(group_id, ()))

    def group_ids_of(self, topic_id: TopicId) -> set[GroupId]:
        """Return the groups with a pull offset in a topic."""
        return {key[0] for key in self._of_topic.get(topic_id, ())}

    def has_room(self, group_id: GroupId) -> bool:
        """Return whether a group may have another offset."""
        free_count = PULL_OFFSETS_MAX - len(self._offsets)
        return free_count > (0 if self.count_of_group(group_id) < FEW_OFFSETS else RESERVED_OFFSETS)

    def count_of_group(self, group_id: GroupId) -> int:
        """Return the number of offsets of a group."""
        return len(self._of_group.get(group_id, ()))

    def find_largest(self) -> GroupId | None:
        """Return the group with the most offsets; None if there are none."""
        if self._largest is None:
            self._largest = max(self._of_group, key=self.count_of_group, default=None)
        return self._largest

    def apply(self, item: Mapping[str, Any]) -> tuple[str, bool]:
        """Apply an item; return its key in the catalog, and whether it exists now."""
        key = GroupId(item["group"]), TopicId(item["topic"]), QueueId(item["queue"])
        if item["offset"] == FORGOTTEN:
            # Retention may have removed the record of the offset, or a deletion its whole group.
            return (self._forget(key) if key in self._offsets else item_key(key)), False
        self._offsets[key] = item["offset"]
        self._of_group.setdefault(key[0], {})[key] = None
        self._of_topic.setdefault(key[1], {})[key] = None
        if self._largest is not None and (
            self.count_of_group(key[0]) > self.count_of_group(self._largest)
        ):
            self._largest = key[0]
        return item_key(key), True

    def forget_group(self, group_id: GroupId) -> list[str]:
        """Forget a group; return the catalog keys of its offsets."""
        return [self._forget(key) for key in self.of_group(group_id)]

    def forget_topic(self, topic_id: TopicId) -> list[str]:
        """Forget a topic; return the catalog keys of its offsets."""
        return [self._forget(key) for key in list(self._of_topic.get(topic_id, ()))]

    def _forget(self, key: Key) -> str:
        del self._offsets[key]
        if key[0] == self._largest:
            self._largest = None
        for of_each, id_ in ((self._of_group, key[0]), (self._of_topic, key[1])):
            known: dict[Key, None] = of_each[id_]  # type: ignore[index]  # each with its own ids
            del known[key]
            if not known:
                del of_each[id_]  # type: ignore[arg-type]  # each with its own ids
        return item_key(key)


def item_key(key: Key) -> str:
    """Return the key of an item in the catalog."""
    return f"{ITEM_PREFIX}{key[0]} {key[1]} {key[2]}"


def key_of(item_key: str) -> Key:
    """Return the group, topic and queue of an item's key."""
    group_id, topic_id, queue_id = item_key.removeprefix(ITEM_PREFIX).split(" ")
    return GroupId(int(group_id)), TopicId(int(topic_id)), QueueId(int(queue_id))


def pull_offset_item(key: Key, offset: int) -> dict[str, Any]:
    """Return the configuration item with the pull offset of a group."""
    return {"op": "pullOffset", "group": key[0], "topic": key[1], "queue": key[2], "offset": offset}
