"""Log lines about events of the engine that an operator should know."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine

log = structlog.get_logger()

NAMED_MAX = 64  # topics in a log line


def log_notices(engine: Engine) -> None:
    """Log the notices that the engine has gathered since the last call."""
    for (topic, reason), (count, last_timer_id) in engine.timers.deliverer.take_notices().items():
        log.warning(
            "timers not delivered",
            topic=topic,
            reason=reason,
            count=count,
            last_timer_id=last_timer_id,
        )
    for notice in engine.consumption.redelivery.take_damaged_notices():
        log.error("damaged message dead-lettered without its body", **notice._asdict())
    for dead in engine.consumption.redelivery.take_dead_notices():
        log.warning(
            "messages dead-lettered",
            group=dead.group,
            count=sum(dead.reasons.values()),
            reasons=dead.reasons,
            advice="correct the consumer, then run: tidemill dead-letter list --group GROUP",
        )
    for kept in engine.consumption.redelivery.take_kept_notices():
        log.warning(
            "dead letters without an attempt left stay in their topic",
            **kept._asdict(),
            advice="ack them, or reset the offset of the group to read them again",
        )
    for gate in engine.retention.gate.take_notices():
        room = {"topic": gate.topic, "room_mib": gate.room_bytes >> 20}
        if gate.gives_way:
            log.warning("archive gate opened, unsealed messages are deleted for room", **room)
        else:
            log.info("archive gate closed again", **room)
    for trim in engine.retention.rules.take_notices():
        log.error(
            "disk full, oldest messages deleted for room",
            topics=trim.topics[:NAMED_MAX],
            topic_count=len(trim.topics),
            messages=trim.messages,
            size_bytes=trim.size_bytes,
            advice="enlarge the volume, or shorten the retention of topics",
        )
    for failed in engine.operations.take_notices():
        log.error(
            "operation failed",
            operation=failed.operation_id,
            reason=failed.reason,
            exc_info=failed.defect,
        )
    for file in engine.rebuilds.take_notices():
        log.warning("damaged file rebuilt from the log", file=file)
