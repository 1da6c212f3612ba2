"""BrokerAdmin's calls about dead letters: list, count, show, replay and discard them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

import structlog

from tidemill.broker.engine.dead_letter.inspection import (
    NO_END,
    LetterCounts,
    LetterQuery,
    LetterSearch,
    LetterSummary,
)
from tidemill.broker.engine.dead_letter.letters import FoundLetter, LetterOutcome, replaced
from tidemill.broker.engine.layout.dead_letter import DeadLetterState
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.tally import Allowance
from tidemill.broker.server.admin.lookup import find_group
from tidemill.broker.server.round.replay_warnings import ReplayWarnings
from tidemill.broker.server.round.rpc import read_in_round, rpc_error, slices_in_round
from tidemill.broker.server.wire.audit_facts import change_of
from tidemill.broker.server.wire.dead_letters import letter_of
from tidemill.common.errors import BadRequest, ServiceError
from tidemill.message import stored_message
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.metadata.audit_log import AuditedChange
    from tidemill.broker.engine.metadata.catalog import ConsumerGroup
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn

log = structlog.get_logger()

OFFSETS_MAX: Final = 1_000  # of one call
SETTLED_A_SLICE: Final = 16  # dead letters; each is read, and a replay is appended again
SETTLED_A_ROUND: Final = 128
SETTLED_BYTES_A_ROUND: Final = 16 << 20  # as a pop
OFFSETS_NAMED_MAX: Final = 16  # in an audit record
_STATES: Final = {
    pb.DEAD_LETTER_STATE_UNSPECIFIED: None,
    pb.DEAD_LETTER_STATE_OPEN: DeadLetterState.OPEN,
    pb.DEAD_LETTER_STATE_REPLAYED: DeadLetterState.REPLAYED,
    pb.DEAD_LETTER_STATE_DISCARDED: DeadLetterState.DISCARDED,
}
_REPLAY, _DISCARD = pb.DEAD_LETTER_ACTION_REPLAY, pb.DEAD_LETTER_ACTION_DISCARD
# The outcome that changes a dead letter.
_EFFECTS: Final = {_REPLAY: LetterOutcome.REPLAYED, _DISCARD: LetterOutcome.DISCARDED}


class DeadLetterAdmin:
    """Lists and settles dead letters."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    async def ListDeadLetters(self, request: pb.ListDeadLettersRequest) -> pb.ListDeadLettersReply:
        """Return a page of dead letters, the newest first; each slice of it takes a round."""

        def begin(engine: Engine, _turn: Turn) -> LetterSearch:
            if request.state not in _STATES:
                raise BadRequest("list dead letters that are OPEN, REPLAYED or DISCARDED, or all")
            has_begin = request.HasField("before_log_offset")
            query = LetterQuery(
                request.page_size,
                find_group(engine, request.group) if request.group else None,
                request.topic,
                request.reason,
                request.tag,
                _STATES[request.state],
                request.from_ms,
                request.to_ms,
                LogOffset(request.before_log_offset) if has_begin else NO_END,
            )
            return LetterSearch(engine.letter_inspection, query)

        search = await read_in_round(self._rounds, begin)
        await self._run(search.step)
        return pb.ListDeadLettersReply(
            letters=[letter_of(status) for status in search.found],
            has_more=search.has_more,
            next_log_offset=search.before if search.has_more else 0,
        )

    async def SummarizeDeadLetters(
        self, request: pb.SummarizeDeadLettersRequest
    ) -> pb.DeadLetterSummary:
        """Count the dead letters of all groups; each slice of it takes a round."""
        with_causes = not request.without_causes
        summary = await read_in_round(
            self._rounds,
            lambda engine, _turn: LetterSummary(engine.letter_inspection, with_causes=with_causes),
        )
        await self._run(summary.step)
        return pb.DeadLetterSummary(
            groups=[_counts_of(one) for one in summary.groups],
            causes=[
                pb.DeadLetterCause(group=group, origin_topic=topic, reason=reason, count=count)
                for (group, topic, reason), count in summary.causes.most_common()
            ],
            is_partial=summary.is_partial,
        )

    async def _run(self, step: Callable[[], bool]) -> None:
        while await read_in_round(self._rounds, lambda _engine, _turn: step()):
            pass

    async def GetDeadLetter(self, request: pb.GetDeadLetterRequest) -> pb.GetDeadLetterReply:
        """Return one dead letter with its message."""

        def read(engine: Engine, _turn: Turn) -> pb.GetDeadLetterReply:
            group = find_group(engine, request.group)
            status, blob = engine.letter_inspection.status(group, request.offset)
            return pb.GetDeadLetterReply(letter=letter_of(status), blob=blob)

        return await read_in_round(self._rounds, read)

    async def SettleDeadLetters(
        self, request: pb.SettleDeadLettersRequest
    ) -> pb.SettleDeadLettersReply:
        """Replay or discard dead letters, in rounds between which other work goes on."""
        if request.action not in _EFFECTS:
            raise rpc_error(BadRequest(f"unknown action {request.action} on dead letters"))
        if not 1 <= len(request.offsets) <= OFFSETS_MAX:
            count = len(request.offsets)
            raise rpc_error(BadRequest(f"{count} dead letters; 1 to {OFFSETS_MAX} are allowed"))
        if request.blob and (request.action != _REPLAY or len(request.offsets) > 1):
            raise rpc_error(BadRequest("only one replay at a time may replace its message"))
        settlement = _Settlement(request)
        reply = pb.SettleDeadLettersReply()
        while len(reply.outcomes) < len(request.offsets) and not reply.stopped_by:
            part = request.offsets[len(reply.outcomes) :][:SETTLED_A_ROUND]
            outcomes, reply.stopped_by = await slices_in_round(
                self._rounds, functools.partial(settlement.run, part=part)
            )
            reply.outcomes.extend([str(one) for one in outcomes])
        reply.warnings.extend(settlement.warnings)
        count = list(reply.outcomes).count(_EFFECTS[request.action])
        if not request.dry_run and count:
            log.info(
                "dead letters replayed" if request.action == _REPLAY else "dead letters discarded",
                group=request.group,
                count=count,
                stopped_by=reply.stopped_by,
                by=request.requested_by,
            )
        return reply


def _counts_of(one: LetterCounts) -> pb.DeadLetterCounts:
    return pb.DeadLetterCounts(
        group=one.group,
        open=one.open,
        replayed=one.settled.replayed,
        discarded=one.settled.discarded,
        oldest_open_at_ms=one.oldest_open_at_ms,
        deleted_from_at_ms=one.deleted_from_at_ms,
    )


class _Settlement:
    """A call that settles dead letters, over several rounds."""

    def __init__(self, request: pb.SettleDeadLettersRequest) -> None:
        self._request = request
        self._change: AuditedChange | None = None
        if not request.dry_run:
            self._change = change_of(
                request,
                before={"state": DeadLetterState.OPEN.name},
                after={"state": _EFFECTS[request.action].value},
                place={
                    "deadLetters": len(request.offsets),
                    "offsets": list(request.offsets[:OFFSETS_NAMED_MAX]),
                },
            )
        self._has_outcome = False
        self.warnings: list[str] = []

    def run(
        self, engine: Engine, turn: Turn, part: Sequence[int]
    ) -> Generator[None, None, tuple[list[LetterOutcome], str]]:
        """Settle some dead letters, and return why it ended early. Raises ServiceError at first."""
        group = find_group(engine, self._request.group)
        engine.dead_letters.check_level()
        outcomes: list[LetterOutcome] = []
        round_allowance = Allowance(
            engine.tally, items=SETTLED_A_ROUND, size_bytes=SETTLED_BYTES_A_ROUND
        )
        slice_allowance = Allowance(engine.tally, items=SETTLED_A_SLICE)
        warnings = ReplayWarnings(engine, turn)
        with engine.fold.audited(self._change):
            while len(outcomes) < len(part) and not (outcomes and round_allowance.is_spent):
                offset = part[len(outcomes)]
                try:
                    outcomes.append(self._settle(engine, turn, group, offset, warnings))
                except ServiceError as error:
                    if not self._has_outcome:
                        raise
                    return outcomes, error.message
                self._has_outcome = True
                if slice_allowance.is_spent:
                    yield
                    slice_allowance = Allowance(engine.tally, items=SETTLED_A_SLICE)
        self.warnings = list(dict.fromkeys([*self.warnings, *warnings.texts()]))
        return outcomes, ""

    def _settle(
        self,
        engine: Engine,
        turn: Turn,
        group: ConsumerGroup,
        offset: int,
        warnings: ReplayWarnings,
    ) -> LetterOutcome:
        letters, request = engine.dead_letters, self._request
        if request.action == _DISCARD:
            if request.dry_run:
                return letters.plan_discard(group, offset)
            return letters.discard(group, [offset], turn.now_ms)[0]
        replacement = replaced(request.blob) if request.blob else None
        if not request.dry_run:
            return letters.replay(group, offset, turn.now_ms, replacement=replacement)
        planned = letters.plan_replay(group, offset, is_replaced=replacement is not None)
        if not isinstance(planned, FoundLetter):
            return planned
        blob = request.blob or (b"" if planned.record is None else planned.record.tail)
        warnings.note(group, planned.cause.root_topic_id, stored_message.tag_of(blob))
        return LetterOutcome.REPLAYED
