"""Replays and discards of dead letters by filter: one operation, with a part per broker group."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from hashlib import blake2s
from typing import Final

from tidemill.admin.audit.author import Author
from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import (
    UNREACHABLE_ERRORS,
    BrokerAnswers,
    BrokerGroupClient,
    Brokers,
)
from tidemill.admin.json.dead_letters import DeadLetterChangeView, DeadLettersRequest
from tidemill.admin.messages.operation_parts import OperationPart, find_operations, operation_of
from tidemill.admin.messages.views import dead_letter_of
from tidemill.common.errors import Conflict, Overloaded, ServiceError
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

RATE_PER_S: Final = 2_000  # default
SAMPLE_MAX: Final = 10
COUNT_CALLS_MAX: Final = 20  # to a broker group, each with about 1 s of counting


async def settle_matching(
    cluster: Brokers,
    group: str,
    wanted: DeadLettersRequest,
    action: pb.DeadLetterAction.ValueType,
    author: Author,
    caller: str,
    key: str | None,
    *,
    is_dry: bool,
    with_keys: bool,
) -> DeadLetterChangeView:
    """Count the dead letters that match, and begin an operation on them. Raises ServiceError."""
    request = _request(group, wanted, action)
    if is_dry:
        return await _count(cluster, request, caller, with_keys=with_keys)
    if wanted.as_of_ms is None or wanted.max_count is None:
        raise Conflict(
            "a change by filter needs asOfMs and maxCount: make a dry run first, and send the"
            " asOfMs of its answer"
        )
    request.max_count, request.key = wanted.max_count, key or secrets.token_hex(16)
    request.rate_per_s = wanted.rate_per_second or RATE_PER_S
    request.requested_by = caller
    request.audit.CopyFrom(author.of(f"Group:{group}"))
    # The dead letters of earlier parts are settled meanwhile, so they are not counted again.
    begun = [] if key is None else (await find_operations(cluster)).find_by_key(key)
    parts = [await _begin(cluster, broker, request) for broker, _ in begun]
    known = {part.broker for part in parts}
    found = await _count_all(cluster, request, skipped=known)
    chosen = [broker for broker, reply in found.answers if reply.count]
    total = sum(part.operation.total for part in parts)
    total += sum(reply.count for _, reply in found.answers)
    if total > wanted.max_count:
        raise Conflict(
            f"{total} dead letters match, more than the {wanted.max_count} of maxCount; look at"
            f" them again with a dry run"
        )
    request.rate_per_s = -(-request.rate_per_s // max(len(chosen), 1))
    unreachable, errors, warnings = list(found.unreachable), [], []
    for broker in chosen:
        try:
            parts.append(await _begin(cluster, broker, request))
        except ServiceError as error:
            errors.append(error)
            if isinstance(error, UNREACHABLE_ERRORS):
                unreachable.append(broker)
            else:
                warnings.append(f"{broker}: {error.message}")
    parts = [part for part in parts if part.operation.id]
    if errors and not parts:
        raise errors[0]
    return DeadLetterChangeView(
        dry_run=False,
        by=caller,
        group=group,
        count=total,
        as_of_ms=wanted.as_of_ms,
        operation=operation_of(parts, unreachable) if parts else None,
        warnings=warnings or None,
        unreachable=unreachable or None,
    )


async def _count(
    cluster: Brokers, request: pb.BeginOperationRequest, caller: str, *, with_keys: bool
) -> DeadLetterChangeView:
    """Count the dead letters that match at all broker groups."""
    found = await _count_all(cluster, request)
    sample = [(broker, one) for broker, reply in found.answers for one in reply.sample]
    sample.sort(key=lambda each: each[1].dead_at_ms)
    warnings = [text for _, reply in found.answers for text in reply.warnings]
    return DeadLetterChangeView(
        dry_run=True,
        by=caller,
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
    group: str, wanted: DeadLettersRequest, action: pb.DeadLetterAction.ValueType
) -> pb.BeginOperationRequest:
    chosen = wanted.filter
    assert chosen is not None, "the caller has checked it"
    hashed = f"{group} {action} {wanted.model_dump_json()}"
    return pb.BeginOperationRequest(
        group=group,
        action=action,
        filter=pb.DeadLetterFilter(
            topic=chosen.topic or "",
            reason=chosen.reason.lower() if chosen.reason else "",
            tag=chosen.tag or "",
            from_ms=chosen.from_ms or 0,
            to_ms=chosen.to_ms or 0,
        ),
        as_of_ms=wanted.as_of_ms or 0,
        request_hash=blake2s(hashed.encode(), digest_size=8).hexdigest(),
    )


async def _count_all(
    cluster: Brokers, request: pb.BeginOperationRequest, *, skipped: Collection[str] = ()
) -> BrokerAnswers[pb.BeginOperationReply]:
    """Count the dead letters that match at all broker groups but some. Raises Overloaded.

    A broker group may need several calls. It continues a count that has the same filter and time.
    """
    replies: dict[str, pb.BeginOperationReply] = {}

    async def count(member: BrokerGroupClient) -> pb.BeginOperationReply:
        if member.name in skipped:
            return pb.BeginOperationReply()
        last = replies.get(member.name)
        if last is not None and not last.is_partial:
            return last
        counting = pb.BeginOperationRequest()
        counting.CopyFrom(request)
        counting.dry_run = True
        if last is not None:
            counting.as_of_ms = last.as_of_ms
        reply = await member.client.call(calls.BEGIN_OPERATION, counting)
        replies[member.name] = reply
        return reply

    for _ in range(COUNT_CALLS_MAX):
        found = await cluster.ask_all(count)
        if not any(reply.is_partial for _, reply in found.answers):
            return found
    count_so_far = sum(reply.count for _, reply in found.answers)
    as_of_ms = min(reply.as_of_ms for _, reply in found.answers)
    raise Overloaded(
        f"the count is not complete: {count_so_far} dead letters match so far; repeat the call with"
        f" asOfMs {as_of_ms} to continue the count, or choose fewer with fromMs and toMs"
    )


async def _begin(cluster: Brokers, broker: str, request: pb.BeginOperationRequest) -> OperationPart:
    """Begin the part of a broker group, or return the one that has the same key."""
    member = await cluster.member(broker)
    for _ in range(COUNT_CALLS_MAX):
        reply = await member.client.call(calls.BEGIN_OPERATION, request)
        if not reply.is_partial:  # Another broker of the group counts again after a failover.
            return OperationPart(broker, reply.operation)
    raise Overloaded(f"the count of broker group {broker} is not complete; repeat the call")
