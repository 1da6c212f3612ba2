"""What the log says of topics and groups: who comes, changes and goes, and offsets that are reset.

Called in the round that makes the change, so a line may precede the durability of what it tells; a
sync that fails ends the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.metadata.catalog import ConsumerGroup, Topic
    from tidemill.broker.engine.metadata.membership import BrokerGroup, Home, Membership
    from tidemill.broker.engine.queries.inspection import QueueLock, TopicUse
    from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

log = structlog.get_logger()

NAMED_MAX = 64  # items of a list in one line; how many there are is said beside it


def topic_put(before: Topic | None, topic: Topic, *, auto_create: bool, by: str = "") -> None:
    """Tell of a topic that was created, or changed from `before`."""
    if before == topic:
        return
    fields = {"topic": topic.name, "type": topic.type.name, "queues": topic.queues, **_asked_by(by)}
    if before is None:
        log.info("topic created", **fields, auto_create=auto_create)
    else:
        log.info("topic changed", **fields, old_type=before.type.name, old_queues=before.queues)


def group_put(
    before: ConsumerGroup | None, group: ConsumerGroup, *, auto_create: bool, by: str = ""
) -> None:
    """Tell of a group that was created, or changed from `before`."""
    if before == group:
        return
    fields = {
        "group": group.name,
        "is_ordered": group.is_ordered,
        "max_attempts": group.max_attempts,
        **_asked_by(by),
    }
    if before is None:
        log.info("group created", **fields, auto_create=auto_create)
    else:
        log.info("group changed", **fields)


def topic_deleted(topic: Topic, use: TopicUse, *, by: str) -> None:
    """Tell of a topic that is gone, and of what went with it."""
    log.info(
        "topic deleted",
        topic=topic.name,
        type=topic.type.name,
        queues=topic.queues,
        messages=use.message_count,
        timers=use.timer_count,
        groups=use.groups[:NAMED_MAX],
        group_count=len(use.groups),
        **_asked_by(by),
    )


def group_deleted(group: ConsumerGroup, topics: list[str], lag: int, *, by: str) -> None:
    """Tell of a group that is gone, and of how far it was."""
    log.info(
        "group deleted",
        group=group.name,
        is_ordered=group.is_ordered,
        max_attempts=group.max_attempts,
        topics=topics[:NAMED_MAX],
        topic_count=len(topics),
        lag=lag,
        **_asked_by(by),
    )


def offsets_reset(
    group: str, topic: str, *, from_offsets: list[int], to_offsets: list[int], by: str
) -> None:
    """Tell of a group that goes on elsewhere: by queue from where, and to where."""
    log.info(
        "offsets reset",
        group=group,
        topic=topic,
        from_offsets=from_offsets[:NAMED_MAX],
        to_offsets=to_offsets[:NAMED_MAX],
        queues=len(to_offsets),
        **_asked_by(by),
    )


def pull_offsets_forgotten(group: str, topic: str, offsets: list[int], *, by: str) -> None:
    """Tell of a group of which nobody knows any more how far it has pulled a topic."""
    log.info(
        "pull offsets forgotten",
        group=group,
        topic=topic,
        offsets=offsets[:NAMED_MAX],
        queues=len(offsets),
        **_asked_by(by),
    )


def lock_released(group: str, topic: str, queue_id: int, lock: QueueLock, *, by: str) -> None:
    """Tell of an ordered queue that an operator has taken from the consumer that held it."""
    log.info(
        "queue lock released",
        group=group,
        topic=topic,
        queue_id=queue_id,
        holder=lock.client_id,
        messages=lock.message_count,
        first_offset=lock.queue_offset,
        was_until_ms=lock.until_ms,
        **_asked_by(by),
    )


def deliveries_released(wanted: pb.DeliveryFilter, count: int, *, by: str) -> None:
    """Tell of messages that an operator has taken from the consumers that held them."""
    log.info(
        "deliveries released",
        group=wanted.group,
        topic=wanted.topic or None,
        queue_id=wanted.queue_id if wanted.HasField("queue_id") else None,
        holder=wanted.client_id or None,
        message_id=wanted.message_id or None,
        messages=count,
        **_asked_by(by),
    )


def cluster_founded(membership: Membership) -> None:
    """Tell of a broker that has become the home of others."""
    home = membership.home
    assert home is not None, "a cluster is founded with its home"
    log.info(
        "cluster founded",
        cluster_id=home.cluster_id,
        home=home.name,
        broker_groups=[group.name for group in membership.in_order()],
    )


def home_met(before: Home | None, home: Home | None) -> None:
    """Tell of a broker whose home is another from here on."""
    if before == home:
        return
    if home is None:
        log.info("left the cluster", home=before.name if before else "")
        return
    log.info(
        "following the home",
        home=home.name,
        address=home.address,
        cluster_id=home.cluster_id,
        is_draining=home.is_draining,
    )


def home_restored(before: Home, frame: pb.FollowFrame, engine: Engine, *, is_older: bool) -> bool:
    """Tell of a home that comes back and knows less, and of what that takes away here.

    Return whether its store is an older one: its log is, or it tells of no number as high as one
    that goes, or it has given that number out again. What it only deleted while it was not heard
    has a lower number, and goes with a line too.
    """
    catalog = engine.catalog
    told_topics = _told([one for each in frame.configs for one in each.topics])
    told_groups = _told([one for each in frame.configs for one in each.groups])
    topics = [
        topic
        for topic in catalog.topics.values()
        if topic.home_id and told_topics.get(topic.home_id) != _incarnation(topic)
    ]
    groups = [
        group
        for group in catalog.groups.values()
        if group.home_id and told_groups.get(group.home_id) != _incarnation(group)
    ]
    told = told_topics.keys() | told_groups.keys()
    gone = {topic.home_id for topic in topics} | {group.home_id for group in groups}
    is_restored = is_older or any(id_ in told or id_ > max(told, default=0) for id_ in gone)
    if gone or is_older:
        write = log.error if is_restored else log.warning
        write(
            "the home was restored from a backup: what it does not know any more is deleted here"
            if is_restored
            else "the home has deleted, while it was not heard, what is deleted here now",
            home=before.name,
            heard_epoch=before.epoch,
            epoch=frame.epoch,
            topics=[topic.name for topic in topics[:NAMED_MAX]],
            topic_count=len(topics),
            messages=sum(engine.inspection.use_of(topic).message_count for topic in topics),
            groups=[group.name for group in groups[:NAMED_MAX]],
            group_count=len(groups),
        )
    return is_restored


def _told(told: Sequence[pb.TopicConfig] | Sequence[pb.GroupConfig]) -> dict[int, tuple[str, int]]:
    return {one.id: (one.name, one.created_at_ms) for one in told}


def _incarnation(one: Topic | ConsumerGroup) -> tuple[str, int]:
    return one.name, one.created_at_ms


def broker_group_put(group: BrokerGroup, *, by: str) -> None:
    """Tell of a member that was added, or that is to drain."""
    log.info(
        "broker group changed",
        broker_group=group.name,
        address=group.address,
        state=group.state,
        **_asked_by(by),
    )


def broker_group_given_up(group: pb.BrokerGroup, reason: str, *, by: str) -> None:
    """Tell of a member that is removed with what is left there."""
    is_known = group.HasField("left")
    left = group.left if is_known else group.last_left
    log.warning(
        "broker group given up",
        broker_group=group.member.name,
        reason=reason,
        is_known=is_known,
        known_at_ms=0 if is_known else group.last_left_at_ms,
        messages=left.ready_count,
        in_flight=left.in_flight_count,
        delayed=left.delayed_count,
        items=[f"{each.topic} for {each.group or 'nobody'}" for each in left.items[:NAMED_MAX]],
        **_asked_by(by),
    )


def broker_group_removed(name: str, *, by: str) -> None:
    """Tell of a member that is gone."""
    log.info("broker group removed", broker_group=name, **_asked_by(by))


def _asked_by(by: str) -> dict[str, str]:
    """Return who asked as fields of a line: none where nobody says it."""
    return {"by": by} if by else {}
