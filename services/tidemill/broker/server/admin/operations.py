"""BrokerAdmin's calls about operations: begin, list and cancel bulk changes."""

from __future__ import annotations

import json
from collections.abc import Hashable
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog

from tidemill.broker.engine.layout.numbers import GroupId
from tidemill.broker.engine.layout.operation import (
    Operation,
    OperationBegun,
    OperationKind,
    OperationState,
)
from tidemill.broker.server.admin.letter_operations import LetterSubject
from tidemill.broker.server.admin.operation_subjects import BulkCount, OperationSubject
from tidemill.broker.server.admin.timer_operations import TimerSubject
from tidemill.broker.server.round.rpc import in_round, read_in_round, rpc_error
from tidemill.broker.server.wire.audit_facts import audited
from tidemill.common.errors import BadRequest, Conflict, IdempotencyMismatch
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.transport.grpc.status import RpcError

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn

log = structlog.get_logger()

RATE_MAX: Final = 10_000  # items per second
COUNT_MS: Final = 1_000  # of one call; the next call continues the count
COUNTS_MAX: Final = 16  # that the broker remembers, each with at most some MiB
COUNT_KEPT_MS: Final = 600_000  # after its begin
# After the end of a count by due times: single changes may move other timers into their range.
DUE_COUNT_KEPT_MS: Final = 5_000
_LETTERS: Final[OperationSubject] = LetterSubject()
_TIMERS: Final[OperationSubject] = TimerSubject()
_SUBJECTS: Final[dict[int, OperationSubject]] = {
    OperationKind.REPLAY: _LETTERS,
    OperationKind.DISCARD: _LETTERS,
    OperationKind.CANCEL_TIMERS: _TIMERS,
    OperationKind.RESCHEDULE_TIMERS: _TIMERS,
    OperationKind.FIRE_TIMERS: _TIMERS,
}


class _CountKey(NamedTuple):
    """The items that a count counts."""

    items: Hashable
    as_of_ms: int
    has_due_times: bool


class _KnownCount(NamedTuple):
    """A count that is complete, or that the next call continues."""

    items: BulkCount
    begun_at_ms: int  # monotonic
    ended_at_ms: int | None = None  # None: it is not complete

    def is_outdated(self, key: _CountKey, monotonic_ms: int) -> bool:
        """Return whether the same items must be counted again."""
        if monotonic_ms - self.begun_at_ms >= COUNT_KEPT_MS:
            return True
        if self.ended_at_ms is None or not key.has_due_times:
            return False
        return monotonic_ms - self.ended_at_ms >= DUE_COUNT_KEPT_MS


class OperationAdmin:
    """Begins, lists and cancels the operations of a broker group.

    A count may need several calls. An operation begins with the count of its dry run.
    """

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._counts: dict[_CountKey, _KnownCount] = {}  # the oldest first

    async def BeginOperation(self, request: pb.BeginOperationRequest) -> pb.BeginOperationReply:
        """Count what matches, at most for COUNT_MS; each slice takes a round. Then begin."""
        if request.kind not in _SUBJECTS:
            raise rpc_error(BadRequest(f"unknown kind {request.kind} of an operation"))
        subject = _SUBJECTS[OperationKind(request.kind)]
        if not request.dry_run and not 1 <= request.rate_per_s <= RATE_MAX:
            raise rpc_error(BadRequest(f"a rate is 1 to {RATE_MAX} items per second"))
        known = await read_in_round(
            self._rounds, lambda engine, turn: _known(engine, turn, request)
        )
        if known is not None:
            return pb.BeginOperationReply(
                count=known.total, as_of_ms=known.as_of_ms, operation=self._rendered(known)
            )
        key, count = await read_in_round(
            self._rounds, lambda engine, turn: self._find_count(engine, turn, request, subject)
        )
        is_partial = await self._continue_count(key, count)
        reply = pb.BeginOperationReply(
            count=count.count,
            size_bytes=count.size_bytes,
            as_of_ms=key.as_of_ms,
            is_partial=is_partial,
        )
        if is_partial:
            return reply
        if request.dry_run:
            await read_in_round(
                self._rounds,
                lambda engine, turn: subject.describe(engine, turn, request, count, reply),
            )
            return reply
        try:
            subject.check_count(count)
        except Conflict as error:
            raise rpc_error(error) from error
        if count.count > request.max_count:
            raise rpc_error(
                Conflict(
                    f"{count.count} {subject.noun} match, more than the {request.max_count} of"
                    f" maxCount; look at them again with a dry run"
                )
            )
        if count.count:
            begun = await in_round(
                self._rounds,
                lambda engine, turn: _begin(engine, turn, request, subject, count, key.as_of_ms),
            )
            # A second operation would count items that this one changes.
            self._counts.pop(key, None)
            reply.operation.CopyFrom(self._rendered(begun))
            log.info(
                "operation begun",
                operation=begun.id,
                kind=OperationKind(begun.kind).name,
                group=request.group,
                topic=request.timers.topic,
                count=begun.total,
                by=request.requested_by,
            )
        return reply

    def _find_count(
        self,
        engine: Engine,
        turn: Turn,
        request: pb.BeginOperationRequest,
        subject: OperationSubject,
    ) -> tuple[_CountKey, BulkCount]:
        """Return the count of the same items that earlier calls began, or begin it."""
        items = subject.check(engine, turn, request)
        as_of_ms = request.as_of_ms or turn.now_ms
        if as_of_ms > turn.now_ms:
            # Later items could have earlier times.
            raise Conflict(
                f"asOfMs {as_of_ms} is after {turn.now_ms}, the time of broker group"
                f" {engine.catalog.broker_name}, whose clock may have been set back; make another"
                f" dry run"
            )
        has_due_times = bool(request.timers.due_from_ms or request.timers.due_to_ms)
        key = _CountKey(items, as_of_ms, has_due_times)
        for known, one in list(self._counts.items()):
            if one.is_outdated(known, turn.monotonic_ms):
                del self._counts[known]
        if key not in self._counts:
            count = subject.begin_count(engine, turn, request, as_of_ms)
            while len(self._counts) >= COUNTS_MAX:
                del self._counts[next(iter(self._counts))]
            self._counts[key] = _KnownCount(count, turn.monotonic_ms)
        return key, self._counts[key].items

    async def _continue_count(self, key: _CountKey, count: BulkCount) -> bool:
        """Count until the end, or for COUNT_MS. Return whether the count is not complete."""
        end_ms: int | None = None

        def step(_engine: Engine, turn: Turn) -> bool | None:
            nonlocal end_ms
            end_ms = turn.monotonic_ms + COUNT_MS if end_ms is None else end_ms
            if not count.step():
                self._note_end(key, count, turn.monotonic_ms)
                return False
            return True if turn.monotonic_ms >= end_ms else None

        try:
            while (is_partial := await read_in_round(self._rounds, step)) is None:
                pass
        except RpcError:
            self._counts.pop(key, None)
            raise
        return is_partial

    def _note_end(self, key: _CountKey, count: BulkCount, monotonic_ms: int) -> None:
        known = self._counts.get(key)
        if known is not None and known.items is count and known.ended_at_ms is None:
            self._counts[key] = known._replace(ended_at_ms=monotonic_ms)

    async def ListOperations(self, _request: pb.ListOperationsRequest) -> pb.OperationList:
        """Return the operations, the newest first."""
        known = await read_in_round(
            self._rounds, lambda engine, turn: engine.catalog.operations.known(turn.now_ms)
        )
        return pb.OperationList(operations=[self._rendered(one) for one in reversed(known)])

    async def CancelOperation(self, request: pb.CancelOperationRequest) -> pb.Operation:
        """End an operation. One that has ended stays as it is."""

        def cancel(engine: Engine, turn: Turn) -> pb.Operation:
            found = engine.operations.find(request.id)
            if not request.dry_run:
                before = {"state": OperationState(found.state).name, "done": found.done}
                after = {**before, "state": OperationState.CANCELLED.name}
                with audited(engine, request, before=before, after=after):
                    engine.operations.cancel(request.id, turn.now_ms)
            return self._rendered(found)

        reply = await in_round(self._rounds, cancel)
        if not request.dry_run:
            log.info("operation cancelled", operation=request.id, by=request.requested_by)
        return reply

    def _rendered(self, operation: Operation) -> pb.Operation:
        details = json.loads(operation.details)
        return pb.Operation(
            id=operation.id,
            kind=pb.OperationKind.ValueType(operation.kind),
            group=(
                self._rounds.engine.catalog.group_name(GroupId(operation.subject_id))
                if operation.subject_id
                else ""
            ),
            topic=details.get("topic", ""),
            state=pb.OperationState.ValueType(operation.state),
            requested_by=details["by"],
            user=details["user"],
            user_id=details.get("userId", 0),
            created_at_ms=operation.begun_at_ms,
            ended_at_ms=operation.ended_at_ms,
            total=operation.total,
            done=operation.done,
            rate_per_s=operation.rate_per_s,
            error=operation.error,
            key=details["key"],
            failed=operation.failed,
            failures=[
                pb.ItemFailure(item=one.item, outcome=one.outcome) for one in operation.failures
            ],
        )


def _known(engine: Engine, turn: Turn, request: pb.BeginOperationRequest) -> Operation | None:
    """Return the operation with the key of a request. Raises IdempotencyMismatch."""
    if not request.key or request.dry_run:
        return None
    known = engine.catalog.operations.find_by_key(request.key, turn.now_ms)
    if known is not None and json.loads(known.details)["request"] != request.request_hash:
        raise IdempotencyMismatch(
            f"operation {known.id} has this Idempotency-Key, and another request began it"
        )
    return known


def _begin(
    engine: Engine,
    turn: Turn,
    request: pb.BeginOperationRequest,
    subject: OperationSubject,
    count: BulkCount,
    as_of_ms: int,
) -> Operation:
    known = _known(engine, turn, request)
    if known is not None:
        return known  # A concurrent call has begun it.
    start = subject.start(engine, turn, request, count)
    details = {
        **start.details,
        "by": request.requested_by,
        "user": request.audit.user,
        "userId": request.audit.user_id,
        "claimedUser": request.audit.claimed_user,
        "key": request.key,
        "request": request.request_hash,
    }
    kind = OperationKind(request.kind)
    entry = OperationBegun(
        kind,
        start.subject_id,
        start.topic_id,
        as_of_ms,
        count.begin,
        count.end,
        count.count,
        request.rate_per_s,
        json.dumps(details),
    )
    after = {"kind": kind.name, **start.facts, "ratePerSecond": request.rate_per_s}
    with audited(engine, request, after=after):
        return engine.operations.begin(entry, turn.now_ms)
