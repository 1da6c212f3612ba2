"""REST models of the replies of brokers."""

from __future__ import annotations

from typing import Final

from tidemill.admin.cluster.brokers import BrokerAnswers
from tidemill.admin.json.consumer_groups import (
    ConsumerGroupProgressView,
    ConsumerGroupView,
    CustomizedBackoffView,
    DeliveryOrder,
    ExponentialBackoffView,
    GroupPauseView,
    ProgressView,
    PulledTopicView,
    QueueResetView,
    RetryPolicyView,
    TopicProgressView,
)
from tidemill.admin.json.deliveries import DeliveryView, QueueLockView
from tidemill.admin.json.topics import (
    AckedView,
    DedupModeView,
    DedupView,
    KeySourceView,
    QueueView,
    RetentionView,
    TopicTypeView,
    TopicView,
    TransactionPolicyView,
)
from tidemill.common.clock import SystemClock
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

FIRST_USE: Final = "FIRST_USE"  # in place of the user


def topic_of(config: pb.TopicConfig) -> TopicView:
    """Render a topic."""
    is_keyed = config.HasField("dedup")
    return TopicView(
        name=config.name,
        message_type=TopicTypeView(pb.TopicType.Name(config.type).removeprefix("TOPIC_TYPE_")),
        queues=config.queues,
        is_system=config.is_system,
        delivery_spread_ms=config.delivery_spread_ms or None,
        retention=_retention_of(config.retention) if config.HasField("retention") else None,
        transaction=_policy_of(config.transaction) if config.HasField("transaction") else None,
        dedup=_dedup_of(config) if is_keyed else None,
        dedup_off_pending=None if is_keyed else list(config.placement.before) or None,
        created_by=FIRST_USE if config.creator.is_first_use else config.creator.user or None,
        created_by_unknown=_creator_unknown(config),
    )


def _creator_unknown(config: pb.TopicConfig) -> str | None:
    if config.creator.is_first_use or config.creator.user:
        return None
    if config.HasField("creator"):
        return "created without a user"
    if config.is_system:
        return "the broker creates this topic"
    return "created by a version that did not record it"


KEY_SOURCES: Final = {
    KeySourceView.PROPERTY: pb.DEDUP_KEY_SOURCE_PROPERTY,
    KeySourceView.MESSAGE_ID: pb.DEDUP_KEY_SOURCE_MESSAGE_ID,
    KeySourceView.PROPERTY_OR_MESSAGE_ID: pb.DEDUP_KEY_SOURCE_PROPERTY_OR_MESSAGE_ID,
}
DEDUP_MODES: Final = {
    DedupModeView.FIRST: pb.DEDUP_MODE_FIRST,
    DedupModeView.REPLACE: pb.DEDUP_MODE_REPLACE,
}


def _dedup_of(config: pb.TopicConfig) -> DedupView:
    policy = config.dedup
    sources = {number: source for source, number in KEY_SOURCES.items()}
    modes = {number: mode for mode, number in DEDUP_MODES.items()}
    return DedupView(
        window_ms=policy.window_ms,
        key_from=sources[policy.key_from],
        mode=modes[policy.mode],
        max_wait_ms=policy.max_wait_ms if policy.HasField("max_wait_ms") else None,
        memory_bytes=policy.memory_bytes if policy.HasField("memory_bytes") else None,
        broker_groups=list(config.placement.broker_groups) or None,
        moving_from=list(config.placement.before) or None,
    )


def _policy_of(policy: pb.TransactionPolicy) -> TransactionPolicyView:
    return TransactionPolicyView(
        first_check_ms=policy.first_check_ms, period_ms=policy.period_ms, attempts=policy.attempts
    )


def _retention_of(retention: pb.TopicRetention) -> RetentionView:
    return RetentionView(
        ms=retention.ms if retention.HasField("ms") else None,
        bytes=retention.bytes if retention.HasField("bytes") else None,
        acked=AckedView.FREE if retention.frees_acked else None,
    )


def group_of(config: pb.GroupConfig) -> ConsumerGroupView:
    """Render a consumer group."""
    if config.HasField("exponential"):
        policy = config.exponential
        retry = RetryPolicyView(
            exponential=ExponentialBackoffView(
                initial_ms=policy.initial_ms, max_ms=policy.max_ms, multiplier=policy.multiplier
            )
        )
    else:
        retry = RetryPolicyView(
            customized=CustomizedBackoffView(next_ms=list(config.customized.next_ms))
        )
    is_ordered = config.delivery_order == pb.DELIVERY_ORDER_ORDERED
    return ConsumerGroupView(
        name=config.name,
        delivery_order=DeliveryOrder.FIFO if is_ordered else DeliveryOrder.CONCURRENT,
        max_attempts=config.max_attempts,
        retry=retry,
        start_from="latest" if config.start_from_latest else "earliest",
        priority_factor=config.priority_factor if config.HasField("priority_factor") else None,
        paused=_pause_of(config),
    )


def _pause_of(config: pb.GroupConfig) -> GroupPauseView | None:
    """Render the pause of a consumer group; None if it is over."""
    pause = config.pause
    if pause.until_ms <= SystemClock().wall_ms():
        return None
    return GroupPauseView(until_ms=pause.until_ms, by=pause.by, reason=pause.reason or None)


def queue_of(status: pb.QueueStatus, broker: str) -> QueueView:
    """Render a queue."""
    return QueueView(
        broker=broker,
        queue_id=status.queue_id,
        min_offset=status.min_offset,
        max_offset=status.max_offset,
        sealed_offset=status.sealed_offset if status.HasField("sealed_offset") else None,
    )


def queue_reset_of(
    topic: str, status: pb.QueueStatus, from_offset: int, to_offset: int, broker: str
) -> QueueResetView:
    """Render a queue after a reset. `from_offset` is -1 if the group had not read the queue."""
    return QueueResetView(
        topic=topic,
        broker=broker,
        queue_id=status.queue_id,
        min_offset=status.min_offset,
        max_offset=status.max_offset,
        from_offset=from_offset if from_offset >= 0 else None,
        to_offset=to_offset,
    )


def progress_of(progress: BrokerAnswers[pb.GroupProgress]) -> ConsumerGroupProgressView:
    """Sum the queues of all broker groups by topic and in total."""
    by_topic: dict[str, list[pb.QueueProgress]] = {}
    queues = [(broker, queue) for broker, found in progress.answers for queue in found.queues]
    for _, queue in queues:
        by_topic.setdefault(queue.topic, []).append(queue)
    return ConsumerGroupProgressView(
        group=progress.answers[0].value.group.name,
        total=ProgressView.model_validate(_sums([queue for _, queue in queues])),
        topics=[
            TopicProgressView.model_validate({"topic": topic, **_sums(of_topic)})
            for topic, of_topic in sorted(by_topic.items())
        ],
        locks=sorted(
            (
                lock_of(queue.topic, queue.queue_id, queue.lock, broker)
                for broker, queue in queues
                if queue.HasField("lock")
            ),
            key=lambda lock: -lock.waiting,
        ),
        pulled=_pulled([each for _, found in progress.answers for each in found.pulled]) or None,
        unreachable=progress.unreachable or None,
    )


def _pulled(queues: list[pb.PulledQueue]) -> list[PulledTopicView]:
    """Sum the pull offsets of a group by topic."""
    by_topic: dict[str, list[pb.PulledQueue]] = {}
    for queue in queues:
        by_topic.setdefault(queue.topic, []).append(queue)
    return [
        PulledTopicView(
            topic=topic,
            queues=len(of_topic),
            # Expired messages do not count.
            behind=sum(each.max_offset - max(each.offset, each.min_offset) for each in of_topic),
        )
        for topic, of_topic in sorted(by_topic.items())
    ]


def lock_of(topic: str, queue_id: int, lock: pb.QueueLock, broker: str) -> QueueLockView:
    """Render the lock of a queue."""
    return QueueLockView(
        topic=topic,
        broker=broker,
        queue=queue_id,
        messages=lock.message_count,
        offset=lock.queue_offset,
        message_id=lock.message_id or None,
        client_id=lock.client_id or None,
        since_ms=lock.popped_at_ms,
        until_ms=lock.until_ms,
        waiting=lock.waiting_count,
    )


def delivery_of(found: pb.InFlight, broker: str) -> DeliveryView:
    """Render a delivery in flight."""
    return DeliveryView(
        topic=found.topic,
        broker=broker,
        queue=found.queue_id,
        offset=found.queue_offset,
        retry=found.is_retry,
        message_id=found.message_id or None,
        attempt=found.delivery_attempt,
        client_id=found.client_id or None,
        since_ms=found.place.since_ms,
        until_ms=found.until_ms,
        renewed=found.renews,
        on_its_way=found.is_on_its_way,
    )


def _sums(queues: list[pb.QueueProgress]) -> dict[str, int | None]:
    blocked = sum(queue.lock.waiting_count for queue in queues)
    ready = sum(queue.ready_count for queue in queues) - blocked
    in_flight = sum(queue.in_flight_count for queue in queues)
    oldest = [queue.oldest_unacked_at_ms for queue in queues if queue.oldest_unacked_at_ms]
    return {
        "lag": ready + blocked + in_flight,
        "ready": ready,
        "blocked": blocked,
        "in_flight": in_flight,
        "stored": sum(queue.max_offset for queue in queues if not queue.is_retry),
        "oldest_unacked_at_ms": min(oldest, default=None),
    }
