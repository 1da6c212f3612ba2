"""What the log says of topics and groups: who comes, changes and goes, and offsets that are reset.

Called in the round that makes the change, so a line may precede the durability of what it tells; a
sync that fails ends the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from tidemill.broker.engine.inspection import QueueLock
    from tidemill.broker.engine.metadata.catalog import Group, Topic

log = structlog.get_logger()


def topic_put(before: Topic | None, topic: Topic, *, auto_create: bool) -> None:
    """Tell of a topic that was created, or changed from `before`."""
    if before == topic:
        return
    fields = {"topic": topic.name, "type": topic.type.name, "queues": topic.queues}
    if before is None:
        log.info("topic created", **fields, auto_create=auto_create)
    else:
        log.info("topic changed", **fields, old_type=before.type.name, old_queues=before.queues)


def group_put(before: Group | None, group: Group, *, auto_create: bool) -> None:
    """Tell of a group that was created, or changed from `before`."""
    if before == group:
        return
    fields = {
        "group": group.name, "is_ordered": group.is_ordered, "max_attempts": group.max_attempts,
    }  # fmt: skip
    if before is None:
        log.info("group created", **fields, auto_create=auto_create)
    else:
        log.info("group changed", **fields)


def topic_deleted(name: str) -> None:
    """Tell of a topic that is gone."""
    log.info("topic deleted", topic=name)


def group_deleted(name: str) -> None:
    """Tell of a group that is gone."""
    log.info("group deleted", group=name)


def offsets_reset(group: str, topic: str) -> None:
    """Tell of a group that goes on elsewhere."""
    log.info("offsets reset", group=group, topic=topic)


def lock_released(group: str, topic: str, queue_id: int, lock: QueueLock, *, by: str) -> None:
    """Tell of an ordered queue that an operator has taken from the consumer that held it."""
    log.info(
        "queue lock released", group=group, topic=topic, queue_id=queue_id, asked_by=by,
        holder=lock.client_id, messages=lock.message_count, first_offset=lock.queue_offset,
        was_until_ms=lock.until_ms,
    )  # fmt: skip
