"""Bulk changes of timers for BrokerAdmin: some ids at once, and timers as items of operations."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

import structlog

from tidemill.broker.engine.layout.numbers import TimerId, TopicId
from tidemill.broker.engine.layout.operation import OperationKind
from tidemill.broker.engine.metadata.settled_letters import DEAD_LETTER_LEVEL
from tidemill.broker.engine.tally import Allowance
from tidemill.broker.engine.timer.bulk_changes import TimerOutcome
from tidemill.broker.engine.timer.bulk_matches import TimerCount, TimerFilter
from tidemill.broker.engine.timer.due_change import SPREAD_MS_MAX, TimerChange
from tidemill.broker.engine.timer.keyed import KEY_MATCHES_MAX, OTHER_FILTER
from tidemill.broker.server.admin.lookup import find_topic
from tidemill.broker.server.admin.operation_subjects import BulkStart
from tidemill.broker.server.round.rpc import rpc_error, slices_in_round
from tidemill.broker.server.wire.audit_facts import change_of
from tidemill.broker.server.wire.timers import timer_message
from tidemill.common.errors import BadRequest, Conflict, MessageNotFound, ServiceError
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn

log = structlog.get_logger()

TIMERS_MAX: Final = 1_000  # of one call
CHANGED_A_SLICE: Final = 32
CHANGED_A_ROUND: Final = 256
TIMERS_NAMED_MAX: Final = 16  # in an audit record
TOPICS_SHOWN_MAX: Final = 20
HOURS_SHOWN_MAX: Final = 100
KINDS: Final = {
    pb.OPERATION_KIND_CANCEL_TIMERS: OperationKind.CANCEL_TIMERS,
    pb.OPERATION_KIND_RESCHEDULE_TIMERS: OperationKind.RESCHEDULE_TIMERS,
    pb.OPERATION_KIND_FIRE_TIMERS: OperationKind.FIRE_TIMERS,
}
_KEY_IS_CUT: Final = (
    f"more than {KEY_MATCHES_MAX} messages have this key, and only timers among the newest"
    f" {KEY_MATCHES_MAX} were counted"
)


def change_from(
    engine: Engine, turn: Turn, kind: pb.OperationKind.ValueType, move: pb.TimerMove
) -> TimerChange:
    """Return the change of a request. Raises BadRequest, IllegalDeliveryTime."""
    if kind != pb.OPERATION_KIND_RESCHEDULE_TIMERS:
        return TimerChange(KINDS[kind])
    if not 0 <= move.spread_ms <= SPREAD_MS_MAX:
        raise BadRequest(f"a spread is 0 to {SPREAD_MS_MAX} ms")
    shift_ms = 0
    due_at_ms: int | None = None
    match move.WhichOneof("time"):
        case "shift_ms":
            shift_ms = move.shift_ms
        case "due_at_ms":
            due_at_ms = move.due_at_ms
        case "delay_ms":
            due_at_ms = turn.firing_ms + move.delay_ms
        case _:
            raise BadRequest("a reschedule needs a due time, a delay or a shift")
    if due_at_ms is not None:
        last_ms = due_at_ms + move.spread_ms
        engine.timers.admission.check_due(last_ms, now_ms=turn.firing_ms)
    return TimerChange(KINDS[kind], due_at_ms, shift_ms, move.spread_ms)


@final
class TimerChangeAdmin:
    """Changes some timers by their ids."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    async def ChangeTimers(self, request: pb.ChangeTimersRequest) -> pb.ChangeTimersReply:
        """Change timers in rounds between which other work goes on."""
        if request.kind not in KINDS:
            raise rpc_error(BadRequest(f"unknown kind {request.kind} of a change of timers"))
        if not 1 <= len(request.timer_ids) <= TIMERS_MAX:
            count = len(request.timer_ids)
            raise rpc_error(BadRequest(f"{count} timers; 1 to {TIMERS_MAX} are allowed"))
        if len(set(request.timer_ids)) < len(request.timer_ids):
            raise rpc_error(BadRequest("a timer is given more than once; give each timer once"))
        run = _IdChange(request)
        while len(run.reply.outcomes) < len(request.timer_ids) and not run.reply.stopped_by:
            part = request.timer_ids[len(run.reply.outcomes) :][:CHANGED_A_ROUND]
            await slices_in_round(self._rounds, partial(run.run, part=part))
        count = list(run.reply.outcomes).count(TimerOutcome.DONE)
        if count and not request.dry_run:
            log.info(
                "timers changed",
                kind=KINDS[request.kind].name,
                count=count,
                stopped_by=run.reply.stopped_by,
                by=request.requested_by,
            )
        return run.reply


@final
class _IdChange:
    """A call that changes timers, over several rounds."""

    def __init__(self, request: pb.ChangeTimersRequest) -> None:
        self._request = request
        self._change: TimerChange | None = None  # One delay is one due time for all rounds.
        self._audited = None
        if not request.dry_run:
            named = list(request.timer_ids[:TIMERS_NAMED_MAX])
            facts = {
                "kind": KINDS[request.kind].name,
                "timers": len(request.timer_ids),
                "ids": named,
                **_move_facts(request.move),
            }
            self._audited = change_of(request, after=facts)
        self.reply = pb.ChangeTimersReply()

    def run(self, engine: Engine, turn: Turn, part: Sequence[int]) -> Generator[None, None, None]:
        """Change some timers. Raises ServiceError if none is changed yet."""
        request, reply = self._request, self.reply
        if self._change is None:
            self._change = change_from(engine, turn, request.kind, request.move)
        allowance = Allowance(engine.tally, items=CHANGED_A_SLICE)
        with engine.fold.audited(self._audited):
            for timer_id in map(TimerId, part):
                try:
                    outcome = self._apply(engine, turn, self._change, timer_id)
                except ServiceError as error:
                    if not reply.outcomes:
                        raise
                    reply.stopped_by = error.message
                    return
                reply.outcomes.append(outcome)
                if request.dry_run:
                    topic_id = engine.timers.changes.topic_id_of(timer_id)
                    topic = engine.catalog.topics.get(TopicId(topic_id))
                    reply.topics.append("" if topic is None else topic.name)
                engine.tally.add(1)
                if allowance.is_spent:
                    yield
                    allowance = Allowance(engine.tally, items=CHANGED_A_SLICE)

    def _apply(
        self, engine: Engine, turn: Turn, change: TimerChange, timer_id: TimerId
    ) -> TimerOutcome:
        changes = engine.timers.changes
        if self._request.dry_run:
            return changes.plan(change, timer_id, turn.firing_ms)
        return changes.apply(change, timer_id, now_ms=turn.now_ms, firing_ms=turn.firing_ms)


@final
class TimerSubject:
    """The pending timers of this broker group."""

    noun = "timers"

    def check(self, engine: Engine, turn: Turn, request: pb.BeginOperationRequest) -> Hashable:
        """Return the filter and the move. Raises ServiceError."""
        level = engine.catalog.feature_level
        if level < DEAD_LETTER_LEVEL:
            raise Conflict(
                f"a change of timers by filter needs feature level {DEAD_LETTER_LEVEL}, and broker"
                f" group {engine.catalog.broker_name} has {level}; upgrade all its replicas, and"
                f" remove feature_level_max"
            )
        change_from(engine, turn, request.kind, request.move)
        return request.kind, _filter(engine, request), request.move.SerializeToString()

    def begin_count(
        self, engine: Engine, turn: Turn, request: pb.BeginOperationRequest, as_of_ms: int
    ) -> TimerCount:
        """Begin a count of the timers that match."""
        return TimerCount(
            engine.timers.changes.parts,
            _filter(engine, request),
            change_from(engine, turn, request.kind, request.move),
            as_of_ms=as_of_ms,
            firing_ms=turn.firing_ms,
            due_max_ms=turn.firing_ms + engine.config.timer.max_delay_ms,
            quarantined=list(engine.timers.quarantined),
        )

    def check_count(self, count: TimerCount) -> None:
        """Raise Conflict if older timers with the key were not counted."""
        if count.is_cut:
            raise Conflict(f"{_KEY_IS_CUT}; {OTHER_FILTER}")

    def describe(
        self,
        engine: Engine,
        _turn: Turn,
        request: pb.BeginOperationRequest,
        count: TimerCount,
        reply: pb.BeginOperationReply,
    ) -> None:
        """Add the oldest timers, the largest topics, the fullest hours, and warnings."""
        for timer_id in count.sample:
            with suppress(MessageNotFound, Conflict):
                reply.timers.append(timer_message(engine.timers.commands.status(timer_id)))
        topics = engine.catalog.topics
        reply.topics.extend(
            [
                pb.TimerTopicCount(topic=topics[topic_id].name, timers=timers)
                for topic_id, timers in count.topics.most_common(TOPICS_SHOWN_MAX)
                if topic_id in topics
            ]
        )
        for from_ms, timers in sorted(count.hours.most_common(HOURS_SHOWN_MAX)):
            reply.hours.append(pb.TimerHourCount(from_ms=from_ms, timers=timers))
        reply.warnings.extend(_warnings(engine, request, count))

    def start(
        self, engine: Engine, turn: Turn, request: pb.BeginOperationRequest, count: TimerCount
    ) -> BulkStart:
        """Return the begin of an operation on the timers of a count."""
        wanted = _filter(engine, request)._asdict()
        topic_id = wanted.pop("topic_id")
        change = change_from(engine, turn, request.kind, request.move)._asdict()
        del change["kind"]
        shown = {name: value for name, value in wanted.items() if value}
        topic = request.timers.topic
        facts = {
            "timers": count.count,
            "filter": {**({"topic": topic} if topic else {}), **shown},
            **_move_facts(request.move),
        }
        details = {
            "filter": wanted,
            "change": change,
            "topic": topic,
            "max_count": request.max_count,
            "replaced_from": count.replaced_from,
        }
        return BulkStart(0, topic_id, details, facts)


def _filter(engine: Engine, request: pb.BeginOperationRequest) -> TimerFilter:
    wanted = request.timers
    if not wanted.topic and not wanted.key:
        raise BadRequest("a filter of timers needs a topic or a key")
    topic_id = find_topic(engine, wanted.topic).id if wanted.topic else 0
    return TimerFilter(topic_id, wanted.key, wanted.tag, wanted.due_from_ms, wanted.due_to_ms)


def _move_facts(move: pb.TimerMove) -> dict[str, Any]:
    names = {"due_at_ms": "dueAtMs", "delay_ms": "delayMs", "shift_ms": "shiftMs"}
    which = move.WhichOneof("time")
    facts = {names[which]: getattr(move, which)} if which else {}
    return {**facts, **({"spreadMs": move.spread_ms} if move.spread_ms else {})}


def _warnings(engine: Engine, request: pb.BeginOperationRequest, count: TimerCount) -> list[str]:
    warnings = []
    limit = engine.config.timer.soft_limit_per_second
    second, timers = count.fullest_second
    if limit and timers > limit:
        at = datetime.fromtimestamp(second, tz=UTC).isoformat().replace("+00:00", "Z")
        warnings.append(
            f"about {timers} timers would be due in the second {at}, above the limit of {limit}"
            f" (timer_soft_limit_per_second); give a longer spreadMs"
        )
    is_fire = request.kind == pb.OPERATION_KIND_FIRE_TIMERS
    if is_fire and limit and request.rate_per_s > limit:
        warnings.append(
            f"{request.rate_per_s} timers would be due per second, above the limit of {limit}"
            f" (timer_soft_limit_per_second); give a smaller ratePerSecond"
        )
    if count.quarantined_count and request.kind != pb.OPERATION_KIND_CANCEL_TIMERS:
        warnings.append(
            f"{count.quarantined_count} timers are quarantined, because their messages are damaged:"
            f" they stay as they are"
        )
    if count.late_count:
        warnings.append(
            f"{count.late_count} timers would be due after the maximum delay of"
            f" {engine.config.timer.max_delay_ms} ms (timer_max_delay_ms): they stay as they are"
        )
    if count.damaged_count:
        warnings.append(
            f"the messages of {count.damaged_count} timers are damaged, so their keys and tags are"
            f" unknown: they stay as they are"
        )
    if count.is_cut:
        warnings.append(f"{_KEY_IS_CUT}: the change would be refused; {OTHER_FILTER}")
    return warnings
