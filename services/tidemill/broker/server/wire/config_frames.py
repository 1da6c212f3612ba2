"""Configuration and listings as messages of the broker's protobuf contract."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, TypedDict

from tidemill.broker.engine.configuration.administration import ResetTarget
from tidemill.broker.engine.engine import Engine
from tidemill.broker.engine.layout.numbers import GroupId, QueueId, TopicId
from tidemill.broker.engine.metadata.catalog import (
    Beginnings,
    ConfigChanges,
    ConsumerGroup,
    ExponentialRetry,
    Topic,
    TopicType,
)
from tidemill.broker.engine.metadata.dedup_policy import (
    NO_DEDUP_CHANGE,
    NO_PLACEMENT,
    DedupChange,
    DedupKeySource,
    DedupMode,
    DedupPolicy,
    KeyPlacement,
)
from tidemill.broker.engine.metadata.group_pause import GroupPause
from tidemill.broker.engine.metadata.membership import BrokerGroup, Membership
from tidemill.broker.engine.metadata.priority import FACTOR_DEFAULT
from tidemill.broker.engine.metadata.topic_creator import FIRST_USE, TopicCreator
from tidemill.broker.engine.metadata.topic_retention import (
    BROKER_DEFAULT,
    RetentionChange,
    TopicRetention,
)
from tidemill.broker.engine.metadata.transaction_policy import (
    DEFAULT_POLICY,
    PolicyChange,
    TransactionPolicy,
)
from tidemill.broker.engine.queries.inspection import QueueLock, QueueProgress, QueueStatus
from tidemill.broker.engine.queries.queue_reader import FoundMessage
from tidemill.broker.engine.queries.removal_check import Readers, RemovalBacklog
from tidemill.common.errors import BadRequest
from tidemill.message.resource_names import HIDDEN_TOPIC_PREFIX
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

_KEY_SOURCES: Final = {
    DedupKeySource.PROPERTY: pb.DEDUP_KEY_SOURCE_PROPERTY,
    DedupKeySource.MESSAGE_ID: pb.DEDUP_KEY_SOURCE_MESSAGE_ID,
    DedupKeySource.PROPERTY_OR_MESSAGE_ID: pb.DEDUP_KEY_SOURCE_PROPERTY_OR_MESSAGE_ID,
}
_DEDUP_MODES: Final = {
    DedupMode.FIRST: pb.DEDUP_MODE_FIRST,
    DedupMode.REPLACE: pb.DEDUP_MODE_REPLACE,
}


def topic_config(topic: Topic) -> pb.TopicConfig:
    """Render a topic."""
    return pb.TopicConfig(
        id=topic.id,
        version=topic.version,
        name=topic.name,
        type=pb.TopicType.ValueType(topic.type),
        queues=topic.queues,
        is_system=topic.is_system,
        delivery_spread_ms=topic.delivery_spread_ms,
        home_id=topic.home_id,
        created_at_ms=topic.created_at_ms,
        placements=[
            pb.Placement(broker_group=name, queues=queues) for name, queues in topic.placements
        ],
        retention=_retention(topic.retention) if topic.retention != BROKER_DEFAULT else None,
        transaction=_policy(topic.transaction) if topic.transaction != DEFAULT_POLICY else None,
        dedup=_dedup(topic.dedup) if topic.dedup is not None else None,
        placement=_key_placement(topic.placement) if topic.placement != NO_PLACEMENT else None,
        creator=_creator(topic.creator) if topic.creator is not None else None,
    )


def _creator(creator: TopicCreator) -> pb.TopicCreator:
    return pb.TopicCreator(user=creator.user, is_first_use=creator.is_first_use)


def _read_creator(config: pb.TopicConfig) -> TopicCreator | None:
    if not config.HasField("creator"):
        return None
    return FIRST_USE if config.creator.is_first_use else TopicCreator(user=config.creator.user)


def _key_placement(placement: KeyPlacement) -> pb.KeyPlacement:
    return pb.KeyPlacement(
        broker_groups=placement.groups,
        version=placement.version,
        before=placement.before,
        since=placement.since,
    )


def read_key_placement(placement: pb.KeyPlacement) -> KeyPlacement:
    """Read a list of the owners of dedup keys."""
    return KeyPlacement(
        groups=tuple(placement.broker_groups),
        version=placement.version,
        before=tuple(placement.before),
        since=placement.since,
    )


def _dedup(policy: DedupPolicy) -> pb.DedupPolicy:
    return pb.DedupPolicy(
        window_ms=policy.window_ms,
        key_from=_KEY_SOURCES[policy.key_from],
        mode=_DEDUP_MODES[policy.mode],
        max_wait_ms=policy.max_wait_ms,
        memory_bytes=policy.memory_bytes,
    )


def _read_dedup(config: pb.TopicConfig) -> DedupPolicy | None:
    if not config.HasField("dedup"):
        return None
    policy = config.dedup
    return DedupPolicy(
        window_ms=policy.window_ms,
        key_from=_read_key_source(policy.key_from),
        mode=_read_dedup_mode(policy.mode),
        max_wait_ms=policy.max_wait_ms if policy.HasField("max_wait_ms") else None,
        memory_bytes=policy.memory_bytes if policy.HasField("memory_bytes") else None,
    )


def _read_key_source(number: int) -> DedupKeySource:
    found = [source for source, known in _KEY_SOURCES.items() if known == number]
    if not found:
        raise BadRequest(f"{number} is not a source of dedup keys")
    return found[0]


def _read_dedup_mode(number: int) -> DedupMode:
    found = [mode for mode, known in _DEDUP_MODES.items() if known == number]
    if not found:
        raise BadRequest(f"{number} is not a mode of deduplication")
    return found[0]


def _policy(policy: TransactionPolicy) -> pb.TransactionPolicy:
    return pb.TransactionPolicy(
        first_check_ms=policy.first_check_ms, period_ms=policy.period_ms, attempts=policy.attempts
    )


def _read_policy(config: pb.TopicConfig) -> TransactionPolicy:
    if not config.HasField("transaction"):
        return DEFAULT_POLICY
    policy = config.transaction
    return TransactionPolicy(
        first_check_ms=policy.first_check_ms, period_ms=policy.period_ms, attempts=policy.attempts
    )


def _retention(retention: TopicRetention) -> pb.TopicRetention:
    return pb.TopicRetention(
        ms=retention.ms, bytes=retention.bytes, frees_acked=retention.frees_acked
    )


def _read_retention(frame: pb.TopicRetention) -> TopicRetention:
    return TopicRetention(
        ms=frame.ms if frame.HasField("ms") else None,
        bytes=frame.bytes if frame.HasField("bytes") else None,
        frees_acked=frame.frees_acked,
    )


def group_config(group: ConsumerGroup) -> pb.GroupConfig:
    """Render a group."""
    config = pb.GroupConfig(
        id=group.id,
        version=group.version,
        name=group.name,
        delivery_order=pb.DELIVERY_ORDER_ORDERED
        if group.is_ordered
        else pb.DELIVERY_ORDER_CONCURRENT,
        max_attempts=group.max_attempts,
        start_from_latest=group.start_from_latest,
        priority_factor=group.priority_factor,
        home_id=group.home_id,
        created_at_ms=group.created_at_ms,
        begun=_beginnings(group),
    )
    if group.paused is not None:
        config.pause.CopyFrom(pb.GroupPause(**group.paused.as_item()))
    if group.exponential is not None:
        config.exponential.initial_ms = group.exponential.initial_ms
        config.exponential.max_ms = group.exponential.max_ms
        config.exponential.multiplier = group.exponential.multiplier
    else:
        config.customized.next_ms.extend(group.customized_ms)
    return config


def _beginnings(group: ConsumerGroup) -> list[pb.Beginning]:
    return [pb.Beginning(topic_id=id_, begun_at_ms=at_ms) for id_, at_ms in group.begun]


def begun_frame(group: ConsumerGroup) -> pb.GroupBeginnings:
    """Render since when a group reads its topics, as a follower reports it to its home."""
    return pb.GroupBeginnings(group_id=group.home_id, begun=_beginnings(group))


def read_begun(begun: Iterable[pb.Beginning]) -> Beginnings:
    """Read since when a group reads its topics."""
    return tuple([(each.topic_id, each.begun_at_ms) for each in begun])


def _visible(topics: Iterable[Topic]) -> list[pb.TopicConfig]:
    return [
        topic_config(topic) for topic in topics if not topic.name.startswith(HIDDEN_TOPIC_PREFIX)
    ]


def complete_config(engine: Engine) -> pb.ConfigUpdate:
    """Render the whole configuration, which a proxy needs before it serves."""
    return pb.ConfigUpdate(
        is_complete=True,
        topics=_visible(engine.catalog.topics.values()),
        groups=[group_config(group) for group in engine.catalog.groups.values()],
        handle_secret=engine.catalog.handle_secret,
        broker_name=engine.catalog.broker_name,
        auto_create_topics=engine.administration.auto_create_topics,
        auto_create_groups=engine.administration.auto_create_groups,
        membership=membership_frame(engine.catalog.membership),
        serves_sql_filters=True,
        serves_transactions=True,
        serves_key_lookups=True,
    )


def changed_config(changes: ConfigChanges) -> pb.ConfigUpdate:
    """Render configuration changes."""
    return pb.ConfigUpdate(
        topics=_visible(changes.topics.values()),
        groups=[group_config(group) for group in changes.groups.values()],
        deleted_topic_ids=sorted(changes.deleted_topic_ids),
        deleted_group_ids=sorted(changes.deleted_group_ids),
        membership=membership_frame(changes.membership) if changes.membership else None,
    )


def membership_frame(membership: Membership) -> pb.Membership:
    """Render the members of the cluster; empty without a home."""
    home = membership.home
    if home is None:
        return pb.Membership()
    return pb.Membership(
        cluster_id=home.cluster_id,
        home_name=home.name,
        home_address=home.address,
        members=[member(group) for group in membership.in_order()],
    )


def member(group: BrokerGroup) -> pb.ClusterMember:
    """Render a broker group of the cluster."""
    state = pb.MEMBER_STATE_DRAINING if group.state == "draining" else pb.MEMBER_STATE_ACTIVE
    return pb.ClusterMember(name=group.name, address=group.address, state=state)


def read_topic(config: pb.TopicConfig) -> Topic:
    """Read a topic of the home, with the ids of the home."""
    return Topic(
        id=TopicId(config.id),
        version=config.version,
        name=config.name,
        type=TopicType(config.type),
        queues=config.queues,
        delivery_spread_ms=config.delivery_spread_ms,
        created_at_ms=config.created_at_ms,
        placements=tuple([(place.broker_group, place.queues) for place in config.placements]),
        retention=_read_retention(config.retention),
        transaction=_read_policy(config),
        dedup=_read_dedup(config),
        placement=read_key_placement(config.placement),
        creator=_read_creator(config),
    )


def read_group(config: pb.GroupConfig) -> ConsumerGroup:
    """Read a consumer group of the home, with the ids of the home."""
    return ConsumerGroup(
        id=GroupId(config.id),
        version=config.version,
        name=config.name,
        is_ordered=config.delivery_order == pb.DELIVERY_ORDER_ORDERED,
        max_attempts=config.max_attempts,
        exponential=_exponential(config),
        customized_ms=tuple(config.customized.next_ms),
        start_from_latest=config.start_from_latest,
        priority_factor=(
            config.priority_factor if config.HasField("priority_factor") else FACTOR_DEFAULT
        ),
        created_at_ms=config.created_at_ms,
        begun=read_begun(config.begun),
        paused=read_pause(config),
    )


def read_pause(frame: pb.GroupConfig | pb.PauseGroupRequest) -> GroupPause | None:
    """Read a pause of a consumer group; None without one."""
    if not frame.HasField("pause"):
        return None
    pause = frame.pause
    return GroupPause(until_ms=pause.until_ms, by=pause.by, reason=pause.reason)


def backlog_frame(backlog: RemovalBacklog) -> pb.Backlog:
    """Render the backlog of a broker group."""
    return pb.Backlog(
        ready_count=backlog.ready_count,
        in_flight_count=backlog.in_flight_count,
        delayed_count=backlog.delayed_count,
        items=[pb.BacklogItem(**item._asdict()) for item in backlog.items],
        unnamed_count=backlog.unnamed_count,
        half_count=backlog.half_count,
        key_count=backlog.key_count,
    )


def readers_frame(engine: Engine) -> Iterator[pb.GroupTopics]:
    """Render which topics each consumer group reads, for a follower; one group at a time."""
    topics = engine.catalog.topics
    for group in list(engine.catalog.groups.values()):
        found = engine.inspection.topics_given(group)
        user_ids = [id_ for id_ in found if not topics[id_].is_system]
        yield pb.GroupTopics(group_id=group.id, topic_ids=user_ids)


def read_readers(readers: Iterable[pb.GroupTopics]) -> Readers:
    """Read the result of `readers_frame`."""
    return {reader.group_id: set(reader.topic_ids) for reader in readers if reader.topic_ids}


def queue_status(status: QueueStatus) -> pb.QueueStatus:
    """Render the offsets of a queue."""
    return pb.QueueStatus(**status._asdict())


def queue_progress(progress: QueueProgress, lock: QueueLock | None) -> pb.QueueProgress:
    """Render the progress of a group in a queue."""
    return pb.QueueProgress(
        topic=progress.topic,
        queue_id=progress.queue_id,
        is_retry=progress.is_retry,
        min_offset=progress.min_offset,
        max_offset=progress.max_offset,
        pop_offset=progress.pop_offset,
        consumer_offset=progress.consumer_offset,
        ready_count=progress.ready_count,
        in_flight_count=progress.in_flight_count,
        oldest_unacked_at_ms=progress.oldest_unacked_at_ms,
        lock=queue_lock(lock) if lock is not None else None,
    )


def queue_lock(lock: QueueLock) -> pb.QueueLock:
    """Render the lock of a queue."""
    return pb.QueueLock(**lock._asdict())


def found_message(found: FoundMessage) -> pb.FoundMessage:
    """Render a stored copy of a message."""
    return pb.FoundMessage(**found._asdict())


def topic_type(value: int) -> TopicType | None:
    """Read a topic type; None if it is unspecified."""
    try:
        return TopicType(value) if value else None
    except ValueError as error:
        raise BadRequest(f"topic type {value} is unknown") from error


def delivery_spread_ms(request: pb.PutTopicRequest) -> int | None:
    """Read the time over which deliveries may be spread; None if it is unset."""
    return request.delivery_spread_ms if request.HasField("delivery_spread_ms") else None


def retention_change(request: pb.PutTopicRequest) -> RetentionChange:
    """Read the change of the retention of a topic."""
    change = request.retention
    return RetentionChange(
        ms=change.ms if change.HasField("ms") else None,
        bytes=change.bytes if change.HasField("bytes") else None,
        frees_acked=change.frees_acked if change.HasField("frees_acked") else None,
    )


def policy_change(request: pb.PutTopicRequest) -> PolicyChange:
    """Read the change of the checks of half messages."""
    change = request.transaction
    return PolicyChange(
        first_check_ms=change.first_check_ms if change.HasField("first_check_ms") else None,
        period_ms=change.period_ms if change.HasField("period_ms") else None,
        attempts=change.attempts if change.HasField("attempts") else None,
    )


def dedup_change(request: pb.PutTopicRequest) -> DedupChange:
    """Read the change of the deduplication of a topic."""
    if not request.HasField("dedup"):
        return NO_DEDUP_CHANGE
    change = request.dedup
    return DedupChange(
        is_off=change.is_off,
        is_on=not change.is_off,
        window_ms=change.window_ms if change.HasField("window_ms") else None,
        key_from=_read_key_source(change.key_from) if change.HasField("key_from") else None,
        mode=_read_dedup_mode(change.mode) if change.HasField("mode") else None,
        max_wait_ms=change.max_wait_ms if change.HasField("max_wait_ms") else None,
        memory_bytes=change.memory_bytes if change.HasField("memory_bytes") else None,
    )


class GroupFields(TypedDict):
    """The configurable fields of a consumer group, as arguments of `put_group`."""

    is_ordered: bool | None
    max_attempts: int
    exponential: ExponentialRetry | None
    customized_ms: tuple[int, ...]
    start_from_latest: bool | None
    priority_factor: int | None


def group_fields(request: pb.PutGroupRequest) -> GroupFields:
    """Read the configurable fields of a consumer group."""
    is_ordered = (
        request.delivery_order == pb.DELIVERY_ORDER_ORDERED if request.delivery_order else None
    )
    return GroupFields(
        is_ordered=is_ordered,
        max_attempts=request.max_attempts,
        exponential=_exponential(request),
        customized_ms=tuple(request.customized.next_ms),
        start_from_latest=(
            request.start_from_latest if request.HasField("start_from_latest") else None
        ),
        priority_factor=request.priority_factor if request.HasField("priority_factor") else None,
    )


def _exponential(policy: pb.PutGroupRequest | pb.GroupConfig) -> ExponentialRetry | None:
    if not policy.HasField("exponential"):
        return None
    return ExponentialRetry(
        initial_ms=policy.exponential.initial_ms,
        max_ms=policy.exponential.max_ms,
        multiplier=policy.exponential.multiplier,
    )


def reset_target(request: pb.ResetOffsetRequest) -> ResetTarget:
    """Read the target of an offset reset, unless it is a time."""
    match request.WhichOneof("target"):
        case "earliest":
            return ResetTarget(earliest=True)
        case "latest":
            return ResetTarget(latest=True)
        case "offset":
            return ResetTarget(offset=request.offset)
        case "queues":
            queues = {QueueId(each.queue_id): each.offset for each in request.queues.queues}
            if not queues or len(queues) < len(request.queues.queues):
                raise BadRequest("name each queue of the reset once, and at least one queue")
            return ResetTarget(queues=queues)
        case _:
            raise BadRequest("set a target: earliest, latest, offset, queues or timestamp_ms")
