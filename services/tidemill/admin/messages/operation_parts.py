"""Operations of the cluster: their parts at the broker groups, joined by their Idempotency-Key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import Brokers
from tidemill.admin.json.operations import (
    ERRORS_MAX,
    OperationErrorView,
    OperationKindView,
    OperationPartView,
    OperationStateView,
    OperationView,
)
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

_KINDS = {
    pb.OPERATION_KIND_REPLAY: OperationKindView.REPLAY_DEAD_LETTERS,
    pb.OPERATION_KIND_DISCARD: OperationKindView.DISCARD_DEAD_LETTERS,
    pb.OPERATION_KIND_CANCEL_TIMERS: OperationKindView.CANCEL_TIMERS,
    pb.OPERATION_KIND_RESCHEDULE_TIMERS: OperationKindView.RESCHEDULE_TIMERS,
    pb.OPERATION_KIND_FIRE_TIMERS: OperationKindView.FIRE_TIMERS,
}


class OperationPart(NamedTuple):
    """The part of an operation at a broker group."""

    broker: str
    operation: pb.Operation

    @property
    def id(self) -> str:
        """The id in the cluster."""
        return f"{self.broker}:{self.operation.id}"


class KnownOperations(NamedTuple):
    """The operations of all broker groups that answer."""

    operations: list[list[OperationPart]]  # the newest first; parts in the order of their names
    unreachable: list[str]

    def find_by_key(self, key: str) -> list[OperationPart]:
        """Return the parts with an Idempotency-Key."""
        return [part for parts in self.operations for part in parts if part.operation.key == key]

    def find(self, id_: str) -> list[OperationPart]:
        """Return the parts of the operation that has a part with this id."""
        for parts in self.operations:
            if any(part.id == id_ for part in parts):
                return parts
        return []


async def find_operations(cluster: Brokers) -> KnownOperations:
    """Read the operations of all broker groups."""
    found = await cluster.call_all(calls.LIST_OPERATIONS, pb.ListOperationsRequest())
    parts = [
        OperationPart(broker, one) for broker, reply in found.answers for one in reply.operations
    ]
    return KnownOperations(_joined(parts), found.unreachable)


def _joined(parts: Iterable[OperationPart]) -> list[list[OperationPart]]:
    by_key: dict[str, list[OperationPart]] = {}
    for part in sorted(parts, key=lambda one: (one.broker, one.operation.id)):
        by_key.setdefault(part.operation.key or part.id, []).append(part)
    return sorted(by_key.values(), key=lambda each: (-each[0].operation.created_at_ms, each[0].id))


def operation_of(parts: list[OperationPart], unreachable: Sequence[str] = ()) -> OperationView:
    """Return the model of an operation, which may have a part at each unreachable broker group."""
    first = parts[0].operation
    shown = [_part_of(part) for part in parts]
    states = {part.state for part in shown}
    order = (
        OperationStateView.RUNNING,
        OperationStateView.FAILED,
        OperationStateView.CANCELLED,
        OperationStateView.DONE,
    )
    if unreachable:
        states.add(OperationStateView.RUNNING)  # A part that is not seen may run.
    state = next(one for one in order if one in states)
    is_running = state is OperationStateView.RUNNING
    total = sum(part.total for part in shown)
    done = sum(part.done for part in shown)
    failed = sum(part.failed for part in shown)
    errors = [
        OperationErrorView(id=f"{part.broker}:{one.item}", outcome=one.outcome)
        for part in parts
        for one in part.operation.failures
    ][:ERRORS_MAX]
    rate = sum(part.operation.rate_per_s for part in parts)
    left = [
        (part.operation.total - part.operation.done - part.operation.failed)
        * 1_000
        // part.operation.rate_per_s
        for part in parts
        if part.operation.state == pb.OPERATION_STATE_RUNNING
    ]
    return OperationView(
        id=parts[0].id,
        kind=_KINDS[first.kind],
        group=first.group or None,
        topic=first.topic or None,
        state=state,
        by=first.requested_by,
        created_at_ms=first.created_at_ms,
        ended_at_ms=None if is_running else max(part.operation.ended_at_ms for part in parts),
        total=total,
        done=done,
        failed=failed,
        skipped=max(total - done - failed, 0) if state is OperationStateView.DONE else None,
        errors=errors or None,
        rate_per_second=rate,
        eta_ms=max(0, *left) if left else None,
        brokers=shown,
        unreachable=list(unreachable) or None,
    )


def _part_of(part: OperationPart) -> OperationPartView:
    one = part.operation
    return OperationPartView(
        broker=part.broker,
        id=part.id,
        state=OperationStateView(
            pb.OperationState.Name(one.state).removeprefix("OPERATION_STATE_")
        ),
        total=one.total,
        done=one.done,
        failed=one.failed,
        ended_at_ms=one.ended_at_ms or None,
        error=one.error or None,
    )
