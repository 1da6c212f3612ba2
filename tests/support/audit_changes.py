"""Audited changes of an engine, and the records that they leave."""

from __future__ import annotations

import json
from typing import Any

from tests.support.worlds.engine_world import World
from tidemill.broker.engine.engine import Engine
from tidemill.broker.engine.layout.audit import ROW_SIZE
from tidemill.broker.engine.metadata import audit_log
from tidemill.broker.engine.metadata.audit_log import AuditedChange
from tidemill.broker.engine.metadata.catalog import TopicType

AUTHOR = {
    "user": "ops",
    "via": "token:ci",
    "claimedUser": "",
    "from": "10.1.2.3",
    "process": "admin-0",
    "call": "PUT /topics/{topic}",
    "resource": "Topic:orders",
    "action": "Create",
}


def change_of(resource: str, **options: Any) -> AuditedChange:
    """Return a change of a resource."""
    return AuditedChange({**AUTHOR, "resource": resource}, **options)


def put_topic(world: World, name: str, queues: int = 1, **options: Any) -> None:
    """Put a topic in the current round, with its audit record."""
    with world.engine.fold.audited(change_of(f"Topic:{name}", **options)):
        world.engine.administration.put_topic(
            name, type_=TopicType.NORMAL, queues=queues, now_ms=world.now_ms
        )


def delete_topic(world: World, name: str) -> None:
    """Delete a topic in the current round, with its audit record."""
    with world.engine.fold.audited(change_of(f"Topic:{name}")):
        world.engine.administration.delete_topic(name, world.now_ms)


def records_of(engine: Engine) -> list[dict[str, Any]]:
    """Return the kept records, the oldest first, with their sequences and times."""
    audit = engine.catalog.audit
    rows = list(audit.newest_first())
    assert len(rows) == len(audit) <= audit_log.RECORDS_MAX
    assert (
        audit.size_bytes == sum(ROW_SIZE + len(row.fields) for row in rows) <= audit_log.BYTES_MAX
    )
    return [
        {"sequence": row.sequence, "atMs": row.at_ms, **json.loads(row.fields)}
        for row in reversed(rows)
    ]


def resources_of(engine: Engine) -> list[str]:
    """Return the resources of the kept records, the oldest first."""
    return [record["resource"] for record in records_of(engine)]
