"""Changes of operators for the audit log, in the words of the REST API (ADR 0072).

The state before and after a change has the fields that differ. A creation and a deletion have all
fields. Secrets and bodies of messages are left out here, before they reach the log.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol

from tidemill.broker.engine.layout.transaction import TransactionState
from tidemill.broker.engine.metadata.audit_log import AuditedChange
from tidemill.broker.engine.metadata.topic_retention import BROKER_DEFAULT
from tidemill.broker.engine.metadata.transaction_policy import DEFAULT_POLICY

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.metadata.catalog import ConsumerGroup, Topic
    from tidemill.broker.engine.metadata.membership import BrokerGroup
    from tidemill.broker.engine.timer.status import TimerStatus
    from tidemill.broker.engine.transaction.inspection import TransactionStatus
    from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

CREATE: Final = "Create"
UPDATE: Final = "Update"
# Of security items: encrypted secrets, hashes of tokens, and fields that the record repeats.
_HIDDEN: Final = frozenset(
    {"sealed", "hash", "sha256", "secret", "createdAtMs", "changedAtMs", "changedBy"}
)
ITEMS_NAMED_MAX: Final = 16  # of a change with many security items


class AuditedRequest(Protocol):
    """A request that may name the author of its change."""

    @property
    def audit(self) -> pb.ChangeAuthor:
        """The author."""


def audited(
    engine: Engine,
    request: AuditedRequest,
    *,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
    action: str = "",
    place: Mapping[str, Any] = MappingProxyType({}),
) -> AbstractContextManager[None]:
    """Record the change of the block in the audit log, if the request has an author.

    Both states get the fields of `place`, such as the topic of a change of a consumer group.
    """
    return engine.fold.audited(
        change_of(request, before=before, after=after, action=action, place=place)
    )


def change_of(
    request: AuditedRequest,
    *,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
    action: str = "",
    place: Mapping[str, Any] = MappingProxyType({}),
) -> AuditedChange | None:
    """Return a change; None if the request does not name its author."""
    author = request.audit
    if not author.call:
        return None
    if before and after:
        before, after = _differences(before, after)
    if place:
        before, after = {**place, **(before or {})}, {**place, **(after or {})}
    return AuditedChange(author_fields(author, action=action), before=before, after=after)


def author_fields(author: pb.ChangeAuthor, *, action: str = "") -> dict[str, str]:
    """Return the author as an audit record has it."""
    return {
        "user": author.user,
        "via": author.via,
        "claimedUser": author.claimed_user,
        "from": author.address,
        "process": author.process,
        "call": author.call,
        "resource": author.resource,
        "action": action or author.action,
    }


def _differences(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return (
        {name: before[name] for name in names if name in before},
        {name: after[name] for name in names if name in after},
    )


# ---------------------------------------------------------------- states


def topic_facts(topic: Topic | None) -> dict[str, Any]:
    """Return the settings of a topic; nothing for a missing one."""
    if topic is None:
        return {}
    facts: dict[str, Any] = {"messageType": topic.type.name, "queues": topic.queues}
    if topic.delivery_spread_ms:
        facts["deliverySpreadMs"] = topic.delivery_spread_ms
    if topic.retention != BROKER_DEFAULT:
        retention = topic.retention
        facts["retention"] = {
            "ms": retention.ms,
            "bytes": retention.bytes,
            "acked": "free" if retention.frees_acked else "keep",
        }
    if topic.dedup is not None:
        dedup = topic.dedup
        facts["dedup"] = {
            "windowMs": dedup.window_ms,
            "keyFrom": str(dedup.key_from),
            "mode": str(dedup.mode),
            "maxWaitMs": dedup.max_wait_ms,
            "memoryBytes": dedup.memory_bytes,
        }
    if topic.transaction != DEFAULT_POLICY:
        policy = topic.transaction
        facts["transaction"] = {
            "firstCheckMs": policy.first_check_ms,
            "periodMs": policy.period_ms,
            "attempts": policy.attempts,
        }
    return facts


def key_owner_facts(topic: Topic) -> dict[str, Any]:
    """Return the owners of the dedup keys of a topic."""
    placement = topic.placement
    return {"keyOwners": list(placement.groups), "keyOwnersVersion": placement.version}


def group_facts(group: ConsumerGroup | None) -> dict[str, Any]:
    """Return the settings of a consumer group; nothing for a missing one."""
    if group is None:
        return {}
    facts: dict[str, Any] = {
        "deliveryOrder": "FIFO" if group.is_ordered else "CONCURRENT",
        "maxAttempts": group.max_attempts,
        "startFrom": "latest" if group.start_from_latest else "earliest",
        "priorityFactor": group.priority_factor,
    }
    if group.exponential is not None:
        facts["retry"] = {
            "initialMs": group.exponential.initial_ms,
            "maxMs": group.exponential.max_ms,
            "multiplier": group.exponential.multiplier,
        }
    else:
        facts["retry"] = {"nextMs": list(group.customized_ms)}
    if group.paused is not None:
        facts["pausedUntilMs"] = group.paused.until_ms
        facts["pauseReason"] = group.paused.reason
    return facts


def broker_group_facts(group: BrokerGroup | None) -> dict[str, Any]:
    """Return address and state of a broker group; nothing for a missing one."""
    return {} if group is None else {"address": group.address, "state": group.state}


def timer_facts(status: TimerStatus) -> dict[str, Any]:
    """Return the state of a timer, without its message."""
    return {"topic": status.topic, "state": status.state.name, "dueAtMs": status.due_at_ms}


def transaction_facts(status: TransactionStatus) -> dict[str, Any]:
    """Return the state of a transaction, without its message."""
    facts = {"topic": status.topic, "state": state_name(status.state), "checks": status.checks}
    if status.message_id:
        facts["messageId"] = status.message_id
    return facts


def state_name(state: TransactionState) -> str:
    """Return the name of a state in the REST API."""
    return "OPEN" if state is TransactionState.HALF else state.name


def security_facts(items: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """Return security items by kind and name, without secrets; None stands for a missing item."""
    found: dict[str, Any] = {}
    known = [item for item in items if item is not None]
    for item in known[:ITEMS_NAMED_MAX]:
        content = item.get(item["op"])
        if not isinstance(content, dict):  # The command refuses it.
            continue
        if len(known) == 1:
            return dict(_without_secrets(content))
        found[f"{item['op']} {item.get('name', '')}".strip()] = _without_secrets(content)
    if len(known) > ITEMS_NAMED_MAX:
        found["moreItems"] = len(known) - ITEMS_NAMED_MAX
    return found


def _without_secrets(value: Any) -> Any:  # JSON.
    if isinstance(value, dict):
        return {name: _without_secrets(each) for name, each in value.items() if name not in _HIDDEN}
    return [_without_secrets(each) for each in value] if isinstance(value, list) else value


def json_facts(encoded: bytes) -> dict[str, Any]:
    """Read a state that another process sends; anything but an object is nothing."""
    try:
        state = json.loads(encoded) if encoded else {}
    except ValueError:
        return {}
    return state if isinstance(state, dict) else {}
