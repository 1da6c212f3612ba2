"""BrokerAdmin's calls about timers: list, count, cancel, reschedule and fire delayed messages."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import structlog

from tidemill.broker.engine.layout.numbers import TimerId
from tidemill.broker.engine.timer.status import DueRange, TimerQuery, TimerState, TimerStatus
from tidemill.broker.server.admin.lookup import find_topic
from tidemill.broker.server.round.rpc import in_round, read_in_round
from tidemill.broker.server.wire.audit_facts import audited, timer_facts
from tidemill.broker.server.wire.timers import timer_message
from tidemill.common.errors import BadRequest, MessageNotFound
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.layout.numbers import TopicId
    from tidemill.broker.engine.timer.due_count import DueCount, DueHistogram
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn

log = structlog.get_logger()


class TimerAdmin:
    """Lists and changes the engine's timers."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    async def ListTimers(self, request: pb.ListTimersRequest) -> pb.ListTimersReply:
        """Return a page of pending timers by due time; each slice of the search takes a round."""
        search = await read_in_round(
            self._rounds,
            lambda engine, _turn: engine.timers.commands.search(_query(engine, request)),
        )
        while await read_in_round(self._rounds, lambda _engine, _turn: search.step()):
            pass
        last_due_ms, last_timer_id = search.last
        return pb.ListTimersReply(
            timers=[timer_message(status) for status in search.found],
            has_more=search.has_more,
            last_due_ms=last_due_ms,
            last_timer_id=last_timer_id,
        )

    async def CountTimers(self, request: pb.CountTimersRequest) -> pb.CountTimersReply:
        """Count by topic the timers that are due soon; each slice of the count takes a round."""

        def begin(engine: Engine, turn: Turn) -> tuple[DueCount, dict[TopicId, int]]:
            timers = engine.timers
            count = timers.commands.count_due(request.within_ms, firing_ms=turn.firing_ms)
            return count, dict(timers.deliverer.delivered)

        count, delivered = await read_in_round(self._rounds, begin)
        while await read_in_round(self._rounds, lambda _engine, _turn: count.step()):
            pass

        def name(engine: Engine, _turn: Turn) -> pb.CountTimersReply:
            topics = engine.catalog.topics
            return pb.CountTimersReply(
                topics=[
                    pb.TimerCount(
                        topic=topics[topic_id].name,
                        counts=counts,
                        delivered=delivered.get(topic_id, 0),
                    )
                    for topic_id, counts in count.counts.items()
                    if topic_id in topics
                ]
            )

        return await read_in_round(self._rounds, name)

    async def GetTimerHistogram(self, request: pb.GetTimerHistogramRequest) -> pb.TimerHistogram:
        """Count timers by due time; each slice of the count takes a round."""

        def begin(engine: Engine, turn: Turn) -> DueHistogram:
            topic_id = find_topic(engine, request.topic).id if request.topic else None
            return engine.timers.commands.due_histogram(
                request.step_ms, request.buckets, firing_ms=turn.firing_ms, topic_id=topic_id
            )

        found = await read_in_round(self._rounds, begin)
        while await read_in_round(self._rounds, lambda _engine, _turn: found.step()):
            pass

        def name(engine: Engine, _turn: Turn) -> list[pb.TimerTopicCount]:
            topics = engine.catalog.topics
            return [
                pb.TimerTopicCount(topic=topics[topic_id].name, timers=timers)
                for topic_id, timers in found.by_topic.most_common(request.topics_max)
                if topic_id in topics
            ]

        return pb.TimerHistogram(
            as_of_ms=found.as_of_ms,
            from_ms=found.from_ms,
            counts=found.counts.tolist(),
            overdue=found.overdue,
            later=found.later,
            topics=await read_in_round(self._rounds, name),
        )

    async def GetTimer(self, request: pb.GetTimerRequest) -> pb.Timer:
        """Return one timer, even if it was delivered, cancelled or dropped."""
        return timer_message(
            await read_in_round(
                self._rounds,
                lambda engine, _turn: engine.timers.commands.status(TimerId(request.timer_id)),
            )
        )

    async def CancelTimer(self, request: pb.CancelTimerRequest) -> pb.Timer:
        """Cancel a pending timer; a dry run only checks it. A second cancel changes nothing."""

        def cancel(engine: Engine, turn: Turn) -> tuple[bool, TimerStatus]:
            commands, timer_id = engine.timers.commands, TimerId(request.timer_id)
            facts = _facts_of(engine, timer_id)
            after = {**facts, "state": TimerState.CANCELLED.name}
            if request.dry_run:
                commands.check_cancel(timer_id)
            else:
                with audited(engine, request, before=facts, after=after):
                    commands.cancel(timer_id, now_ms=turn.now_ms)
            return facts == after, commands.status(timer_id)

        was_cancelled, status = await in_round(self._rounds, cancel)
        if not request.dry_run and not was_cancelled:
            log.info(
                "timer cancelled",
                timer_id=status.timer_id,
                topic=status.topic,
                due_at_ms=status.due_at_ms,
                by=request.requested_by,
            )
        return timer_message(status, was_cancelled=was_cancelled)

    async def RescheduleTimer(self, request: pb.RescheduleTimerRequest) -> pb.Timer:
        """Change the due time of a pending timer."""
        expected = request.expected_due_at_ms if request.HasField("expected_due_at_ms") else None

        def reschedule(engine: Engine, turn: Turn) -> tuple[int | None, TimerStatus]:
            facts = _facts_of(engine, TimerId(request.timer_id))
            due_at_ms = request.due_at_ms
            if request.HasField("delay_ms"):
                due_at_ms = turn.firing_ms + request.delay_ms
            after = {**facts, "dueAtMs": max(due_at_ms, turn.firing_ms)}
            with audited(engine, request, before=facts, after=after):
                engine.timers.commands.reschedule(
                    TimerId(request.timer_id),
                    due_at_ms=due_at_ms,
                    expected_due_at_ms=expected,
                    now_ms=turn.now_ms,
                    firing_ms=turn.firing_ms,
                )
            return facts.get("dueAtMs"), engine.timers.commands.status(TimerId(request.timer_id))

        old_due_at_ms, status = await in_round(self._rounds, reschedule)
        log.info(
            "timer rescheduled",
            timer_id=status.timer_id,
            topic=status.topic,
            due_at_ms=status.due_at_ms,
            old_due_at_ms=old_due_at_ms,
            by=request.requested_by,
        )
        return timer_message(status)

    async def FireTimer(self, request: pb.FireTimerRequest) -> pb.Timer:
        """Deliver the message of a pending timer now."""

        def fire(engine: Engine, turn: Turn) -> TimerStatus:
            commands, timer_id = engine.timers.commands, TimerId(request.timer_id)
            facts = _facts_of(engine, timer_id)
            after = {**facts, "dueAtMs": turn.firing_ms}
            with audited(engine, request, before=facts, after=after):
                commands.fire(timer_id, now_ms=turn.now_ms, firing_ms=turn.firing_ms)
            return engine.timers.commands.status(TimerId(request.timer_id))

        status = await in_round(self._rounds, fire)
        log.info(
            "timer fired", timer_id=status.timer_id, topic=status.topic, by=request.requested_by
        )
        return timer_message(status)


def _facts_of(engine: Engine, timer_id: TimerId) -> dict[str, Any]:
    """Return the state of a timer; nothing for an unknown one, which its command counts."""
    with contextlib.suppress(MessageNotFound):
        return timer_facts(engine.timers.commands.status(timer_id))
    return {}


def _query(engine: Engine, request: pb.ListTimersRequest) -> TimerQuery:
    if request.HasField("after_due_ms") != request.HasField("after_timer_id"):
        raise BadRequest("set both after_due_ms and after_timer_id, or neither")
    query = TimerQuery(
        page_size=request.page_size,
        topic_id=find_topic(engine, request.topic).id if request.topic else None,
        due=DueRange(request.due_from_ms, request.due_to_ms),
        key=request.key,
    )
    if request.HasField("after_due_ms"):
        query = query._replace(after=(request.after_due_ms, request.after_timer_id))
    return query
