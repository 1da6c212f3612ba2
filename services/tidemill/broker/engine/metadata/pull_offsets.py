"""How far groups have pulled, by their own word: a part of the catalog (ADR 0046).

An item a (group, topic, queue), apart from what pops have moved. It goes with its group or topic,
or is forgotten by an item of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

from tidemill.broker.engine.layout.numbers import GroupId, QueueId, TopicId

if TYPE_CHECKING:
    from collections.abc import Mapping

# At one broker: a snapshot, and the deletion of a topic or a group, look at all of theirs in one
# turn, some milliseconds at the most.
PULL_OFFSETS_MAX: Final = 20_000
# Of these, so many are for groups that have few: one that pulls all that there is, or makes believe
# to, leaves others room to begin.
RESERVED_OFFSETS: Final = 4_000
FEW_OFFSETS: Final = 64  # eight topics of eight queues each
# In place of an offset: it is forgotten. A program that knows no such thing takes it for an offset,
# behind which nothing is kept for anybody.
FORGOTTEN: Final = 2**63 - 1
ITEM_PREFIX: Final = "pull "  # of the keys of these items

Key: TypeAlias = tuple[GroupId, TopicId, QueueId]


@final
class PullOffsets:
    """The offsets, by group, topic and queue."""

    def __init__(self) -> None:
        self._offsets: dict[Key, int] = {}
        # Of each group and of each topic, what dies with it.
        self._of_group: dict[GroupId, dict[Key, None]] = {}
        self._of_topic: dict[TopicId, dict[Key, None]] = {}
        self._largest: GroupId | None = None  # with most; None: it has to be looked for

    @property
    def all(self) -> Mapping[Key, int]:
        """All that there are."""
        return self._offsets

    def find(self, key: Key) -> int | None:
        """Return how far a group has pulled; None: it has not said."""
        return self._offsets.get(key)

    def of_group(self, group_id: GroupId) -> list[Key]:
        """Return where a group has said how far it is."""
        return list(self._of_group.get(group_id, ()))

    def has_room(self, group_id: GroupId) -> bool:
        """Whether a group may have another one."""
        left = PULL_OFFSETS_MAX - len(self._offsets)
        return left > (0 if self.count_of_group(group_id) < FEW_OFFSETS else RESERVED_OFFSETS)

    def count_of_group(self, group_id: GroupId) -> int:
        """Return in how many queues a group has said how far it is."""
        return len(self._of_group.get(group_id, ()))

    def find_largest(self) -> GroupId | None:
        """Return the group that has most; None: there are none."""
        if self._largest is None:
            self._largest = max(self._of_group, key=self.count_of_group, default=None)
        return self._largest

    def apply(self, item: Mapping[str, Any]) -> tuple[str, bool]:
        """Fold an item in; return its key in the catalog, and whether it is there now."""
        key = GroupId(item["group"]), TopicId(item["topic"]), QueueId(item["queue"])
        if item["offset"] == FORGOTTEN:
            # Retention may have taken what it was said by, and the deletion of its group all of it.
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
        """Forget a group; return the keys in the catalog of what went."""
        return [self._forget(key) for key in self.of_group(group_id)]

    def forget_topic(self, topic_id: TopicId) -> list[str]:
        """Forget a topic; return the keys in the catalog of what went."""
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
    """Return whose offset an item is, by its key in the catalog."""
    group_id, topic_id, queue_id = item_key.removeprefix(ITEM_PREFIX).split(" ")
    return GroupId(int(group_id)), TopicId(int(topic_id)), QueueId(int(queue_id))


def pull_offset_item(key: Key, offset: int) -> dict[str, Any]:
    """Return the configuration item that says how far a group has pulled."""
    return {"op": "pullOffset", "group": key[0], "topic": key[1], "queue": key[2], "offset": offset}
