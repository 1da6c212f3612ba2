"""Bulk changes of timers through the admin calls of a broker: by ids, and by filter."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.support.audit_changes import records_of
from tests.support.worlds.engine_world import TOPIC
from tests.support.worlds.round_world import RoundWorld
from tests.support.worlds.timer_bulk_world import TimerBulkWorld
from tests.support.worlds.timer_world import HOUR_MS, SECOND_MS, TIMERS
from tests.unit.broker.test_dead_letter_requests import error_of
from tidemill.broker.engine.timer import keyed as keyed_module
from tidemill.broker.engine.timer.status import TimerState
from tidemill.broker.server.admin.operations import DUE_COUNT_KEPT_MS, OperationAdmin
from tidemill.broker.server.admin.timer_operations import CHANGED_A_ROUND, TimerChangeAdmin
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

CANCEL, RESCHEDULE, FIRE = (
    pb.OPERATION_KIND_CANCEL_TIMERS,
    pb.OPERATION_KIND_RESCHEDULE_TIMERS,
    pb.OPERATION_KIND_FIRE_TIMERS,
)
AUTHOR = pb.ChangeAuthor(
    user="ops", call="POST /timers:cancel", resource=f"Topic:{TOPIC}", action="Update"
)
LIMITED = replace(TIMERS, soft_limit_per_second=3)


class TimerRounds(RoundWorld):
    """A broker in memory, with timers."""

    world_type = TimerBulkWorld


class AdminOfTimers:
    """A broker with timers, and its admin calls."""

    def __init__(self, **changes: Any) -> None:
        self.shell = TimerRounds(**changes)
        world = self.shell.world
        assert isinstance(world, TimerBulkWorld)
        self.world = world
        self.operations = OperationAdmin(self.shell.rounds)

    async def change(self, kind: pb.OperationKind.ValueType, *ids: int, **fields: Any) -> Any:
        request = pb.ChangeTimersRequest(kind=kind, timer_ids=ids, **{"audit": AUTHOR, **fields})
        return await TimerChangeAdmin(self.shell.rounds).ChangeTimers(request)

    async def begin(
        self, kind: pb.OperationKind.ValueType, **fields: Any
    ) -> pb.BeginOperationReply:
        wanted = {
            "timers": pb.TimerFilter(topic=TOPIC),
            "max_count": 100,
            "rate_per_s": 10_000,
            "audit": AUTHOR,
            **fields,
        }
        return await self.operations.BeginOperation(pb.BeginOperationRequest(kind=kind, **wanted))

    async def ended(self, id_: int) -> pb.Operation:
        """Let time pass until an operation ends."""
        while True:
            known = await self.operations.ListOperations(pb.ListOperationsRequest())
            (found,) = [one for one in known.operations if one.id == id_]
            if found.state != pb.OPERATION_STATE_RUNNING:
                return found
            self.shell.clock.advance(50)
            await asyncio.sleep(0)


def in_world(scenario: Callable[[AdminOfTimers], Awaitable[None]], **changes: Any) -> None:
    """Run a scenario with five timers that are due in an hour."""

    async def main() -> None:
        world = AdminOfTimers(**changes)
        for n in range(5):
            world.world.delay(f"m{n}", world.world.now_ms + HOUR_MS + n, tag="red" if n else "")
        world.shell.clock.advance(max(world.world.now_ms - world.shell.clock.wall_ms(), 0))
        async with asyncio.timeout(20), world.shell.running():
            await scenario(world)

    asyncio.run(main())


def test_a_dry_run_counts_by_topic_and_hour() -> None:
    async def scenario(world: AdminOfTimers) -> None:
        planned = await world.begin(CANCEL, dry_run=True)
        assert (planned.count, [one.timer_id for one in planned.timers]) == (5, list(range(5)))
        assert [(one.topic, one.timers) for one in planned.topics] == [(TOPIC, 5)]
        assert sum(one.timers for one in planned.hours) == 5
        assert planned.hours[0].from_ms % HOUR_MS == 0
        assert planned.size_bytes > 0
        assert not planned.warnings
        assert not planned.HasField("operation")
        assert not records_of(world.world.engine)
        few = await world.begin(CANCEL, dry_run=True, timers=pb.TimerFilter(topic=TOPIC, tag="red"))
        assert few.count == 4

    in_world(scenario)


def test_an_operation_runs_in_the_background_with_one_audit_record() -> None:
    async def scenario(world: AdminOfTimers) -> None:
        begun = (await world.begin(CANCEL, requested_by="me", key="k")).operation
        assert (begun.kind, begun.topic, begun.group, begun.total) == (CANCEL, TOPIC, "", 5)
        again = (await world.begin(CANCEL, requested_by="me", key="k")).operation
        assert again.id == begun.id
        found = await world.ended(begun.id)
        assert (found.state, found.done, found.failed) == (pb.OPERATION_STATE_DONE, 5, 0)
        (record,) = records_of(world.world.engine)
        assert record["after"] == {
            "kind": "CANCEL_TIMERS",
            "timers": 5,
            "filter": {"topic": TOPIC},
            "ratePerSecond": 10_000,
        }

    in_world(scenario)


def test_a_delay_is_one_due_time_for_all() -> None:
    async def scenario(world: AdminOfTimers) -> None:
        at_ms = world.shell.clock.wall_ms() + 2 * HOUR_MS
        move = pb.TimerMove(delay_ms=2 * HOUR_MS)
        begun = (await world.begin(RESCHEDULE, move=move)).operation
        await world.ended(begun.id)
        assert {world.world.due(n) for n in range(5)} == {at_ms}

    in_world(scenario)


def test_a_timer_that_cannot_be_moved_is_shown() -> None:
    async def scenario(world: AdminOfTimers) -> None:
        move = pb.TimerMove(shift_ms=TIMERS.max_delay_ms)
        planned = await world.begin(RESCHEDULE, move=move, dry_run=True)
        assert ["5 timers would be due after" in one for one in planned.warnings] == [True]
        begun = (await world.begin(RESCHEDULE, move=move)).operation
        found = await world.ended(begun.id)
        assert (found.done, found.failed) == (0, 5)
        assert [(one.item, one.outcome) for one in found.failures] == [
            (n, "TOO_LATE") for n in range(5)
        ]

    in_world(scenario)


def test_a_dry_run_warns_about_a_full_second() -> None:
    async def scenario(world: AdminOfTimers) -> None:
        at_ms = world.shell.clock.wall_ms() + 2 * HOUR_MS
        crowded = await world.begin(RESCHEDULE, dry_run=True, move=pb.TimerMove(due_at_ms=at_ms))
        assert ["above the limit of 3" in one for one in crowded.warnings] == [True]
        spread = pb.TimerMove(due_at_ms=at_ms, spread_ms=20 * SECOND_MS)
        assert not (await world.begin(RESCHEDULE, dry_run=True, move=spread)).warnings
        assert (await world.begin(FIRE, dry_run=True)).warnings
        assert not (await world.begin(FIRE, dry_run=True, rate_per_s=3)).warnings
        assert not (await world.begin(CANCEL, dry_run=True)).warnings

    in_world(scenario, timer=LIMITED)


def test_a_dry_run_warns_about_quarantined_timers() -> None:
    async def scenario(world: AdminOfTimers) -> None:
        world.world.engine.timers.quarantined[1] = world.world.topic(TOPIC)
        assert "1 timers are quarantined" in (await world.begin(FIRE, dry_run=True)).warnings[0]
        assert not (await world.begin(CANCEL, dry_run=True)).warnings

    in_world(scenario)


@pytest.mark.parametrize("is_late", [False, True])
def test_timers_that_move_into_the_due_times_do_not_exceed_max_count(*, is_late: bool) -> None:
    async def scenario(world: AdminOfTimers) -> None:
        due_ms = world.world.due(0)
        timers = pb.TimerFilter(topic=TOPIC, due_from_ms=due_ms, due_to_ms=due_ms + 1)
        planned = await world.begin(CANCEL, dry_run=True, timers=timers)
        assert planned.count == 1
        for n in range(1, 5):
            await world.change(RESCHEDULE, n, move=pb.TimerMove(due_at_ms=due_ms))
        wanted = {"timers": timers, "as_of_ms": planned.as_of_ms, "max_count": 1}
        if is_late:
            world.shell.clock.advance(DUE_COUNT_KEPT_MS)
            assert await error_of(world.begin(CANCEL, **wanted)) == "Conflict"
            return
        found = await world.ended((await world.begin(CANCEL, **wanted)).operation.id)
        assert (found.state, found.done) == (pb.OPERATION_STATE_FAILED, 1)
        assert "more than the 1 timers of maxCount" in found.error
        assert [world.world.state(n) for n in range(5)].count(TimerState.PENDING) == 4

    in_world(scenario)


def test_a_time_of_the_count_in_the_future_is_refused() -> None:
    async def scenario(world: AdminOfTimers) -> None:
        planned = await world.begin(CANCEL, dry_run=True)
        later_ms = world.shell.clock.wall_ms() + HOUR_MS
        for is_dry in (False, True):
            assert (
                await error_of(world.begin(CANCEL, dry_run=is_dry, as_of_ms=later_ms)) == "Conflict"
            )
        assert not world.world.engine.catalog.operations.by_id
        assert (await world.begin(CANCEL, as_of_ms=planned.as_of_ms)).operation.total == 5

    in_world(scenario)


def test_a_key_of_too_many_messages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed_module, "KEY_MATCHES_MAX", 4)

    async def scenario(world: AdminOfTimers) -> None:
        due_ms = world.world.now_ms + HOUR_MS
        for n in range(5):
            world.world.delay(f"keyed{n}", due_ms, keys=("k",))
        timers = pb.TimerFilter(key="k")
        planned = await world.begin(CANCEL, dry_run=True, timers=timers)
        assert ["by topic, and by due times" in one for one in planned.warnings] == [True]
        assert await error_of(world.begin(CANCEL, timers=timers)) == "Conflict"
        for n in range(5, 10):
            world.world.cancel(n)
        assert await error_of(world.begin(CANCEL, timers=timers)) == "Conflict"
        by_topic = pb.TimerFilter(topic=TOPIC)
        assert (await world.begin(CANCEL, timers=by_topic)).operation.total == 5

    in_world(scenario)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"kind": 77}, "BadRequest"),
        ({"timers": pb.TimerFilter(tag="red")}, "BadRequest"),
        ({"timers": pb.TimerFilter(topic="missing")}, "TopicNotFound"),
        ({"kind": RESCHEDULE}, "BadRequest"),
        ({"kind": RESCHEDULE, "move": pb.TimerMove(shift_ms=1, spread_ms=-1)}, "BadRequest"),
        ({"kind": RESCHEDULE, "move": pb.TimerMove(due_at_ms=1 << 54)}, "IllegalDeliveryTime"),
        ({"max_count": 4}, "Conflict"),
        ({"rate_per_s": 0}, "BadRequest"),
    ],
)
def test_a_wrong_request_changes_nothing(fields: dict[str, Any], error: str) -> None:
    async def scenario(world: AdminOfTimers) -> None:
        assert await error_of(world.begin(**{"kind": CANCEL, **fields})) == error
        assert not records_of(world.world.engine)
        assert not world.world.engine.catalog.operations.by_id

    in_world(scenario)


def test_a_filter_needs_feature_level_5() -> None:
    async def scenario(world: AdminOfTimers) -> None:
        assert await error_of(world.begin(CANCEL)) == "Conflict"
        # Its records are not new.
        assert list((await world.change(CANCEL, 0)).outcomes) == ["DONE"]

    in_world(scenario, feature_level=4)


# ------------------------------------------------------------ by ids


def test_ids_have_one_outcome_each_and_one_audit_record() -> None:
    async def scenario(world: AdminOfTimers) -> None:
        planned = await world.change(CANCEL, 0, 4, 77, dry_run=True)
        assert list(planned.outcomes) == ["DONE", "DONE", "NOT_FOUND"]
        assert list(planned.topics) == [TOPIC, TOPIC, ""]
        assert records_of(world.world.engine) == []
        done = await world.change(CANCEL, 0, 4, 77)
        assert list(done.outcomes) == ["DONE", "DONE", "NOT_FOUND"]
        again = await world.change(CANCEL, 0, dry_run=True)
        assert list(again.outcomes) == ["ALREADY_CANCELLED"]
        assert [world.world.state(n).name for n in range(5)] == [
            "CANCELLED",
            "PENDING",
            "PENDING",
            "PENDING",
            "CANCELLED",
        ]
        (record,) = records_of(world.world.engine)
        assert record["after"] == {"kind": "CANCEL_TIMERS", "timers": 3, "ids": [0, 4, 77]}

    in_world(scenario)


def test_ids_are_moved_and_fired() -> None:
    async def scenario(world: AdminOfTimers) -> None:
        due_ms = world.world.due(1)
        await world.change(RESCHEDULE, 1, 2, move=pb.TimerMove(shift_ms=HOUR_MS))
        assert world.world.due(1) == due_ms + HOUR_MS
        await world.change(FIRE, 3)
        assert world.world.due(3) == world.shell.clock.wall_ms()
        last = records_of(world.world.engine)[0]["after"]
        assert (last["kind"], last["shiftMs"]) == ("RESCHEDULE_TIMERS", HOUR_MS)

    in_world(scenario)


def test_many_ids_take_several_rounds() -> None:
    async def scenario(world: AdminOfTimers) -> None:
        ids = list(range(CHANGED_A_ROUND + 10))
        reply = await world.change(CANCEL, *ids)
        assert list(reply.outcomes) == ["DONE"] * 5 + ["NOT_FOUND"] * (len(ids) - 5)
        assert len(records_of(world.world.engine)) == 1
        assert world.world.state(4) is TimerState.CANCELLED

    in_world(scenario)


@pytest.mark.parametrize(
    ("kind", "ids", "error"),
    [
        (77, [1], "BadRequest"),
        (CANCEL, [], "BadRequest"),
        (CANCEL, range(1_001), "BadRequest"),
        (CANCEL, [0, 1, 0], "BadRequest"),
        (RESCHEDULE, [0], "BadRequest"),
    ],
)
def test_wrong_ids_change_nothing(kind: Any, ids: list[int], error: str) -> None:
    async def scenario(world: AdminOfTimers) -> None:
        assert await error_of(world.change(kind, *ids)) == error
        assert records_of(world.world.engine) == []

    in_world(scenario)
