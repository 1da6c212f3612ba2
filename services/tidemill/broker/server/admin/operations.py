"""BrokerAdmin's calls about operations: begin, list and cancel bulk changes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog

from tidemill.broker.engine.dead_letter.bulk import LetterCount, LetterFilter
from tidemill.broker.engine.layout.message import Reason
from tidemill.broker.engine.layout.numbers import GroupId, TopicId
from tidemill.broker.engine.layout.operation import (
    Operation,
    OperationBegun,
    OperationKind,
    OperationState,
)
from tidemill.broker.server.admin.lookup import find_group
from tidemill.broker.server.round.replay_warnings import WARNINGS_MAX, ReplayWarnings
from tidemill.broker.server.round.rpc import in_round, read_in_round, rpc_error
from tidemill.broker.server.wire.audit_facts import audited
from tidemill.broker.server.wire.dead_letters import letter_of
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
COUNTS_MAX: Final = 16  # that the broker remembers, each with up to 1,000 topics and tags
COUNT_KEPT_MS: Final = 600_000  # after its begin
TOPIC_DELETED: Final = (
    "the topic of some dead letters was deleted: they stay open; copy them to another topic"
)
BODY_LOST: Final = (
    "the body of some dead letters is lost: they stay open; copy them with a new body"
)
_DAMAGED: Final = Reason.DAMAGED.name.lower()
_KINDS: Final = {
    pb.DEAD_LETTER_ACTION_REPLAY: OperationKind.REPLAY,
    pb.DEAD_LETTER_ACTION_DISCARD: OperationKind.DISCARD,
}
_ACTIONS: Final = {kind: action for action, kind in _KINDS.items()}


class _CountKey(NamedTuple):
    """The dead letters that a count counts."""

    group_id: GroupId
    filter: LetterFilter
    as_of_ms: int


class _KnownCount(NamedTuple):
    """A count that is complete, or that the next call continues."""

    letters: LetterCount
    begun_at_ms: int  # monotonic


class OperationAdmin:
    """Begins, lists and cancels the operations of a broker group.

    A count may need several calls. An operation begins with the count of its dry run.
    """

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._counts: dict[_CountKey, _KnownCount] = {}  # the oldest first

    async def BeginOperation(self, request: pb.BeginOperationRequest) -> pb.BeginOperationReply:
        """Count what matches, at most for COUNT_MS; each slice takes a round. Then begin."""
        if request.action not in _KINDS:
            raise rpc_error(BadRequest(f"unknown action {request.action} on dead letters"))
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
            self._rounds, lambda engine, turn: self._find_count(engine, turn, request)
        )
        is_partial = await self._continue_count(key, count)
        reply = pb.BeginOperationReply(
            count=count.count,
            size_bytes=count.size_bytes,
            as_of_ms=key.as_of_ms,
            sample=[letter_of(status) for status in count.sample],
            is_partial=is_partial,
        )
        if is_partial:
            return reply
        if request.dry_run:
            reply.warnings.extend(
                await read_in_round(
                    self._rounds, lambda engine, turn: _warnings(engine, turn, request, count)
                )
            )
            return reply
        if count.count > request.max_count:
            raise rpc_error(
                Conflict(
                    f"{count.count} dead letters match, more than the {request.max_count} of"
                    f" maxCount; look at them again with a dry run"
                )
            )
        if count.count:
            begun = await in_round(
                self._rounds,
                lambda engine, turn: _begin(engine, turn, request, count, key.as_of_ms),
            )
            # A second operation would count dead letters that this one settles.
            self._counts.pop(key, None)
            reply.operation.CopyFrom(self._rendered(begun))
            log.info(
                "operation begun",
                operation=begun.id,
                kind=OperationKind(begun.kind).name,
                group=request.group,
                count=begun.total,
                by=request.requested_by,
            )
        return reply

    def _find_count(
        self, engine: Engine, turn: Turn, request: pb.BeginOperationRequest
    ) -> tuple[_CountKey, LetterCount]:
        """Return the count of the same dead letters that earlier calls began, or begin it."""
        group = find_group(engine, request.group)
        engine.dead_letters.check_level()
        as_of_ms = min(request.as_of_ms or turn.now_ms, turn.now_ms)
        key = _CountKey(group.id, _filter(request), as_of_ms)
        for known, one in list(self._counts.items()):
            if turn.monotonic_ms - one.begun_at_ms >= COUNT_KEPT_MS:
                del self._counts[known]
        if key not in self._counts:
            count = LetterCount(engine.letter_inspection, group, key.filter, as_of_ms=key.as_of_ms)
            while len(self._counts) >= COUNTS_MAX:
                del self._counts[next(iter(self._counts))]
            self._counts[key] = _KnownCount(count, turn.monotonic_ms)
        return key, self._counts[key].letters

    async def _continue_count(self, key: _CountKey, count: LetterCount) -> bool:
        """Count until the end, or for COUNT_MS. Return whether the count is not complete."""
        end_ms: int | None = None

        def step(_engine: Engine, turn: Turn) -> bool | None:
            nonlocal end_ms
            end_ms = turn.monotonic_ms + COUNT_MS if end_ms is None else end_ms
            if not count.step():
                return False
            return True if turn.monotonic_ms >= end_ms else None

        try:
            while (is_partial := await read_in_round(self._rounds, step)) is None:
                pass
        except RpcError:
            self._counts.pop(key, None)
            raise
        return is_partial

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
            action=_ACTIONS[OperationKind(operation.kind)],
            group=self._rounds.engine.catalog.group_name(GroupId(operation.subject_id)),
            state=pb.OperationState.ValueType(operation.state),
            requested_by=details["by"],
            user=details["user"],
            created_at_ms=operation.begun_at_ms,
            ended_at_ms=operation.ended_at_ms,
            total=operation.total,
            done=operation.done,
            rate_per_s=operation.rate_per_s,
            error=operation.error,
            key=details["key"],
        )


def _filter(request: pb.BeginOperationRequest) -> LetterFilter:
    wanted = request.filter
    return LetterFilter(wanted.topic, wanted.reason, wanted.tag, wanted.from_ms, wanted.to_ms)


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


def _warnings(
    engine: Engine, turn: Turn, request: pb.BeginOperationRequest, count: LetterCount
) -> list[str]:
    if request.action != pb.DEAD_LETTER_ACTION_REPLAY:
        return []
    group, warnings = find_group(engine, request.group), ReplayWarnings(engine, turn)
    texts = []
    for topic_id, tag in sorted(count.pairs):
        if engine.catalog.is_alive(TopicId(topic_id)):
            warnings.note(group, TopicId(topic_id), tag)
        else:
            texts.append(TOPIC_DELETED)
    if any(status.reason == _DAMAGED for status in count.sample):
        texts.append(BODY_LOST)
    return list(dict.fromkeys([*texts, *warnings.texts()]))[:WARNINGS_MAX]


def _begin(
    engine: Engine, turn: Turn, request: pb.BeginOperationRequest, count: LetterCount, as_of_ms: int
) -> Operation:
    known = _known(engine, turn, request)
    if known is not None:
        return known  # A concurrent call has begun it.
    group, wanted = find_group(engine, request.group), _filter(request)
    details = {
        "filter": wanted._asdict(),
        "by": request.requested_by,
        "user": request.audit.user,
        "claimedUser": request.audit.claimed_user,
        "key": request.key,
        "request": request.request_hash,
    }
    assert count.topic is not None, "it has dead letters"
    kind = _KINDS[request.action]
    entry = OperationBegun(
        kind,
        group.id,
        count.topic.id,
        as_of_ms,
        count.begin,
        count.end,
        count.count,
        request.rate_per_s,
        json.dumps(details),
    )
    after = {
        "kind": kind.name,
        "deadLetters": count.count,
        "filter": {name: value for name, value in wanted._asdict().items() if value},
        "ratePerSecond": request.rate_per_s,
    }
    with audited(engine, request, after=after):
        return engine.operations.begin(entry, turn.now_ms)
