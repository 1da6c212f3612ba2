"""Changes of topics, consumer groups and offsets, by operators or on first use.

It is one file, because all changes have the same checks of names, limits and the home.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, final

from tidemill.broker.engine.config import EngineConfig
from tidemill.broker.engine.configuration.dedup_setting import with_dedup
from tidemill.broker.engine.dedup.tables import KeyTables
from tidemill.broker.engine.fold import Fold
from tidemill.broker.engine.layout.config import ConfigItem
from tidemill.broker.engine.layout.numbers import GroupId, QueueId, TopicId
from tidemill.broker.engine.message_store import MessageStore
from tidemill.broker.engine.metadata.catalog import (
    QUEUES_MAX,
    Catalog,
    ConsumerGroup,
    ExponentialRetry,
    Topic,
    TopicType,
    group_item,
    topic_item,
)
from tidemill.broker.engine.metadata.dedup_policy import DEDUP_LEVEL, NO_DEDUP_CHANGE, DedupChange
from tidemill.broker.engine.metadata.priority import (
    FACTOR_DEFAULT,
    LEVELS_DEFAULT,
    LEVELS_MAX,
    PRIORITY_LEVEL,
    check_factor,
)
from tidemill.broker.engine.metadata.pull_offsets import (
    FEW_OFFSETS,
    FORGOTTEN,
    PULL_OFFSETS_MAX,
    RESERVED_OFFSETS,
    pull_offset_item,
)
from tidemill.broker.engine.metadata.quota import Quota
from tidemill.broker.engine.metadata.system_topics import ensure_system_topic
from tidemill.broker.engine.metadata.topic_creator import CREATOR_LEVEL, FIRST_USE, TopicCreator
from tidemill.broker.engine.metadata.topic_retention import (
    BROKER_DEFAULT,
    NO_CHANGE,
    RETENTION_LEVEL,
    RetentionChange,
)
from tidemill.broker.engine.metadata.transaction_policy import (
    DEFAULT_POLICY,
    NO_POLICY_CHANGE,
    TRANSACTION_LEVEL,
    PolicyChange,
)
from tidemill.broker.engine.pop.consumption import Consumption
from tidemill.broker.engine.pop.progress_index import ProgressKey
from tidemill.broker.engine.queries.inspection import Inspection
from tidemill.broker.engine.store.consume_queue import ConsumeQueue
from tidemill.common.errors import (
    BadRequest,
    Conflict,
    Forbidden,
    GroupNotFound,
    IllegalOffset,
    Overloaded,
    QueueNotFound,
    TopicNotFound,
)
from tidemill.message.resource_names import (
    BROKER_DEAD_LETTER_TOPICS,
    DEAD_LETTER_TOPIC_PREFIX,
    HALF_TOPIC,
    TIMER_TOPIC,
)

TYPES_WITH_ORDER = {TopicType.FIFO, TopicType.MIXED}
MAX_ATTEMPTS_MAX = 1000
RETRY_STEPS_MAX = 100
SPREAD_MS_MAX = 3_600_000  # an hour: deliveries stay near their time


class ResetTarget(NamedTuple):
    """The target of an offset reset: exactly one of the five fields is set."""

    offsets: Sequence[int] | None = None  # by queue, as `Inspection.look_up_time` finds them
    queues: Mapping[QueueId, int] | None = None  # exact offsets; other queues stay as they are
    offset: int | None = None
    earliest: bool = False
    latest: bool = False


@final
class Administration:
    """The commands that change the configuration.

    It is one class, because the commands share the checks of names, quotas and the home.
    """

    def __init__(
        self,
        catalog: Catalog,
        store: MessageStore,
        fold: Fold,
        consumption: Consumption,
        inspection: Inspection,
        config: EngineConfig,
        *,
        check_sends: Callable[[], None],
        groups_below: Callable[[int], list[str]],
        keys: KeyTables,
    ) -> None:
        """`check_sends` raises an error if the broker accepts no messages at present.

        `groups_below` returns the broker groups of the cluster below a feature level.
        """
        self._catalog = catalog
        self._store = store
        self._fold = fold
        self._consumption = consumption
        self._acks = consumption.acks
        self.auto_create_topics = config.auto_create_topics
        self.auto_create_groups = config.auto_create_groups
        self._recreate_block_ms = config.recreate_block_ms
        self._check_sends = check_sends
        self._groups_below = groups_below
        self._keys = keys
        self._default_queues = config.default_queues
        self._config = config
        self._quota = Quota(
            topics_max=config.topics_max,
            groups_max=config.groups_max,
            auto_create_per_s=config.auto_create_per_s,
        )
        self._inspection = inspection

    def ensure(self, topic: str, group: str, now_ms: int) -> None:
        """Create a missing topic and a missing group on their first use; "" names none.

        Raises DiskFull, Overloaded. Raises TopicNotFound or GroupNotFound if clients may not
        create them, or if they were deleted less than `recreate_block_ms` ago.
        """
        if topic.startswith(DEAD_LETTER_TOPIC_PREFIX):
            # A consumer may read a group's dead-letter topic before it has a message.
            group_name = topic.removeprefix(DEAD_LETTER_TOPIC_PREFIX)
            is_known = self._catalog.find_group(group_name) is not None
            if not is_known and topic not in BROKER_DEAD_LETTER_TOPICS:
                raise TopicNotFound(f"there is no consumer group to the topic {topic!r}")
            ensure_system_topic(self._catalog, self._fold, topic, now_ms)
        is_new_topic = bool(topic) and self._catalog.find_topic(topic) is None
        is_new_group = bool(group) and self._catalog.find_group(group) is None
        # A rejected use creates nothing, so all checks come first.
        if is_new_topic:
            if not self.auto_create_topics:
                raise TopicNotFound(f"there is no topic {topic!r}; create it first")
            deleted_at_ms = self._catalog.deleted_names.topic_deleted_at_ms(topic)
            if self._is_blocked(deleted_at_ms, now_ms):
                raise TopicNotFound(self._deleted_text("topic", topic, deleted_at_ms, now_ms))
            # A send that is rejected must not create a topic.
            self._check_sends()
        if is_new_group:
            if not self.auto_create_groups:
                raise GroupNotFound(f"there is no consumer group {group!r}; create it first")
            deleted_at_ms = self._catalog.deleted_names.group_deleted_at_ms(group)
            if self._is_blocked(deleted_at_ms, now_ms):
                raise GroupNotFound(self._deleted_text("group", group, deleted_at_ms, now_ms))
        if is_new_topic or is_new_group:
            self.check_home()
        if is_new_topic:
            self._quota.take(now_ms)
            self.put_topic(topic, type_=None, queues=0, creator=FIRST_USE, now_ms=now_ms)
        if is_new_group:
            self._quota.take(now_ms)
            self.put_group(group, now_ms=now_ms)

    def _is_blocked(self, deleted_at_ms: int, now_ms: int) -> bool:
        """Whether a name was deleted so recently that its use does not create it again."""
        # A deletion in the future had a wrong clock; it blocks no longer than another one.
        return abs(now_ms - deleted_at_ms) < self._recreate_block_ms

    def _deleted_text(self, kind: str, name: str, deleted_at_ms: int, now_ms: int) -> str:
        left_s = (self._recreate_block_ms - abs(now_ms - deleted_at_ms) + 999) // 1000
        return (
            f"the {kind} {name!r} was deleted {max(now_ms - deleted_at_ms, 0) // 1000} s ago; its"
            f" use does not create it again for another {left_s} s (recreate_block_ms); an operator"
            f" can: tidemill {kind} create {name}"
        )

    def put_topic(
        self,
        name: str,
        *,
        type_: TopicType | None,
        queues: int,
        delivery_spread_ms: int | None = None,
        retention: RetentionChange = NO_CHANGE,
        transaction: PolicyChange = NO_POLICY_CHANGE,
        dedup: DedupChange = NO_DEDUP_CHANGE,
        creator: TopicCreator | None = None,
        is_forced: bool = False,
        is_dry: bool = False,
        now_ms: int,
    ) -> Topic:
        """Create or change a topic; None and 0 queues keep the value, or set the default.

        The type of a topic with messages changes only if `is_forced`. `is_dry` only checks.
        `creator` is of a new topic; below its feature level it is not recorded. It is one piece,
        because nothing may change before all checks have passed. Raises Conflict, BadRequest.
        """
        if not 0 <= (delivery_spread_ms or 0) <= SPREAD_MS_MAX:
            raise BadRequest(
                f"deliveries are spread over 0 to {SPREAD_MS_MAX} ms, not {delivery_spread_ms}"
            )
        if not 0 <= queues <= QUEUES_MAX:
            raise BadRequest(f"a topic has 1 to {QUEUES_MAX} queues, not {queues}")
        self.check_home()
        old = self._catalog.find_topic(name)
        if old is None:
            self._quota.check_topics(len(self._catalog.topics))
            queues = queues or self._default_queues_of(type_)
            topic = Topic(
                id=TopicId(self._catalog.next_id),
                version=1,
                name=name,
                type=type_ or TopicType.MIXED,
                queues=queues,
                delivery_spread_ms=delivery_spread_ms or 0,
                placements=self._catalog.membership.placements(queues),
                created_at_ms=self._created_at_ms(now_ms),
                retention=retention.apply_to(BROKER_DEFAULT),
                transaction=transaction.apply_to(DEFAULT_POLICY),
                creator=creator if self._catalog.feature_level >= CREATOR_LEVEL else None,
            )
            topic = with_dedup(topic, dedup, self._catalog, self._config)
        else:
            if old.is_system:
                raise Conflict("retry and dead-letter topics are managed by the broker")
            topic = replace(
                old, version=old.version + 1, type=type_ or old.type, queues=queues or old.queues
            )
            if delivery_spread_ms is not None:
                topic = replace(topic, delivery_spread_ms=delivery_spread_ms)
            topic = replace(
                topic,
                retention=retention.apply_to(old.retention),
                transaction=transaction.apply_to(old.transaction),
            )
            if topic.queues < old.queues:
                raise Conflict(
                    f"topic {name!r} has {old.queues} queues, and their number can only grow; to"
                    f" have {topic.queues}, delete the topic with its messages and create it again"
                )
            if topic.queues > old.queues and {old.type, topic.type} & TYPES_WITH_ORDER:
                raise Conflict(
                    "the queues of a topic that takes FIFO messages are fixed at its creation: "
                    "message groups are spread over them by hash, and their order would break"
                )
            topic = with_dedup(topic, dedup, self._catalog, self._config)
            if replace(topic, version=old.version) == old:
                return old
            if topic.queues > old.queues and topic.placements:
                # The type has no message groups, so no order depends on the placements.
                names = [name for name, _ in topic.placements]
                topic = replace(topic, placements=tuple([(name, topic.queues) for name in names]))
            if topic.type is not old.type and not is_forced:
                self._check_empty(old, topic.type)
        # Earlier versions permitted more queues, as long as no priorities were served.
        is_as_before = old is not None and (old.type, old.queues) == (topic.type, topic.queues)
        if topic.type is TopicType.PRIORITY and topic.queues > LEVELS_MAX and not is_as_before:
            raise Conflict(
                f"a topic of type PRIORITY has at most {LEVELS_MAX} queues, one for each level, not"
                f" {topic.queues}"
            )
        self._check_levels(topic)
        if not is_dry:
            self._put(topic_item(topic), now_ms)
        return topic

    def _default_queues_of(self, type_: TopicType | None) -> int:
        return LEVELS_DEFAULT if type_ is TopicType.PRIORITY else self._default_queues

    def _check_levels(self, topic: Topic) -> None:
        """Raise Conflict if a topic has a setting that a broker group cannot know yet."""
        if topic.retention != BROKER_DEFAULT:
            self.check_level("a retention of a topic", RETENTION_LEVEL)
        if topic.transaction != DEFAULT_POLICY:
            self.check_level("a transaction policy of a topic", TRANSACTION_LEVEL)
        if topic.dedup is not None:
            self.check_level("a deduplication of a topic", DEDUP_LEVEL)
        if topic.type is TopicType.PRIORITY:
            self.check_level("a topic of type PRIORITY", PRIORITY_LEVEL)

    def check_level(self, setting: str, level: int) -> None:
        """Raise Conflict if a broker group of the cluster is below a feature level."""
        behind = self._groups_below(level)
        if behind:
            raise Conflict(
                f"{setting} needs feature level {level}, and these broker"
                f" groups are below it: {', '.join(behind)}; upgrade all of their replicas"
            )

    def put_dead_letter_topic(
        self, name: str, *, retention: RetentionChange, is_dry: bool, now_ms: int
    ) -> Topic:
        """Change the retention of a dead-letter topic at this broker group.

        It is created if its consumer group exists. Raises TopicNotFound, Conflict, BadRequest.
        """
        group = name.removeprefix(DEAD_LETTER_TOPIC_PREFIX)
        old = self._catalog.find_topic(name)
        is_known = self._catalog.find_group(group) is not None or name in BROKER_DEAD_LETTER_TOPICS
        if old is None and not is_known:
            raise TopicNotFound(f"there is no consumer group to the topic {name!r}")
        new = retention.apply_to(BROKER_DEFAULT if old is None else old.retention)
        if new != BROKER_DEFAULT and self._catalog.feature_level < RETENTION_LEVEL:
            raise Conflict(
                f"a retention of a topic needs feature level {RETENTION_LEVEL}, and broker group"
                f" {self._catalog.broker_name} has {self._catalog.feature_level}; upgrade all its"
                f" replicas, and remove feature_level_max"
            )
        if is_dry and old is None:
            return Topic(
                id=TopicId(0), version=0, name=name, type=TopicType.NORMAL, queues=1, is_system=True
            )
        topic = old or ensure_system_topic(self._catalog, self._fold, name, now_ms)
        if not is_dry and topic.retention != new:
            topic = replace(topic, version=topic.version + 1, retention=new)
            self._put(topic_item(topic), now_ms)
        return topic

    def _check_empty(self, topic: Topic, type_: TopicType) -> None:
        """Raise Conflict if a topic has messages, which may not fit the other type."""
        use = self._inspection.use_of(topic)
        if use.message_count or use.timer_count:
            raise Conflict(
                f"topic {topic.name!r} has {use.message_count} messages and {use.timer_count}"
                f" delayed ones: its type changes from {topic.type.name} to {type_.name} only with"
                f" force (--force)"
            )

    def _created_at_ms(self, now_ms: int) -> int:
        """Return the creation time of an incarnation; 0 without a home.

        Other members tell incarnations of one name apart by this time.
        """
        return now_ms if self._catalog.membership.home is not None else 0

    def check_home(self, subject: str = "topics and consumer groups") -> None:
        """Raise Forbidden if another broker group is the home, where `subject` is changed."""
        home = self._catalog.membership.home
        if home is not None and home.name != self._catalog.broker_name:
            raise Forbidden(
                f"{subject} are changed at their home, the broker group {home.name} at "
                f"{home.address}"
            )

    def record(self, item: dict[str, Any], now_ms: int) -> None:
        """Record a configuration item and apply it."""
        self._put(item, now_ms)

    def _put(self, item: dict[str, Any], now_ms: int) -> None:
        # Invariant: acks from before a deletion or a reset come before it in the log.
        self._acks.record(now_ms)
        if item["op"] == "topic":
            item = self._keys.with_times(item)
        self._fold.append(ConfigItem(item), now_ms)

    def delete_topic(self, name: str, now_ms: int) -> None:
        """Delete a topic, its messages, and all groups' progress in it.

        Raises TopicNotFound, Conflict.
        """
        topic = self.find_deletable(name)
        if not topic.is_system:
            self.check_home()
        self.forget_topic(topic.id, now_ms)

    def forget_topic(self, topic_id: TopicId, now_ms: int) -> None:
        """Delete an incarnation of a topic, without the checks of `delete_topic`."""
        self._keep_next_id(now_ms)
        self._put({"op": "deleteTopic", "id": topic_id, "atMs": now_ms}, now_ms)

    def find_deletable(self, name: str) -> Topic:
        """Return the topic that `delete_topic` would delete. Raises TopicNotFound, Conflict."""
        topic = self._catalog.find_topic(name)
        if topic is None:
            raise TopicNotFound(f"there is no topic {name!r}")
        if topic.retry_of is not None:
            raise Conflict("a retry topic lives as long as its group and topic")
        if topic.name == TIMER_TOPIC:
            raise Conflict("delayed messages wait on this topic; cancel them one by one")
        if topic.name == HALF_TOPIC:
            raise Conflict("half messages wait on this topic; roll them back one by one")
        return topic

    def _keep_next_id(self, now_ms: int) -> None:
        # The deletion may drop the item with the highest id. This record keeps ids unique.
        self._put({"op": "nextId", "nextId": self._catalog.next_id}, now_ms)

    def put_group(
        self,
        name: str,
        *,
        is_ordered: bool | None = None,
        max_attempts: int = 0,
        exponential: ExponentialRetry | None = None,
        customized_ms: Sequence[int] = (),
        start_from_latest: bool | None = None,
        priority_factor: int | None = None,
        is_dry: bool = False,
        now_ms: int,
    ) -> ConsumerGroup:
        """Create or change a consumer group; None, 0 and empty keep the value, or set the default.

        `is_dry` only checks. Raises Conflict, BadRequest.
        """
        _check_retry(max_attempts, exponential, customized_ms)
        if priority_factor is not None:
            check_factor(priority_factor)
        self.check_home()
        old = self._catalog.find_group(name)
        if old is not None and is_ordered is not None and is_ordered != old.is_ordered:
            raise Conflict(
                f"group {name!r} has its delivery order for life; delete it and create it again"
            )
        if old is None:
            self._quota.check_groups(len(self._catalog.groups))
        group = old or ConsumerGroup(
            id=GroupId(self._catalog.next_id),
            version=0,
            name=name,
            is_ordered=bool(is_ordered),
            start_from_latest=bool(start_from_latest),
            created_at_ms=self._created_at_ms(now_ms),
        )
        if start_from_latest is not None and start_from_latest != group.start_from_latest:
            self._check_unread(group)
            group = replace(group, start_from_latest=start_from_latest)
        group = replace(group, max_attempts=max_attempts or group.max_attempts)
        if exponential is not None:
            group = replace(group, exponential=exponential)
        elif customized_ms:
            group = replace(group, exponential=None, customized_ms=tuple(customized_ms))
        if priority_factor is not None:
            group = replace(group, priority_factor=priority_factor)
        if old == group:
            return group
        if group.priority_factor != FACTOR_DEFAULT:
            self.check_level("a priority factor of a consumer group", PRIORITY_LEVEL)
        group = replace(group, version=group.version + 1)
        if not is_dry:
            self._put(group_item(group), now_ms)
        return group

    def _check_unread(self, group: ConsumerGroup) -> None:
        """Raise Conflict if a group has begun to read, so that its start counts no more."""
        if group.begun or self._inspection.topics_read(group):
            raise Conflict(
                f"group {group.name!r} has begun to read, so its start cannot change; to move it,"
                f" run `tidemill group reset {group.name} --topic TOPIC --to earliest|latest`"
            )

    def delete_group(self, name: str, now_ms: int) -> None:
        """Delete a group and its progress; its dead letters stay. Raises GroupNotFound."""
        group = self._catalog.find_group(name)
        if group is None:
            raise GroupNotFound(f"there is no consumer group {name!r}")
        self.check_home()
        self.forget_group(group.id, now_ms)

    def forget_group(self, group_id: GroupId, now_ms: int) -> None:
        """Delete an incarnation of a consumer group, without the checks of `delete_group`."""
        self._keep_next_id(now_ms)
        self._put({"op": "deleteGroup", "id": group_id, "atMs": now_ms}, now_ms)

    def reset_offset(
        self, group_name: str, topic_name: str, target: ResetTarget, now_ms: int
    ) -> list[int]:
        """Set a group's offsets in a topic. Earlier deliveries and retries become void.

        A reset of single queues keeps the retries, because retries do not belong to one queue.
        Returns the new offset in each queue. Raises TopicNotFound, GroupNotFound, QueueNotFound,
        IllegalOffset.
        """
        group, topic, new_offsets = self.plan_reset(group_name, topic_name, target)
        offsets = [[topic.id, queue_id, offset] for queue_id, offset in new_offsets.items()]
        retry_id = self._catalog.retry_topic_ids.get((group.id, topic.id))
        if retry_id is not None and target.queues is None:
            retries = self._catalog.queues_of(self._catalog.topics[retry_id])
            offsets += [[retry_id, queue.queue_id, queue.max_offset] for queue in retries]
        config = {"op": "reset", "group_id": group.id, "offsets": offsets}
        self._put(config, now_ms)
        return list(new_offsets.values())

    def update_pull_offset(
        self, group_id: GroupId, topic_id: TopicId, queue_id: QueueId, offset: int, now_ms: int
    ) -> None:
        """Store a group's pull offset of a queue. An unchanged offset writes no record.

        Raises GroupNotFound, TopicNotFound, BadRequest, IllegalOffset, Overloaded, DiskFull.
        """
        catalog = self._catalog
        topic = catalog.topics.get(topic_id)
        if group_id not in catalog.groups:
            raise GroupNotFound("the consumer group was deleted")
        if topic is None or not catalog.is_alive(topic_id):
            raise TopicNotFound("the topic was deleted; query its route again")
        if queue_id >= topic.queues:
            raise BadRequest(f"the topic has {topic.queues} queues, and no queue {queue_id}")
        end = catalog.queue(topic_id, queue_id).max_offset
        if not 0 <= offset <= end:
            raise IllegalOffset(f"the queue ends at {end}: an offset is 0 to that, not {offset}")
        key = group_id, topic_id, queue_id
        known = catalog.pull_offsets.find(key)
        if known == offset:
            return
        if known is None:
            self._check_pull_offsets(group_id)
        self._check_sends()
        self._fold.append(ConfigItem(pull_offset_item(key, offset)), now_ms)

    def _check_pull_offsets(self, group_id: GroupId) -> None:
        """Raise Overloaded if a group may not store another pull offset."""
        catalog = self._catalog
        if catalog.pull_offsets.has_room(group_id):
            return
        largest = catalog.pull_offsets.find_largest()
        assert largest is not None, "there is room where there are none"
        raise Overloaded(
            f"{PULL_OFFSETS_MAX} pull offsets are stored, the maximum; the last"
            f" {RESERVED_OFFSETS} are reserved for groups with fewer than {FEW_OFFSETS}. Group"
            f" {catalog.groups[largest].name} has the most:"
            f" {catalog.pull_offsets.count_of_group(largest)}. Delete groups that no longer pull,"
            f" or forget the topics that they no longer pull"
        )

    def forget_pull_offsets(self, group_id: GroupId, topic_id: TopicId, now_ms: int) -> None:
        """Forget a group's pull offsets of a topic, if there are any."""
        for key in self._catalog.pull_offsets.of_group(group_id):
            if key[1] == topic_id:
                self._fold.append(ConfigItem(pull_offset_item(key, FORGOTTEN)), now_ms)

    def release_lock(self, key: ProgressKey, now_ms: int) -> None:
        """Unlock an ordered queue early: the next pop gets the deliveries that lock it.

        Raises Conflict if the queue is not locked.
        """
        if not self._consumption.release_lock(key, now_ms):
            raise Conflict(
                f"queue {key[2]} is not locked: the next consumer that polls gets its messages"
            )

    def plan_reset(
        self, group_name: str, topic_name: str, target: ResetTarget
    ) -> tuple[ConsumerGroup, Topic, dict[QueueId, int]]:
        """Return the new offset of each queue that a reset sets. Raises as `reset_offset`."""
        group = self._catalog.find_group(group_name)
        topic = self._catalog.find_topic(topic_name)
        if group is None:
            raise GroupNotFound(f"there is no consumer group {group_name!r}")
        if topic is None:
            raise TopicNotFound(f"there is no topic {topic_name!r}")
        queues = self._catalog.queues_of(topic)
        if target.queues is not None:
            return group, topic, _check_offsets(queues, target.queues)
        offsets = {queue.queue_id: self._resolve(queue, target) for queue in queues}
        return group, topic, offsets

    def _resolve(self, queue: ConsumeQueue, target: ResetTarget) -> int:
        if target.earliest:
            return queue.min_offset
        if target.latest:
            return queue.max_offset
        offset = target.offset
        if target.offsets is not None:
            # The topic got this queue after the offsets were looked up.
            is_known = queue.queue_id < len(target.offsets)
            offset = target.offsets[queue.queue_id] if is_known else 0
        assert offset is not None, "a reset has a target"
        if offset < 0:
            raise IllegalOffset(f"an offset is 0 or more, not {offset}")
        return min(max(offset, queue.min_offset), queue.max_offset)


def _check_offsets(
    queues: Sequence[ConsumeQueue], offsets: Mapping[QueueId, int]
) -> dict[QueueId, int]:
    """Return the offsets in the order of the queues. Raises QueueNotFound, IllegalOffset."""
    missing = [queue_id for queue_id in offsets if queue_id >= len(queues)]
    if missing:
        raise QueueNotFound(f"the topic has the queues 0 to {len(queues) - 1}, not {missing[0]}")
    for queue_id, offset in offsets.items():
        begin, end = queues[queue_id].min_offset, queues[queue_id].max_offset
        if not begin <= offset <= end:
            raise IllegalOffset(
                f"queue {queue_id} has the offsets {begin} to {end}, and {offset} is outside"
            )
    return dict(sorted(offsets.items()))


def _check_retry(
    max_attempts: int, exponential: ExponentialRetry | None, customized_ms: Sequence[int]
) -> None:
    if not 0 <= max_attempts <= MAX_ATTEMPTS_MAX:
        raise BadRequest(f"a group has 1 to {MAX_ATTEMPTS_MAX} attempts, not {max_attempts}")
    if exponential is not None and not (
        exponential.initial_ms > 0 and exponential.max_ms > 0 and exponential.multiplier >= 1
    ):
        raise BadRequest(
            "exponential retry needs initialMs and maxMs over 0 and a multiplier of at least 1"
        )
    if len(customized_ms) > RETRY_STEPS_MAX or any(step <= 0 for step in customized_ms):
        raise BadRequest(f"customized retry has 1 to {RETRY_STEPS_MAX} steps, each over 0 ms")
