"""The catalog: topics, consumer groups and facts about the broker, as the fold of CONFIG records.

An id belongs to one incarnation and is never assigned again, so a record or a request cannot mean a
later topic of the same name. Queues are separate from topics: a replay that begins in the middle of
the log may meet a message before the record of its topic.

A retry topic lives as long as its group and its topic. A deletion may remove tens of thousands of
them. They are dead at once, and forgotten one by one (`forget_next_orphan`).

It is one file because each kind of item has its change and its snapshot side by side.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from enum import IntEnum
from itertools import chain
from typing import Any, TypeVar, final

from tidemill.broker.engine.layout.config import decode_item, encode_item
from tidemill.broker.engine.layout.numbers import GroupId, LogOffset, QueueId, TopicId
from tidemill.broker.engine.layout.record import UnknownRecord
from tidemill.broker.engine.metadata.audit_log import AuditLog
from tidemill.broker.engine.metadata.dedup_policy import (
    NO_PLACEMENT,
    DedupPolicy,
    KeyPlacement,
    decode_dedup,
    decode_placement,
    placement_item,
)
from tidemill.broker.engine.metadata.deleted_names import DeletedName, DeletedNames
from tidemill.broker.engine.metadata.ended_handles import EndedHandles
from tidemill.broker.engine.metadata.group_pause import GroupPause, decode_pause
from tidemill.broker.engine.metadata.membership import (
    ITEM_PREFIX,
    Membership,
    Placements,
    broker_group_item,
    home_item,
)
from tidemill.broker.engine.metadata.operations import Operations
from tidemill.broker.engine.metadata.priority import FACTOR_DEFAULT
from tidemill.broker.engine.metadata.pull_offsets import ITEM_PREFIX as PULL_PREFIX
from tidemill.broker.engine.metadata.pull_offsets import PullOffsets, key_of, pull_offset_item
from tidemill.broker.engine.metadata.security_items import ITEM_PREFIX as SECURITY_PREFIX
from tidemill.broker.engine.metadata.security_items import (
    SECURITY_OPS,
    VERSION_OP,
    ItemKey,
    SecurityItems,
    catalog_key,
    parse_key,
    version_item,
)
from tidemill.broker.engine.metadata.security_items import key_of as security_key_of
from tidemill.broker.engine.metadata.settled_letters import SettledLetters
from tidemill.broker.engine.metadata.topic_creator import TopicCreator, decode_creator
from tidemill.broker.engine.metadata.topic_retention import (
    BROKER_DEFAULT,
    TopicRetention,
    decode_retention,
    retention_item,
)
from tidemill.broker.engine.metadata.transaction_policy import (
    DEFAULT_POLICY,
    TransactionPolicy,
    decode_policy,
)
from tidemill.broker.engine.store.consume_queue import ConsumeQueue
from tidemill.common.feature_level import FEATURE_LEVEL, FIRST_LEVEL

QUEUES_MAX = 1024  # per topic: a queue id has 16 bits, and a poll checks every queue
DEFAULT_MAX_ATTEMPTS = 17  # the reference's 16 retries and the first delivery
BROKER_ITEMS = (
    "broker",
    "nextId",
    "broughtBack",
    "clockBack",
    "featureLevel",
    "home",
    VERSION_OP,
)  # one item of each
MINUTE_MS = 60_000
RESUMED = 0  # the end of a pause that an operator has ended
DEFAULT_RETRY_MS = (
    10_000,
    30_000,
    *(n * MINUTE_MS for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30, 60, 120)),
)


class TopicType(IntEnum):
    """The message types of topics (numbers of broker.proto)."""

    NORMAL = 1
    FIFO = 2
    DELAY = 3
    TRANSACTION = 4
    LITE = 5
    PRIORITY = 6
    MIXED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """One incarnation of a topic."""

    id: TopicId
    version: int
    name: str
    type: TopicType
    queues: int
    # Of a retry topic: the (group id, topic id) of its messages.
    retry_of: tuple[GroupId, TopicId] | None = None
    is_system: bool = False
    # Longest extra delay of a delayed message if its second is full.
    delivery_spread_ms: int = 0
    # At a follower: the topic's id at the home. 0 at the home, and for a broker's own topics.
    home_id: int = 0
    # The queues of a message group are chosen from these. Empty: only the home has queues.
    placements: Placements = ()
    # Creation time in a cluster; 0 for a topic from before, or of a single broker. A home that was
    # restored from a backup assigns ids a second time; this time tells the incarnations apart.
    created_at_ms: int = 0
    retention: TopicRetention = BROKER_DEFAULT
    transaction: TransactionPolicy = DEFAULT_POLICY
    dedup: DedupPolicy | None = None  # None: messages have no dedup keys
    placement: KeyPlacement = NO_PLACEMENT  # the owners of its dedup keys
    creator: TopicCreator | None = None  # None: unknown


# (id of a topic at the home, time in ms), in order of the ids.
Beginnings = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExponentialRetry:
    """Back-off that grows by a factor."""

    initial_ms: int
    max_ms: int
    multiplier: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerGroup:
    """One incarnation of a consumer group."""

    id: GroupId
    version: int
    name: str
    is_ordered: bool = False
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    # Exactly one policy is used: exponential, or the list if that is None.
    exponential: ExponentialRetry | None = None
    customized_ms: tuple[int, ...] = DEFAULT_RETRY_MS
    start_from_latest: bool = False
    home_id: int = 0  # as in Topic
    created_at_ms: int = 0
    # The topics that it reads at any broker group, with the home's ids, and since when.
    begun: Beginnings = ()
    priority_factor: int = FACTOR_DEFAULT  # for topics of type PRIORITY
    paused: GroupPause | None = None  # it may be over

    def is_paused(self, now_ms: int) -> bool:
        """Whether its pops find nothing at a wall time."""
        return self.paused is not None and now_ms < self.paused.until_ms


@dataclass(slots=True)
class ConfigChanges:
    """Changes since the last call of `take_config_changes`."""

    topics: dict[TopicId, Topic] = field(default_factory=dict)
    groups: dict[GroupId, ConsumerGroup] = field(default_factory=dict)
    deleted_topic_ids: set[TopicId] = field(default_factory=set)
    deleted_group_ids: set[GroupId] = field(default_factory=set)
    membership: Membership | None = None  # the new membership, if it changed
    # Encoded items and deletions, in the order of their versions.
    security_items: dict[ItemKey, bytes] = field(default_factory=dict)
    security_version: int | None = None  # the new version of the table, if it changed

    @property
    def has_config(self) -> bool:
        """Whether topics, groups or the membership changed."""
        return bool(
            self.topics
            or self.groups
            or self.deleted_topic_ids
            or self.deleted_group_ids
            or self.membership
        )

    @property
    def has_security(self) -> bool:
        """Whether security items or their version changed."""
        return bool(self.security_items) or self.security_version is not None

    def __bool__(self) -> bool:
        return self.has_config or self.has_security


@final
class Catalog:
    """All topics and groups by id and by name, and the other items.

    It is one class, because all items share `stated_at` and `changes`, and a deletion removes items
    of several kinds.
    """

    def __init__(self) -> None:
        self.topics: dict[TopicId, Topic] = {}
        self.groups: dict[GroupId, ConsumerGroup] = {}
        self.topic_ids: dict[str, TopicId] = {}
        self.group_ids: dict[str, GroupId] = {}
        self.queues: dict[tuple[TopicId, QueueId], ConsumeQueue] = {}
        # TRIM records and deletions of topics: it changes when messages have died.
        self.deaths = 0
        # For appends: the queues of topics that producers may send to.
        self.open_queues: dict[TopicId, list[ConsumeQueue]] = {}
        self.retry_topic_ids: dict[tuple[GroupId, TopicId], TopicId] = {}
        # Retry topics of each group and of each topic, which die with them. These are dictionaries,
        # not sets, because the garbage collector skips dictionaries that hold only numbers.
        self._retries_of_group: dict[GroupId, dict[TopicId, None]] = {}
        self._retries_of_topic: dict[TopicId, dict[TopicId, None]] = {}
        # Dead retry topics that are not forgotten yet.
        self.orphans: deque[dict[TopicId, None]] = deque()
        # At a follower: by the ids of the home.
        self.topic_ids_at_home: dict[int, TopicId] = {}
        self.group_ids_at_home: dict[int, GroupId] = {}
        # The ends of pauses, also of past ones; RESUMED: an operator has ended the pause.
        self.pauses: dict[GroupId, int] = {}
        # At a follower: groups with begins that the home may not know; emptied by the next report.
        self.unreported_begun: dict[GroupId, None] = {}
        self.deleted_names = DeletedNames()
        self.membership = Membership()
        self.is_draining = False  # for appends: this broker rejects producers
        self.broker_name = ""
        self.handle_secret = b""
        self.next_id = 1
        # The handles of deliveries before this log offset may contain a deadline that is too late:
        # the clock was set back since.
        self.brought_back_before = 0
        # The highest level of records in the log (ADR 0065).
        self.feature_level = FIRST_LEVEL
        self.ended_handles = EndedHandles()
        self.pull_offsets = PullOffsets()
        self.security = SecurityItems()
        self.audit = AuditLog()
        self.settled_letters = SettledLetters()
        self.operations = Operations()
        # Log offsets at which the times of records fall, ascending.
        self.clock_falls: tuple[int, ...] = ()
        self.stated_at: dict[str, int] = {}  # log offset of the newest record of each item
        self.changes = ConfigChanges()

    # ------------------------------------------------------------ queries

    def find_topic(self, name: str) -> Topic | None:
        """Return the topic of that name."""
        id_ = self.topic_ids.get(name)
        return None if id_ is None else self.topics[id_]

    def find_group(self, name: str) -> ConsumerGroup | None:
        """Return the group of that name."""
        id_ = self.group_ids.get(name)
        return None if id_ is None else self.groups[id_]

    def queue(self, topic_id: TopicId, queue_id: QueueId) -> ConsumeQueue:
        """Return a queue. Create it if it is new."""
        key = topic_id, queue_id
        queue = self.queues.get(key)
        if queue is None:
            queue = self.queues[key] = ConsumeQueue(topic_id, queue_id)
        return queue

    def queues_of(self, topic: Topic) -> list[ConsumeQueue]:
        """Return all queues of a topic."""
        return [self.queue(topic.id, QueueId(number)) for number in range(topic.queues)]

    def is_alive(self, topic_id: TopicId) -> bool:
        """Return whether a topic exists and is not an orphan."""
        topic = self.topics.get(topic_id)
        return topic is not None and not self._is_orphan(topic)

    def retry_topics_of(self, group_id: GroupId) -> list[TopicId]:
        """Return the retry topics of a group."""
        return list(self._retries_of_group.get(group_id, ()))

    def retry_topics_for(self, topic_id: TopicId) -> list[TopicId]:
        """Return the retry topics of all groups for a topic."""
        return [id_ for id_ in self._retries_of_topic.get(topic_id, ()) if self.is_alive(id_)]

    def retention_of(self, topic: Topic) -> TopicRetention:
        """Return the retention of a topic; a retry topic has that of its topic, without `bytes`."""
        if topic.retry_of is None:
            return topic.retention
        origin = self.topics.get(topic.retry_of[1])
        return BROKER_DEFAULT if origin is None else replace(origin.retention, bytes=None)

    def _is_orphan(self, topic: Topic) -> bool:
        if topic.retry_of is None:
            return False
        group_id, topic_id = topic.retry_of
        return group_id not in self.groups or topic_id not in self.topics

    def topic_name(self, topic_id: TopicId) -> str:
        """Return the name of a topic, also of a deleted one; "" if it is unknown."""
        topic = self.topics.get(topic_id)
        return topic.name if topic is not None else _name(self.deleted_names.topics.get(topic_id))

    def group_name(self, group_id: GroupId) -> str:
        """Return the name of a group, also of a deleted one; "" if it is unknown."""
        group = self.groups.get(group_id)
        return group.name if group is not None else _name(self.deleted_names.groups.get(group_id))

    # ------------------------------------------------------------ fold

    def apply(
        self, config: dict[str, Any], log_offset: LogOffset, *, is_stated: bool = False
    ) -> None:
        """Apply one configuration item of a CONFIG record.

        `is_stated`: of a STATE record or of a snapshot, which repeat items of earlier records.
        """
        match config["op"]:
            case "broker":
                self.broker_name = config["name"]
                self.handle_secret = bytes.fromhex(config["handleSecret"])
                self.stated_at["broker"] = log_offset
            case "nextId":
                self.next_id = max(self.next_id, config["nextId"])
                self.stated_at["nextId"] = log_offset
            case "broughtBack":
                self.brought_back_before = max(self.brought_back_before, config["before"])
                self.stated_at["broughtBack"] = log_offset
            case "endHandles":
                self.stated_at[self.ended_handles.apply(config)] = log_offset
            case "clockBack":
                self.clock_falls = tuple(config["at"])
                self.brought_back_before = max(self.brought_back_before, *self.clock_falls)
                self.stated_at["clockBack"] = log_offset
            case "featureLevel":
                self._apply_feature_level(config["level"], log_offset)
            case "home":
                self._apply_membership(config)
                self.stated_at["home"] = log_offset
            case "brokerGroup":
                self._apply_membership(config)
                self.stated_at[ITEM_PREFIX + config["group"]["name"]] = log_offset
            case "deleteBrokerGroup":
                self._apply_membership(config)
                self.stated_at.pop(ITEM_PREFIX + config["name"], None)
            case "topic":
                self._put_topic(decode_topic(config["topic"]), log_offset)
            case "group":
                self._put_group(decode_group(config["group"]), log_offset)
            case "pullOffset":
                key, is_there = self.pull_offsets.apply(config)
                if is_there:
                    self.stated_at[key] = log_offset
                else:
                    self.stated_at.pop(key, None)
            case "deleteTopic":
                self.deleted_names.note_deletion(log_offset, config["atMs"])
                self._delete_topic(config["id"])
            case "deleteGroup":
                self.deleted_names.note_deletion(log_offset, config["atMs"])
                self._delete_group(config["id"])
            case "gone":
                self.deleted_names.apply(config, log_offset)
            case op if op in SECURITY_OPS:
                self._apply_security(config, log_offset, is_stated=is_stated)
            case other:
                raise UnknownRecord(f"configuration item {other!r} at log offset {log_offset}")

    def _apply_security(
        self, config: dict[str, Any], log_offset: LogOffset, *, is_stated: bool
    ) -> None:
        if not is_stated or config["op"] == VERSION_OP:
            # A stated item has the version of its own change, which may be an old one.
            if config["version"] != self.security.version:
                self.security.version = self.changes.security_version = config["version"]
            self.stated_at[VERSION_OP] = log_offset
        key, is_changed = security_key_of(config), self.security.apply(config)
        if is_changed:
            # The newest change comes last.
            self.changes.security_items.pop(key, None)
            self.changes.security_items[key] = encode_item(config)
        if self.security.find(key) is not None:
            self.stated_at[catalog_key(key)] = log_offset
        else:
            self.stated_at.pop(catalog_key(key), None)

    def _apply_membership(self, config: dict[str, Any]) -> None:
        self.membership.apply(config)
        home = self.membership.home
        self.is_draining = home is not None and home.is_draining
        self.changes.membership = self.membership

    def _apply_feature_level(self, level: int, log_offset: LogOffset) -> None:
        if level > FEATURE_LEVEL:
            raise UnknownRecord(f"feature level {level} at log offset {log_offset}")
        self.feature_level = max(self.feature_level, level)
        self.stated_at["featureLevel"] = log_offset

    def _put_topic(self, topic: Topic, log_offset: LogOffset) -> None:
        if self.topics.get(topic.id) != topic:
            self.changes.topics[topic.id] = topic
        self.topics[topic.id] = topic
        self.topic_ids[topic.name] = topic.id
        self.next_id = max(self.next_id, topic.id + 1)
        self.stated_at[f"topic {topic.id}"] = log_offset
        if topic.home_id:
            self.topic_ids_at_home[topic.home_id] = topic.id
        queues = self.queues_of(topic)
        if not topic.is_system:
            self.open_queues[topic.id] = queues
        if topic.retry_of is not None:
            group_id, topic_id = topic.retry_of
            self.retry_topic_ids[topic.retry_of] = topic.id
            self._retries_of_group.setdefault(group_id, {})[topic.id] = None
            self._retries_of_topic.setdefault(topic_id, {})[topic.id] = None

    def _put_group(self, group: ConsumerGroup, log_offset: LogOffset) -> None:
        if self.groups.get(group.id) != group:
            self.changes.groups[group.id] = group
        self.groups[group.id] = group
        if group.paused is not None:
            self.pauses[group.id] = group.paused.until_ms
        elif group.id in self.pauses:
            self.pauses[group.id] = RESUMED
        self.group_ids[group.name] = group.id
        self.next_id = max(self.next_id, group.id + 1)
        self.stated_at[f"group {group.id}"] = log_offset
        if group.home_id:
            self.group_ids_at_home[group.home_id] = group.id
            if group.begun:
                self.unreported_begun[group.id] = None

    def _delete_topic(self, topic_id: TopicId) -> None:
        self._forget_topic(topic_id)
        self._queue_orphans(self._retries_of_topic.pop(topic_id, {}))

    def _delete_group(self, group_id: GroupId) -> None:
        self._queue_orphans(self._retries_of_group.pop(group_id, {}))
        group = self.groups.pop(group_id, None)
        self.pauses.pop(group_id, None)
        if group is not None:
            self.deleted_names.add_group(
                group_id, group.name, self.stated_at.get(f"group {group_id}", 0)
            )
            del self.group_ids[group.name]
            self.group_ids_at_home.pop(group.home_id, None)
            self.unreported_begun.pop(group_id, None)
            self.changes.groups.pop(group_id, None)
            self.changes.deleted_group_ids.add(group_id)
        pulled = self.pull_offsets.forget_group(group_id)
        for key in (f"group {group_id}", self.ended_handles.forget(group_id), *pulled):
            self.stated_at.pop(key, None)

    def _queue_orphans(self, topic_ids: dict[TopicId, None]) -> None:
        if topic_ids:
            self.orphans.append(topic_ids)

    def forget_next_orphan(self) -> TopicId:
        """Forget one orphan, and return its id."""
        topic_ids = self.orphans[0]
        topic_id, _ = topic_ids.popitem()
        if not topic_ids:
            self.orphans.popleft()
        if topic_id in self.topics:  # Its group and its topic may have died one after the other.
            self._forget_topic(topic_id)
        return topic_id

    def forget_orphans(self) -> None:
        """Forget the orphans of the time when the snapshot was written."""
        for topic in [self.topics[retry_id] for retry_id in self.retry_topic_ids.values()]:
            if self._is_orphan(topic):
                self._forget_topic(topic.id)

    def forget_unknown_queues(self) -> None:
        """Forget the queues of topics that do not exist any longer.

        The log may have messages of a topic, and not the record of its deletion.
        """
        for key in [key for key in self.queues if key[0] not in self.topics]:
            del self.queues[key]

    def _forget_topic(self, topic_id: TopicId) -> None:
        topic = self.topics.pop(topic_id, None)
        if topic is not None:
            self.deleted_names.add_topic(
                topic_id, topic.name, self.stated_at.get(f"topic {topic_id}", 0)
            )
            for number in range(topic.queues):
                del self.queues[topic_id, QueueId(number)]
        else:
            # The topic's own record was not replayed, so its number of queues is unknown.
            for key in [key for key in self.queues if key[0] == topic_id]:
                del self.queues[key]
        self.open_queues.pop(topic_id, None)
        self.settled_letters.forget_topic(topic_id)
        self.stated_at.pop(f"topic {topic_id}", None)
        for item_key in self.pull_offsets.forget_topic(topic_id):
            self.stated_at.pop(item_key, None)
        if topic is None:
            return
        if self.topic_ids[topic.name] == topic_id:  # A later topic may have the name.
            del self.topic_ids[topic.name]
        self.topic_ids_at_home.pop(topic.home_id, None)
        if topic.retry_of is not None:
            group_id, of_topic_id = topic.retry_of
            self.retry_topic_ids.pop(topic.retry_of, None)
            _remove_link(self._retries_of_group, group_id, topic_id)
            _remove_link(self._retries_of_topic, of_topic_id, topic_id)
        self.changes.topics.pop(topic_id, None)
        self.changes.deleted_topic_ids.add(topic_id)

    # ------------------------------------------------------------ state

    def find_stated_before(self, key: str, log_offset: LogOffset) -> dict[str, Any] | None:
        """Return an item, or None if it is deleted or a later record states it."""
        if self.stated_at.get(key, log_offset) >= log_offset:
            return None
        kind, _, number = key.partition(" ")
        # A topic that is stated after the record of its deletion would stay forever.
        is_dead = kind == "topic" and not self.is_alive(TopicId(int(number)))
        if key.startswith(PULL_PREFIX):
            # It may belong to an orphan.
            is_dead = not self.is_alive(key_of(key)[1])
        return None if is_dead else self._item(key)

    @property
    def item_count(self) -> int:
        """Number of items."""
        return len(self.stated_at) + len(self.deleted_names.topics) + len(self.deleted_names.groups)

    def items(self) -> Iterator[dict[str, Any] | bytes]:
        """Return all items for a snapshot, as of this call, even if they are read later.

        Security items are encoded already.
        """
        keys = *BROKER_ITEMS, *self.ended_handles.keys()
        keys += tuple([ITEM_PREFIX + name for name in self.membership.groups])
        own = {key: self._item(key) for key in keys if key in self.stated_at}
        # Each change puts a new object, so copies of the references stay unchanged.
        topics, groups = dict(self.topics), dict(self.groups)
        pulled = dict(self.pull_offsets.all)
        secured = dict(self.security.items)

        def item(key: str) -> dict[str, Any] | bytes:
            if key.startswith(SECURITY_PREFIX):
                return secured[parse_key(key)]
            kind, _, number = key.partition(" ")
            if kind == "topic":
                return topic_item(topics[TopicId(int(number))])
            if key.startswith(PULL_PREFIX):
                return pull_offset_item(key_of(key), pulled[key_of(key)])
            return group_item(groups[GroupId(int(number))]) if kind == "group" else own[key]

        return chain(map(item, list(self.stated_at)), list(self.deleted_names.items()))

    def _item(self, key: str) -> dict[str, Any]:
        kind, _, number = key.partition(" ")
        if kind == "broker":
            secret = self.handle_secret.hex()
            return {"op": "broker", "name": self.broker_name, "handleSecret": secret}
        if kind == "nextId":
            return {"op": "nextId", "nextId": self.next_id}
        if kind == "broughtBack":
            return {"op": "broughtBack", "before": self.brought_back_before}
        if kind == "clockBack":
            return {"op": "clockBack", "at": list(self.clock_falls)}
        if kind == "featureLevel":
            return feature_level_item(self.feature_level)
        if kind == "home":
            membership = self.membership
            return home_item(membership.home, left_cluster_id=membership.left_cluster_id)
        if key.startswith(ITEM_PREFIX):
            return broker_group_item(self.membership.groups[number])
        if kind == "topic":
            return topic_item(self.topics[TopicId(int(number))])
        if key.startswith(PULL_PREFIX):
            return pull_offset_item(key_of(key), self.pull_offsets.all[key_of(key)])
        if kind == "handles":
            return self.ended_handles.item(key)
        if kind == VERSION_OP:
            return version_item(self.security.version)
        if key.startswith(SECURITY_PREFIX):
            return decode_item(self.security.items[parse_key(key)])
        return group_item(self.groups[GroupId(int(number))])


def _name(deleted: DeletedName | None) -> str:
    return "" if deleted is None else deleted.name


_Id = TypeVar("_Id", GroupId, TopicId)


def _remove_link(of_each: dict[_Id, dict[TopicId, None]], id_: _Id, topic_id: TopicId) -> None:
    known = of_each.get(id_)
    if known is not None:
        known.pop(topic_id, None)
        if not known:
            del of_each[id_]


def feature_level_item(level: int) -> dict[str, Any]:
    """Return the configuration item that raises the feature level of the log."""
    return {"op": "featureLevel", "level": level}


# Tuples of names, because `asdict` copies deeply and takes ten times as long.
_TOPIC_FIELDS = tuple([one.name for one in fields(Topic)])
_GROUP_FIELDS = tuple([one.name for one in fields(ConsumerGroup)])


def topic_item(topic: Topic) -> dict[str, Any]:
    """Return the configuration item that puts a topic."""
    values = {name: getattr(topic, name) for name in _TOPIC_FIELDS}
    # Leave out fields that most topics do not use: a broker may have tens of thousands of topics.
    for name in ("delivery_spread_ms", "home_id", "placements", "created_at_ms"):
        if not values[name]:
            del values[name]
    if topic.retention == BROKER_DEFAULT:
        del values["retention"]
    else:
        values["retention"] = retention_item(topic.retention)
    if topic.transaction == DEFAULT_POLICY:
        del values["transaction"]
    else:
        values["transaction"] = topic.transaction.as_item()
    if topic.dedup is None:
        del values["dedup"]
    else:
        values["dedup"] = topic.dedup.as_item()
    if topic.placement == NO_PLACEMENT:
        del values["placement"]
    else:
        values["placement"] = placement_item(topic.placement)
    if topic.creator is None:
        del values["creator"]
    else:
        values["creator"] = topic.creator.as_item()
    return {"op": "topic", "topic": values}


def group_item(group: ConsumerGroup) -> dict[str, Any]:
    """Return the configuration item that puts a group."""
    values = {name: getattr(group, name) for name in _GROUP_FIELDS}
    for name in ("home_id", "created_at_ms", "begun"):  # As for topics.
        if not values[name]:
            del values[name]
    if group.priority_factor == FACTOR_DEFAULT:
        del values["priority_factor"]
    if group.paused is None:
        del values["paused"]
    else:
        values["paused"] = group.paused.as_item()
    if group.exponential is not None:
        values["exponential"] = asdict(group.exponential)
    return {"op": "group", "group": values}


def decode_topic(values: dict[str, Any]) -> Topic:
    """Build a topic from its JSON form."""
    topic = Topic(**values)
    retry_of = tuple(values["retry_of"]) if values["retry_of"] else None
    placements = tuple([(name, queues) for name, queues in values.get("placements", ())])
    return replace(
        topic,
        type=TopicType(values["type"]),
        retry_of=retry_of,
        placements=placements,
        retention=decode_retention(values.get("retention", {})),
        transaction=decode_policy(values.get("transaction", {})),
        dedup=decode_dedup(values.get("dedup")),
        placement=decode_placement(values.get("placement")),
        creator=decode_creator(values.get("creator")),
    )


def decode_group(values: dict[str, Any]) -> ConsumerGroup:
    """Build a group from its JSON form."""
    exponential = values["exponential"]
    return replace(
        ConsumerGroup(**values),
        exponential=ExponentialRetry(**exponential) if exponential else None,
        customized_ms=tuple(values["customized_ms"]),
        begun=tuple([(topic_id, at_ms) for topic_id, at_ms in values.get("begun", ())]),
        paused=decode_pause(values.get("paused")),
    )
