"""Log lines about changes of topics, groups, offsets and the cluster.

The round that makes a change logs it, so a line may precede the durability of its change. A failed
sync ends the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from tidemill.broker.engine.metadata.priority import FACTOR_DEFAULT, FACTOR_MAX
from tidemill.message.similar_names import find_similar

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from tidemill.broker.engine.configuration.purge import PurgeCounting
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.metadata.catalog import ConsumerGroup, Topic
    from tidemill.broker.engine.metadata.membership import BrokerGroup, Home, Membership
    from tidemill.broker.engine.queries.inspection import QueueLock, TopicUse
    from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

log = structlog.get_logger()

NAMED_MAX = 64  # items of a list in one line; another field has the number of all


def topic_put(before: Topic | None, topic: Topic, *, by: str) -> None:
    """Log that a topic was created, or changed from `before`."""
    if before == topic:
        return
    fields = {**_topic_fields(topic), **_requested_by(by)}
    if before is None:
        log.info("topic created", **fields, auto_create=False)
    else:
        log.info("topic changed", **fields, old_type=before.type.name, old_queues=before.queues)


def group_put(before: ConsumerGroup | None, group: ConsumerGroup, *, by: str) -> None:
    """Log that a consumer group was created, or changed from `before`."""
    if before == group:
        return
    fields = {**_group_fields(group), **_requested_by(by)}
    if before is None:
        log.info("group created", **fields, auto_create=False)
    else:
        log.info("group changed", **fields)
    old_factor = FACTOR_DEFAULT if before is None else before.priority_factor
    if group.priority_factor == FACTOR_MAX and old_factor != FACTOR_MAX:
        log.warning("low priorities can starve", group=group.name, priority_factor=FACTOR_MAX)


def group_paused(before: ConsumerGroup, group: ConsumerGroup, *, by: str) -> None:
    """Log that a consumer group was paused or resumed."""
    pause = group.paused
    if pause is not None:
        end = {"until_ms": pause.until_ms, "reason": pause.reason}
        log.warning("group paused", group=group.name, **end, **_requested_by(by))
    elif before.paused is not None:
        log.info("group resumed", group=group.name, **_requested_by(by))


def topic_created_by_use(topic: Topic, names: Container[str]) -> None:
    """Log that the first use created a topic beside those with `names`.

    It is a warning, because the name may be a misspelling. The topic of dead letters is not: its
    name is that of a consumer group.
    """
    if topic.is_system:
        log.info("topic created", **_topic_fields(topic), auto_create=True)
        return
    nearest = find_similar(topic.name, names)
    log.warning("topic created on first use", **_topic_fields(topic), nearest=nearest)


def group_created_by_use(group: ConsumerGroup, names: Container[str]) -> None:
    """Log that the first use created a consumer group beside those with `names`."""
    log.info("group created", **_group_fields(group), auto_create=True)
    _warn_if_similar(group.name, names)


def _topic_fields(topic: Topic) -> dict[str, object]:
    return {"topic": topic.name, "type": topic.type.name, "queues": topic.queues}


def _group_fields(group: ConsumerGroup) -> dict[str, object]:
    return {"group": group.name, "is_ordered": group.is_ordered, "max_attempts": group.max_attempts}


def _warn_if_similar(name: str, names: Container[str]) -> None:
    similar = find_similar(name, names)
    if similar is not None:
        log.warning("a new name may be a misspelling", name=name, similar=similar)


def keys_spread(topic: Topic, *, by: str) -> None:
    """Log that dedup keys of a topic move to other owners."""
    placement = topic.placement
    log.info(
        "dedup keys spread",
        topic=topic.name,
        version=placement.version,
        broker_groups=list(placement.groups),
        before=list(placement.before),
        **_requested_by(by),
    )


def topic_deleted(topic: Topic, use: TopicUse, *, by: str) -> None:
    """Log that a topic was deleted, with its messages and timers."""
    log.info(
        "topic deleted",
        **_topic_fields(topic),
        messages=use.message_count,
        timers=use.timer_count,
        groups=use.groups[:NAMED_MAX],
        group_count=len(use.groups),
        **_requested_by(by),
    )


def topic_purged(topic: Topic, count: PurgeCounting, *, by: str) -> None:
    """Log that messages of a topic were removed."""
    log.warning(
        "topic purged",
        **_topic_fields(topic),
        messages=count.messages,
        size_bytes=count.size_bytes,
        **_requested_by(by),
    )


def group_deleted(group: ConsumerGroup, topics: list[str], lag: int, *, by: str) -> None:
    """Log that a consumer group was deleted, with its topics and lag."""
    log.info(
        "group deleted",
        group=group.name,
        is_ordered=group.is_ordered,
        max_attempts=group.max_attempts,
        topics=topics[:NAMED_MAX],
        topic_count=len(topics),
        lag=lag,
        **_requested_by(by),
    )


def offsets_reset(
    group: str, topic: str, *, from_offsets: list[int], to_offsets: list[int], by: str
) -> None:
    """Log that the offsets of a consumer group were reset; the lists have one offset per queue."""
    log.info(
        "offsets reset",
        group=group,
        topic=topic,
        from_offsets=from_offsets[:NAMED_MAX],
        to_offsets=to_offsets[:NAMED_MAX],
        queues=len(to_offsets),
        **_requested_by(by),
    )


def pull_offsets_forgotten(group: str, topic: str, offsets: list[int], *, by: str) -> None:
    """Log that the pull offsets of a consumer group were deleted."""
    log.info(
        "pull offsets forgotten",
        group=group,
        topic=topic,
        offsets=offsets[:NAMED_MAX],
        queues=len(offsets),
        **_requested_by(by),
    )


def lock_released(group: str, topic: str, queue_id: int, lock: QueueLock, *, by: str) -> None:
    """Log that an operator has released the lock of an ordered queue."""
    log.info(
        "queue lock released",
        group=group,
        topic=topic,
        queue_id=queue_id,
        holder=lock.client_id,
        messages=lock.message_count,
        first_offset=lock.queue_offset,
        was_until_ms=lock.until_ms,
        **_requested_by(by),
    )


def deliveries_released(selection: pb.DeliveryFilter, count: int, *, by: str) -> None:
    """Log that an operator has released deliveries in flight."""
    log.info(
        "deliveries released",
        group=selection.group,
        topic=selection.topic or None,
        queue_id=selection.queue_id if selection.HasField("queue_id") else None,
        holder=selection.client_id or None,
        message_id=selection.message_id or None,
        messages=count,
        **_requested_by(by),
    )


def cluster_founded(membership: Membership) -> None:
    """Log that this broker has become the home of a cluster."""
    home = membership.home
    assert home is not None, "a founded cluster has a home"
    log.info(
        "cluster founded",
        cluster_id=home.cluster_id,
        home=home.name,
        broker_groups=[group.name for group in membership.in_order()],
    )


def home_changed(before: Home | None, home: Home | None) -> None:
    """Log that this broker follows a different home from now on, or none."""
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
    """Log that the home returned without some topics and groups, which are deleted here now.

    Return True if its store is an older one. Then its log is older, or the home has used the id of
    a missing topic or group again, or all its ids are lower than such an id. If the home only
    deleted topics or groups while it was unreachable, their ids are lower than others.
    """
    catalog = engine.catalog
    home_topics = _incarnations([one for each in frame.configs for one in each.topics])
    home_groups = _incarnations([one for each in frame.configs for one in each.groups])
    topics = [
        topic
        for topic in catalog.topics.values()
        if topic.home_id and home_topics.get(topic.home_id) != _incarnation(topic)
    ]
    groups = [
        group
        for group in catalog.groups.values()
        if group.home_id and home_groups.get(group.home_id) != _incarnation(group)
    ]
    home_ids = home_topics.keys() | home_groups.keys()
    deleted_ids = {topic.home_id for topic in topics} | {group.home_id for group in groups}
    newest_id = max(home_ids, default=0)
    is_restored = is_older or any(id_ in home_ids or id_ > newest_id for id_ in deleted_ids)
    if deleted_ids or is_older:
        write = log.error if is_restored else log.warning
        write(
            "home was restored from a backup, newer topics and groups are deleted"
            if is_restored
            else "home deleted topics or groups while it was unreachable",
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


def _incarnations(
    configs: Sequence[pb.TopicConfig] | Sequence[pb.GroupConfig],
) -> dict[int, tuple[str, int]]:
    return {one.id: (one.name, one.created_at_ms) for one in configs}


def _incarnation(one: Topic | ConsumerGroup) -> tuple[str, int]:
    return one.name, one.created_at_ms


def security_changed(items: Sequence[dict[str, Any]], version: int, *, by: str) -> None:
    """Log that security items were changed. Their content may have secrets and is not logged."""
    names = [f"{item['op']} {item.get('name', '')}".strip() for item in items[:NAMED_MAX]]
    log.info(
        "security changed", items=names, item_count=len(items), version=version, **_requested_by(by)
    )


def broker_group_put(group: BrokerGroup, *, by: str) -> None:
    """Log that a broker group was added or begins to drain."""
    log.info(
        "broker group changed",
        broker_group=group.name,
        address=group.address,
        state=group.state,
        **_requested_by(by),
    )


def broker_group_abandoned(group: pb.BrokerGroup, reason: str, *, by: str) -> None:
    """Log that a broker group is removed with its backlog."""
    is_known = group.HasField("backlog")
    backlog = group.backlog if is_known else group.last_backlog
    log.warning(
        "broker group removed with its backlog",
        broker_group=group.member.name,
        reason=reason,
        is_known=is_known,
        known_at_ms=0 if is_known else group.last_backlog_at_ms,
        messages=backlog.ready_count,
        in_flight=backlog.in_flight_count,
        delayed=backlog.delayed_count,
        half_messages=backlog.half_count,
        dedup_keys=backlog.key_count,
        items=[
            f"{each.topic} for {each.group or 'no group'}" for each in backlog.items[:NAMED_MAX]
        ],
        **_requested_by(by),
    )


def broker_group_removed(name: str, *, by: str) -> None:
    """Log that a broker group was removed."""
    log.info("broker group removed", broker_group=name, **_requested_by(by))


def _requested_by(by: str) -> dict[str, str]:
    """Return the requester as a field; no field if it is unknown."""
    return {"by": by} if by else {}
