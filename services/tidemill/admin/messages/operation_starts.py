"""The begin of an operation on items that match a filter, with a part per broker group."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from hashlib import blake2s
from typing import Final, NamedTuple

from tidemill.admin.audit.author import Author
from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import (
    UNREACHABLE_ERRORS,
    BrokerAnswers,
    BrokerGroupClient,
    Brokers,
)
from tidemill.admin.http.request_access import RequestAccess
from tidemill.admin.json.operations import OperationView
from tidemill.admin.messages.operation_parts import OperationPart, find_operations, operation_of
from tidemill.common.errors import Conflict, Overloaded, ServiceError
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

COUNT_CALLS_MAX: Final = 20  # to a broker group, each with about 1 s of counting


class BulkCaller(NamedTuple):
    """The caller of a bulk change: its rights, its name, the author for records, and its key."""

    access: RequestAccess
    name: str
    author: Author
    key: str | None  # of the header Idempotency-Key


class OperationLimits(NamedTuple):
    """The fields of a request that belong to a filter."""

    as_of_ms: int | None
    max_count: int | None
    rate_per_second: int


class BegunOperation(NamedTuple):
    """The result of a begin."""

    total: int
    operation: OperationView | None  # None: nothing matches
    warnings: list[str]
    unreachable: list[str]


def hash_of(text: str) -> str:
    """Return the hash of a request, which an Idempotency-Key belongs to."""
    return blake2s(text.encode(), digest_size=8).hexdigest()


async def begin_operation(
    cluster: Brokers,
    request: pb.BeginOperationRequest,
    limits: OperationLimits,
    key: str | None,
    noun: str,
) -> BegunOperation:
    """Count what matches at all broker groups, and begin an operation there. Raises ServiceError.

    An operation that an earlier call with this key has begun is continued.
    """
    if limits.as_of_ms is None or limits.max_count is None:
        raise Conflict(
            "a change by filter needs asOfMs and maxCount: make a dry run first, and send the"
            " asOfMs of its answer"
        )
    request.max_count, request.key = limits.max_count, key or secrets.token_hex(16)
    request.rate_per_s = limits.rate_per_second
    # The items of earlier parts are changed meanwhile, so they are not counted again.
    begun = [] if key is None else (await find_operations(cluster)).find_by_key(key)
    parts = [await _begin(cluster, broker, request) for broker, _ in begun]
    known = {part.broker for part in parts}
    found = await count_all(cluster, request, noun, skipped=known)
    # A broker group may refuse a count of 0 that is not complete: its dry run has a warning.
    chosen = [broker for broker, reply in found.answers if reply.count or reply.warnings]
    total = sum(part.operation.total for part in parts)
    total += sum(reply.count for _, reply in found.answers)
    if total > limits.max_count:
        raise Conflict(
            f"{total} {noun} match, more than the {limits.max_count} of maxCount; look at"
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
    operation = operation_of(parts, unreachable) if parts else None
    return BegunOperation(total, operation, warnings, unreachable)


async def count_all(
    cluster: Brokers, request: pb.BeginOperationRequest, noun: str, *, skipped: Collection[str] = ()
) -> BrokerAnswers[pb.BeginOperationReply]:
    """Count the items that match at all broker groups but some. Raises Overloaded.

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
        f"the count is not complete: {count_so_far} {noun} match so far; repeat the call with"
        f" asOfMs {as_of_ms} to continue the count, or choose fewer with a filter"
    )


async def _begin(cluster: Brokers, broker: str, request: pb.BeginOperationRequest) -> OperationPart:
    """Begin the part of a broker group, or return the one that has the same key."""
    member = await cluster.member(broker)
    for _ in range(COUNT_CALLS_MAX):
        reply = await member.client.call(calls.BEGIN_OPERATION, request)
        if not reply.is_partial:  # Another broker of the group counts again after a failover.
            return OperationPart(broker, reply.operation)
    raise Overloaded(f"the count of broker group {broker} is not complete; repeat the call")
