"""Operations through the admin calls of a broker: dry runs, bounds, keys, progress and cancels."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.audit_changes import records_of
from tests.support.worlds.engine_world import GROUP, TOPIC
from tests.support.worlds.letter_world import DEAD, LetterWorld
from tests.unit.broker.test_dead_letter_requests import AdminWorld, error_of, five, in_world
from tidemill.broker.engine.engine import Engine
from tidemill.broker.engine.metadata.group_pause import GroupPause
from tidemill.broker.engine.metadata.settled_letters import DEAD_LETTER_QUEUE
from tidemill.broker.server.admin import letter_operations
from tidemill.broker.server.admin import operations as module
from tidemill.broker.server.admin.operations import OperationAdmin
from tidemill.broker.server.round.rpc import in_round
from tidemill.broker.server.round.turn import Turn
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

REPLAY, DISCARD = pb.OPERATION_KIND_REPLAY, pb.OPERATION_KIND_DISCARD
DONE, CANCELLED = pb.OPERATION_STATE_DONE, pb.OPERATION_STATE_CANCELLED
AUTHOR = pb.ChangeAuthor(
    user="ops",
    user_id=7,
    call="POST /groups/{group}/dead-letters:replay",
    resource=f"Group:{GROUP}",
    action="Update",
)


def admin_of(world: AdminWorld) -> OperationAdmin:
    return OperationAdmin(world.shell.rounds)


async def begin(world: AdminWorld, **fields: Any) -> pb.BeginOperationReply:
    wanted = {"kind": REPLAY, "max_count": 100, "rate_per_s": 10_000, "audit": AUTHOR, **fields}
    request = pb.BeginOperationRequest(group=GROUP, **wanted)
    return await admin_of(world).BeginOperation(request)


async def operations(world: AdminWorld) -> list[pb.Operation]:
    return list((await admin_of(world).ListOperations(pb.ListOperationsRequest())).operations)


async def ended(world: AdminWorld, id_: int) -> pb.Operation:
    """Let time pass until an operation ends."""
    while True:
        (found,) = [one for one in await operations(world) if one.id == id_]
        if found.state != pb.OPERATION_STATE_RUNNING:
            return found
        world.shell.clock.advance(50)
        await asyncio.sleep(0)


def test_a_dry_run_counts_and_shows_the_oldest() -> None:
    async def scenario(world: AdminWorld) -> None:
        end = world.world.engine.log.log_end
        planned = await begin(world, dry_run=True)
        assert (planned.count, len(planned.sample), planned.HasField("operation")) == (5, 5, False)
        assert [one.offset for one in planned.sample] == [0, 1, 2, 3, 4]
        assert planned.size_bytes > 0
        assert planned.as_of_ms == world.shell.clock.wall_ms()
        assert planned.warnings[0].startswith("no consumer of group")
        assert world.world.engine.log.log_end == end
        assert await operations(world) == []

    in_world(scenario, five)


def test_a_dry_run_of_a_replay_warns_about_a_deleted_topic() -> None:
    def prepare(world: LetterWorld) -> None:
        five(world)
        world.engine.administration.delete_topic(TOPIC, world.now_ms)
        world.commit()

    async def scenario(world: AdminWorld) -> None:
        planned = await begin(world, dry_run=True)
        assert planned.warnings == [letter_operations.TOPIC_DELETED]
        assert not (await begin(world, dry_run=True, kind=DISCARD)).warnings
        begun = (await begin(world)).operation
        assert (await ended(world, begun.id)).done == 0
        assert set(world.world.states()) == {"OPEN"}

    in_world(scenario, prepare)


def test_a_dry_run_of_a_replay_warns_about_a_lost_body() -> None:
    def prepare(world: LetterWorld) -> None:
        world.follower = None  # Its copy of the message is intact.
        world.send("a", "b")
        world.group()
        popped = world.pop(2)
        queue = world.engine.catalog.queue(world.topic(), DEAD_LETTER_QUEUE)
        log_offset, size, _ = queue.entry(0)
        world.disk.damage("log/00000000000000000000.log", log_offset + size - 1)
        world.fail(*popped)

    async def scenario(world: AdminWorld) -> None:
        planned = await begin(world, dry_run=True)
        assert (planned.count, letter_operations.BODY_LOST in planned.warnings) == (2, True)
        assert not (await begin(world, dry_run=True, kind=DISCARD)).warnings
        begun = (await begin(world)).operation
        assert (await ended(world, begun.id)).done == 1
        assert sorted(world.world.states()) == ["OPEN", "REPLAYED"]

    in_world(scenario, prepare)


def test_a_dry_run_of_a_replay_warns_if_the_group_is_paused() -> None:
    async def scenario(world: AdminWorld) -> None:
        def pause(engine: Engine, turn: Turn) -> None:
            end = GroupPause(until_ms=turn.now_ms + 10_000, by="ops")
            engine.group_pauses.put(GROUP, end, now_ms=turn.now_ms)

        await world.shell.rounds.call(pause)
        warnings = (await begin(world, dry_run=True)).warnings
        assert [f"group {GROUP} is paused until" in one for one in warnings] == [True, False]

    in_world(scenario, five)


def test_an_operation_runs_in_the_background_with_one_audit_record() -> None:
    async def scenario(world: AdminWorld) -> None:
        begun = (await begin(world, requested_by="me")).operation
        assert (begun.total, begun.group, begun.requested_by) == (5, GROUP, "me")
        assert (begun.user, begun.user_id) == ("ops", 7)
        found = await ended(world, begun.id)
        assert (found.state, found.done) == (DONE, 5)
        assert found.ended_at_ms >= found.created_at_ms > 0
        assert world.world.bodies() == ["a", "b", "c", "d", "e"]
        (record,) = records_of(world.world.engine)
        assert record["after"]["kind"] == "REPLAY"
        assert record["after"]["deadLetters"] == 5
        newest = (await world.find()).letters[0]
        assert (newest.operation_id, newest.settled_by) == (begun.id, "ops")

    in_world(scenario, five)


def test_the_bounds_of_the_dry_run_hold() -> None:
    async def scenario(world: AdminWorld) -> None:
        planned = await begin(world, dry_run=True)
        world.shell.clock.advance(1_000)
        world.world.now_ms = world.shell.clock.wall_ms()
        world.world.dead("later")
        assert await error_of(begin(world, max_count=4, as_of_ms=planned.as_of_ms)) == "Conflict"
        begun = (await begin(world, max_count=5, as_of_ms=planned.as_of_ms)).operation
        assert (await ended(world, begun.id)).done == 5
        assert world.world.states() == ["REPLAYED"] * 5 + ["OPEN"]

    in_world(scenario, five)


def test_a_repeated_call_gets_the_operation_of_its_key() -> None:
    async def scenario(world: AdminWorld) -> None:
        first, second = await asyncio.gather(
            begin(world, key="k", request_hash="1"), begin(world, key="k", request_hash="1")
        )
        assert first.operation.id == second.operation.id
        await ended(world, first.operation.id)
        again = await begin(world, key="k", request_hash="1")
        assert (again.operation.id, again.operation.state) == (first.operation.id, DONE)
        assert await error_of(begin(world, key="k", request_hash="2")) == "IdempotencyMismatch"
        assert len(await operations(world)) == 1

    in_world(scenario, five)


def many(world: LetterWorld) -> None:
    world.dead(*[f"m{n}" for n in range(200)])


def request_of(**fields: Any) -> pb.BeginOperationRequest:
    wanted = {"kind": DISCARD, "max_count": 200, "rate_per_s": 10_000, "audit": AUTHOR, **fields}
    return pb.BeginOperationRequest(group=GROUP, **wanted)


def test_a_long_count_takes_several_calls_and_the_begin_does_not_count_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "COUNT_MS", 0)  # one slice of each call

    async def scenario(world: AdminWorld) -> None:
        admin = admin_of(world)
        counts = []
        reply = await admin.BeginOperation(request_of(dry_run=True))
        as_of_ms = reply.as_of_ms
        while reply.is_partial:
            counts.append(reply.count)
            world.shell.clock.advance(500)
            reply = await admin.BeginOperation(request_of(dry_run=True, as_of_ms=as_of_ms))
        assert counts == [64, 128, 192]
        assert (reply.count, reply.as_of_ms) == (200, as_of_ms)
        assert [one.offset for one in reply.sample] == list(range(10))
        begun = await admin.BeginOperation(request_of(as_of_ms=as_of_ms))
        assert (begun.is_partial, begun.operation.total) == (False, 200)
        assert (await ended(world, begun.operation.id)).done == 200
        # The next operation with this filter and time counts what is left.
        again = request_of(as_of_ms=as_of_ms)
        assert (await admin.BeginOperation(again)).count == 0
        while (reply := await admin.BeginOperation(again)).is_partial:
            assert not reply.HasField("operation")
        assert (reply.count, reply.HasField("operation")) == (0, False)

    in_world(scenario, many)


def test_a_broker_without_the_count_counts_again_before_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "COUNT_MS", 0)

    async def scenario(world: AdminWorld) -> None:
        first, second = admin_of(world), admin_of(world)  # second: after a failover
        planned = await first.BeginOperation(request_of(dry_run=True))
        while (
            reply := await second.BeginOperation(request_of(as_of_ms=planned.as_of_ms))
        ).is_partial:
            assert await operations(world) == []
        assert reply.operation.total == 200

    in_world(scenario, many)


def test_the_broker_forgets_old_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COUNT_MS", 0)

    async def scenario(world: AdminWorld) -> None:
        admin = admin_of(world)
        as_of_ms = world.shell.clock.wall_ms()
        request = request_of(dry_run=True, as_of_ms=as_of_ms)
        assert [(await admin.BeginOperation(request)).count for _ in range(2)] == [64, 128]
        world.shell.clock.advance(module.COUNT_KEPT_MS)
        assert (await admin.BeginOperation(request)).count == 64
        for n in range(module.COUNTS_MAX):
            tagged = request_of(dry_run=True, as_of_ms=as_of_ms)
            tagged.filter.tag = str(n)
            await admin.BeginOperation(tagged)
        assert (await admin.BeginOperation(request)).count == 64

    in_world(scenario, many)


def test_nothing_that_matches_begins_nothing() -> None:
    async def scenario(world: AdminWorld) -> None:
        reply = await begin(world, filter=pb.DeadLetterFilter(tag="none"))
        assert (reply.count, reply.HasField("operation")) == (0, False)
        assert await operations(world) == []

    in_world(scenario, five)


def test_a_cancel_ends_an_operation_and_a_second_one_changes_nothing() -> None:
    async def scenario(world: AdminWorld) -> None:
        begun = (await begin(world, kind=DISCARD, rate_per_s=1)).operation
        admin = admin_of(world)
        planned = await admin.CancelOperation(pb.CancelOperationRequest(id=begun.id, dry_run=True))
        assert planned.state == pb.OPERATION_STATE_RUNNING
        for _ in range(2):
            request = pb.CancelOperationRequest(id=begun.id, audit=AUTHOR)
            assert (await admin.CancelOperation(request)).state == CANCELLED
        assert [one["action"] for one in records_of(world.world.engine)] == ["Update"] * 2
        assert world.world.states().count("DISCARDED") <= 1
        unknown = pb.CancelOperationRequest(id=7)
        assert await error_of(admin.CancelOperation(unknown)) == "OperationNotFound"

    in_world(scenario, five)


def test_a_topic_that_is_deleted_during_the_count_begins_nothing() -> None:
    def prepare(world: LetterWorld) -> None:
        world.dead(*(f"m{n}" for n in range(640)))

    async def scenario(world: AdminWorld) -> None:
        def create_again(engine: Engine, turn: Turn) -> None:
            engine.administration.delete_topic(DEAD, turn.now_ms)
            engine.administration.ensure(DEAD, GROUP, turn.now_ms)

        beginning = asyncio.create_task(error_of(begin(world, rate_per_s=1)))
        # Each list takes a round, as each slice of the count. There are at least 10 of them.
        for _ in range(4):
            assert await operations(world) == []
        await in_round(world.shell.rounds, create_again)
        assert await beginning == "Conflict"
        assert await operations(world) == []

    in_world(scenario, prepare)


@pytest.mark.parametrize(
    "fields", [{"kind": pb.OPERATION_KIND_UNSPECIFIED}, {"rate_per_s": 0}, {"rate_per_s": 10_001}]
)
def test_wrong_requests_begin_nothing(fields: dict[str, Any]) -> None:
    async def scenario(world: AdminWorld) -> None:
        assert await error_of(begin(world, **fields)) == "BadRequest"
        request = pb.BeginOperationRequest(group="missing", kind=REPLAY, rate_per_s=1)
        assert await error_of(admin_of(world).BeginOperation(request)) == "GroupNotFound"
        assert await operations(world) == []

    in_world(scenario, five)


def test_a_group_without_dead_letters_has_nothing_to_settle() -> None:
    def prepare(_world: LetterWorld) -> None:
        """Do nothing."""

    async def scenario(world: AdminWorld) -> None:
        assert (await begin(world, dry_run=True)).count == 0

    in_world(scenario, prepare)
