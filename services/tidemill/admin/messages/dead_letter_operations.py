"""Replays and discards of dead letters by filter: one operation, with a part per broker group."""

from __future__ import annotations

from typing import Final

from tidemill.admin.cluster.brokers import Brokers
from tidemill.admin.json.dead_letters import DeadLetterChangeView, DeadLettersRequest
from tidemill.admin.messages.operation_starts import (
    BulkCaller,
    OperationLimits,
    begin_operation,
    count_all,
    hash_of,
)
from tidemill.admin.messages.views import dead_letter_of
from tidemill.security.acl import Action
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

RATE_PER_S: Final = 2_000  # default
SAMPLE_MAX: Final = 10
NOUN: Final = "dead letters"


async def settle_matching(
    cluster: Brokers,
    group: str,
    wanted: DeadLettersRequest,
    kind: pb.OperationKind.ValueType,
    caller: BulkCaller,
    *,
    is_dry: bool,
) -> DeadLetterChangeView:
    """Count the dead letters that match, and begin an operation on them. Raises ServiceError."""
    request = _request(group, wanted, kind)
    if is_dry:
        return await _count(cluster, request, caller)
    request.requested_by = caller.name
    request.audit.CopyFrom(caller.author.of(f"Group:{group}"))
    rate = wanted.rate_per_second or RATE_PER_S
    limits = OperationLimits(wanted.as_of_ms, wanted.max_count, rate)
    begun = await begin_operation(cluster, request, limits, caller.key, NOUN)
    return DeadLetterChangeView(
        dry_run=False,
        by=caller.name,
        group=group,
        count=begun.total,
        as_of_ms=wanted.as_of_ms,
        operation=begun.operation,
        warnings=begun.warnings or None,
        unreachable=begun.unreachable or None,
    )


async def _count(
    cluster: Brokers, request: pb.BeginOperationRequest, caller: BulkCaller
) -> DeadLetterChangeView:
    """Count the dead letters that match at all broker groups."""
    found = await count_all(cluster, request, NOUN)
    with_keys = caller.access.allows_group(Action.SUB, request.group)
    sample = [(broker, one) for broker, reply in found.answers for one in reply.sample]
    sample.sort(key=lambda each: each[1].dead_at_ms)
    warnings = [text for _, reply in found.answers for text in reply.warnings]
    return DeadLetterChangeView(
        dry_run=True,
        by=caller.name,
        group=request.group,
        count=sum(reply.count for _, reply in found.answers),
        bytes=sum(reply.size_bytes for _, reply in found.answers),
        as_of_ms=min([reply.as_of_ms for _, reply in found.answers], default=None),
        sample=[
            dead_letter_of(one, broker=broker, with_keys=with_keys)
            for broker, one in sample[:SAMPLE_MAX]
        ],
        warnings=list(dict.fromkeys(warnings)) or None,
        unreachable=found.unreachable or None,
    )


def _request(
    group: str, wanted: DeadLettersRequest, kind: pb.OperationKind.ValueType
) -> pb.BeginOperationRequest:
    chosen = wanted.filter
    assert chosen is not None, "the caller has checked it"
    hashed = f"{group} {kind} {wanted.model_dump_json()}"
    return pb.BeginOperationRequest(
        group=group,
        kind=kind,
        filter=pb.DeadLetterFilter(
            topic=chosen.topic or "",
            reason=chosen.reason.lower() if chosen.reason else "",
            tag=chosen.tag or "",
            from_ms=chosen.from_ms or 0,
            to_ms=chosen.to_ms or 0,
        ),
        as_of_ms=wanted.as_of_ms or 0,
        request_hash=hash_of(hashed),
    )
