"""Dead letters through the admin calls of a broker: pages, numbers, replays and discards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.support.audit_changes import records_of
from tests.support.worlds.engine_world import GROUP, TOPIC, blob
from tests.support.worlds.letter_world import DEAD, LetterWorld
from tests.support.worlds.round_world import RoundWorld
from tidemill.broker.engine.dead_letter import inspection
from tidemill.broker.engine.dead_letter.inspection import LetterQuery, LetterSearch, LetterSummary
from tidemill.broker.engine.engine import Engine
from tidemill.broker.engine.message_filter import EVERY_MESSAGE, TagFilter
from tidemill.broker.engine.metadata.group_pause import GroupPause
from tidemill.broker.server.admin import dead_letters
from tidemill.broker.server.admin.dead_letters import DeadLetterAdmin
from tidemill.broker.server.round.rpc import ERROR_KEY
from tidemill.broker.server.round.turn import Turn
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.transport.grpc.status import RpcError

REPLAY, DISCARD = pb.DEAD_LETTER_ACTION_REPLAY, pb.DEAD_LETTER_ACTION_DISCARD
OPEN, REPLAYED = pb.DEAD_LETTER_STATE_OPEN, pb.DEAD_LETTER_STATE_REPLAYED
DISCARDED = pb.DEAD_LETTER_STATE_DISCARDED
RESERVE_BYTES = 400_000
AUTHOR = pb.ChangeAuthor(
    user="ops",
    call="POST /groups/{group}/dead-letters:replay",
    resource=f"Group:{GROUP}",
    action="Update",
)


class LetterRounds(RoundWorld):
    """A broker in memory, with dead letters."""

    world_type = LetterWorld


class AdminWorld:
    """A broker with dead letters, and its admin calls."""

    def __init__(self, **changes: Any) -> None:
        self.shell = LetterRounds(**changes)
        world = self.shell.world
        assert isinstance(world, LetterWorld)
        self.world = world
        self.admin = DeadLetterAdmin(self.shell.rounds)

    async def find(self, **fields: Any) -> pb.ListDeadLettersReply:
        request = pb.ListDeadLettersRequest(page_size=100)
        request.MergeFrom(pb.ListDeadLettersRequest(**fields))
        return await self.admin.ListDeadLetters(request)

    async def offsets(self, **fields: Any) -> list[int]:
        return [one.offset for one in (await self.find(**fields)).letters]

    async def settle(
        self, action: pb.DeadLetterAction.ValueType, *offsets: int, **fields: Any
    ) -> pb.SettleDeadLettersReply:
        fields = {"group": GROUP, "audit": AUTHOR, **fields}
        request = pb.SettleDeadLettersRequest(action=action, offsets=offsets, **fields)
        return await self.admin.SettleDeadLetters(request)


def in_world(
    scenario: Callable[[AdminWorld], Awaitable[None]],
    prepare: Callable[[LetterWorld], None],
    **changes: Any,
) -> None:
    async def main() -> None:
        world = AdminWorld(**changes)
        prepare(world.world)
        world.shell.clock.advance(max(world.world.now_ms - world.shell.clock.wall_ms(), 0))
        async with asyncio.timeout(20), world.shell.running():
            await scenario(world)

    asyncio.run(main())


async def error_of(call: Awaitable[object]) -> str:
    """Return the name of the error that a call raises."""
    with pytest.raises(RpcError) as raised:
        await call
    return dict(raised.value.trailers)[ERROR_KEY]


def five(world: LetterWorld) -> None:
    """Make five dead letters, one per second."""
    for text in "abcde":
        world.dead(text)
        world.advance(1_000)


def test_a_list_begins_with_the_newest_and_pages_go_back() -> None:
    async def scenario(world: AdminWorld) -> None:
        first = await world.find(page_size=2)
        assert [one.offset for one in first.letters] == [4, 3]
        assert first.has_more
        second = await world.find(page_size=2, before_log_offset=first.next_log_offset)
        assert [one.offset for one in second.letters] == [2, 1]
        last = await world.find(page_size=2, before_log_offset=second.next_log_offset)
        assert [one.offset for one in last.letters] == [0]
        assert not last.has_more

    in_world(scenario, five)


def test_a_row_describes_the_message_and_its_settlement() -> None:
    async def scenario(world: AdminWorld) -> None:
        await world.settle(REPLAY, 1)
        newest, older = (await world.find(group=GROUP)).letters[-2:]
        assert (newest.group, newest.origin_topic, newest.reason) == (
            GROUP,
            TOPIC,
            "forwarded_by_client",
        )
        assert (newest.attempts, newest.replays, newest.body_size) == (1, 0, 1)
        assert (newest.state, newest.settled_by) == (REPLAYED, "ops")
        assert newest.settled_at_ms == world.shell.clock.wall_ms()
        assert newest.dead_at_ms - older.dead_at_ms == 1_000
        assert b"id-b" in newest.head
        assert (older.state, older.settled_at_ms, older.settled_by) == (OPEN, 0, "")
        found = await world.admin.GetDeadLetter(pb.GetDeadLetterRequest(group=GROUP, offset=1))
        assert found.letter == newest
        assert found.blob == blob("b")

    in_world(scenario, five)


def test_filters_choose_by_group_topic_reason_tag_state_and_time() -> None:
    def prepare(world: LetterWorld) -> None:
        five(world)
        world.topic("other")
        world.send("tagged", topic="other", tag="red")
        world.fail(*world.pop(1, topic="other"))
        world.group("second", max_attempts=1)
        world.pop(1, group="second", invisible_ms=1_000)
        world.advance(1_000)
        world.run_due()

    async def scenario(world: AdminWorld) -> None:
        await world.settle(DISCARD, 0, 2)
        assert await world.offsets(group="second") == [0]
        assert await world.offsets(group=GROUP, topic="other") == [5]
        assert await world.offsets(group=GROUP, tag="red") == [5]
        assert await world.offsets(reason="attempts_exhausted") == [0]
        assert await world.offsets(group=GROUP, state=OPEN) == [5, 4, 3, 1]
        assert await world.offsets(state=DISCARDED) == [2, 0]
        begin_ms = (await world.find(group=GROUP)).letters[-2].dead_at_ms
        assert await world.offsets(group=GROUP, from_ms=begin_ms, to_ms=begin_ms + 2_000) == [2, 1]
        assert [one.group for one in (await world.find()).letters] == ["second", *[GROUP] * 6]
        assert await error_of(world.find(group="missing")) == "GroupNotFound"
        assert await error_of(world.find(state=99)) == "BadRequest"

    in_world(scenario, prepare)


def test_a_page_ends_after_a_bounded_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "SCANNED_MAX", 2)

    async def scenario(world: AdminWorld) -> None:
        found: list[pb.ListDeadLettersReply] = []
        begin: dict[str, int] = {}
        for _ in range(3):
            page = await world.find(tag="red", **begin)
            assert page.has_more == (len(found) < 2)
            found.append(page)
            begin = {"before_log_offset": page.next_log_offset}
        assert not any(page.letters for page in found)

    in_world(scenario, five)


def test_a_summary_counts_states_topics_and_reasons() -> None:
    async def scenario(world: AdminWorld) -> None:
        await world.settle(REPLAY, 0)
        await world.settle(DISCARD, 1, 2)
        summary = await world.admin.SummarizeDeadLetters(pb.SummarizeDeadLettersRequest())
        (counts,) = summary.groups
        assert (counts.group, counts.open, counts.replayed, counts.discarded) == (GROUP, 2, 1, 2)
        oldest = (await world.find()).letters[-4]
        assert oldest.offset == 3
        assert counts.oldest_open_at_ms == oldest.dead_at_ms
        day_ms = 24 * 3_600_000
        assert counts.deleted_from_at_ms == oldest.dead_at_ms + 3 * day_ms
        (cause,) = summary.causes
        assert (cause.group, cause.origin_topic, cause.reason, cause.count) == (
            GROUP,
            TOPIC,
            "forwarded_by_client",
            2,
        )
        assert not summary.is_partial

    in_world(scenario, five)


def test_a_summary_without_causes_reads_no_dead_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: AdminWorld) -> None:
        await world.settle(DISCARD, 0)
        full = await world.admin.SummarizeDeadLetters(pb.SummarizeDeadLettersRequest())
        # A scan of the causes would stop here, and be partial.
        monkeypatch.setattr(inspection, "SCANNED_MAX", 0)
        wanted = pb.SummarizeDeadLettersRequest(without_causes=True)
        summary = await world.admin.SummarizeDeadLetters(wanted)
        assert summary.groups == full.groups
        assert (summary.groups[0].open, summary.groups[0].discarded) == (4, 1)
        assert (list(summary.causes), summary.is_partial) == ([], False)

    in_world(scenario, five)


def test_a_summary_of_too_many_dead_letters_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "SCANNED_MAX", 2)

    async def scenario(world: AdminWorld) -> None:
        summary = await world.admin.SummarizeDeadLetters(pb.SummarizeDeadLettersRequest())
        assert summary.is_partial
        assert summary.groups[0].open == 5
        assert sum(one.count for one in summary.causes) == 2

    in_world(scenario, five)


def test_a_dry_run_changes_nothing_and_says_what_would_happen() -> None:
    async def scenario(world: AdminWorld) -> None:
        await world.settle(DISCARD, 1)
        end = world.world.engine.log.log_end
        planned = await world.settle(REPLAY, 0, 1, 9, dry_run=True)
        assert list(planned.outcomes) == ["REPLAYED", "DISCARDED", "NOT_FOUND"]
        assert list((await world.settle(DISCARD, 0, dry_run=True)).outcomes) == ["DISCARDED"]
        assert world.world.engine.log.log_end == end
        assert len(planned.warnings) == 1
        assert planned.warnings[0].startswith(f"no consumer of group {GROUP} has polled")

    in_world(scenario, five)


@pytest.mark.parametrize(("tags", "count"), [((), 0), (("red",), 1), (("red", "blue"), 0)])
def test_a_dry_run_warns_if_the_filter_excludes_a_tag(tags: tuple[str, ...], count: int) -> None:
    def prepare(world: LetterWorld) -> None:
        world.group()
        world.send("a", tag="blue")
        world.fail(*world.pop(1))

    async def scenario(world: AdminWorld) -> None:
        wanted = TagFilter(frozenset(tags)) if tags else EVERY_MESSAGE

        def poll(engine: Any, turn: Any) -> None:
            turn.polls.filters.note(
                world.world.group(),
                world.world.topic(),
                wanted,
                "client",
                catalog=engine.catalog,
                monotonic_ms=turn.monotonic_ms,
            )

        await world.shell.rounds.call(poll)
        warnings = (await world.settle(REPLAY, 0, dry_run=True)).warnings
        assert len(warnings) == count
        assert all("excludes the tag blue" in one for one in warnings)

    in_world(scenario, prepare)


@pytest.mark.parametrize("is_over", [False, True])
def test_a_dry_run_warns_once_if_the_group_is_paused(*, is_over: bool) -> None:
    def prepare(world: LetterWorld) -> None:
        world.group()
        for topic in (TOPIC, "second"):
            world.send("a", topic=topic)
            world.fail(*world.pop(1, topic=topic))

    async def scenario(world: AdminWorld) -> None:
        def pause(engine: Engine, turn: Turn) -> None:
            end = GroupPause(until_ms=turn.now_ms + 10_000, by="ops")
            engine.group_pauses.put(GROUP, end, now_ms=turn.now_ms)

        await world.shell.rounds.call(pause)
        if is_over:
            world.shell.advance(10_000)
        warnings = (await world.settle(REPLAY, 0, 1, dry_run=True)).warnings
        paused = [one for one in warnings if f"group {GROUP} is paused until" in one]
        assert len(paused) == (0 if is_over else 1)
        assert len(warnings) == 2 + len(paused)  # No consumer has polled either topic.

    in_world(scenario, prepare)


def test_a_dry_run_warns_about_the_order_of_a_fifo_group() -> None:
    def prepare(world: LetterWorld) -> None:
        world.group("fifo", is_ordered=True)
        world.send("a")
        world.fail(*world.pop(1, group="fifo"))

    async def scenario(world: AdminWorld) -> None:
        warnings = (await world.settle(REPLAY, 0, dry_run=True, group="fifo")).warnings
        assert any("come after newer messages" in one for one in warnings)

    in_world(scenario, prepare)


def test_two_operators_settle_each_dead_letter_once() -> None:
    async def scenario(world: AdminWorld) -> None:
        replies = await asyncio.gather(
            world.settle(REPLAY, 0, 1, 2), world.settle(REPLAY, 2, 1), world.settle(DISCARD, 0, 1)
        )
        outcomes = [list(reply.outcomes) for reply in replies]
        assert outcomes == [["REPLAYED"] * 3, ["ALREADY_REPLAYED"] * 2, ["ALREADY_REPLAYED"] * 2]
        assert world.world.bodies() == ["a", "b", "c"]

    in_world(scenario, five)


def test_a_long_list_takes_several_rounds_and_one_audit_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dead_letters, "SETTLED_A_ROUND", 2)
    monkeypatch.setattr(dead_letters, "SETTLED_A_SLICE", 1)

    async def scenario(world: AdminWorld) -> None:
        reply = await world.settle(REPLAY, 4, 3, 2, 1, 0, requested_by="ops")
        assert list(reply.outcomes) == ["REPLAYED"] * 5
        assert world.world.bodies() == ["e", "d", "c", "b", "a"]
        (record,) = records_of(world.world.engine)
        assert (record["user"], record["resource"]) == ("ops", f"Group:{GROUP}")
        assert record["before"]["state"] == "OPEN"
        assert record["after"] == {
            "state": "REPLAYED",
            "deadLetters": 5,
            "offsets": [4, 3, 2, 1, 0],
        }

    in_world(scenario, five)


def test_a_call_without_an_effect_is_not_audited() -> None:
    async def scenario(world: AdminWorld) -> None:
        await world.settle(REPLAY, 77)
        await world.settle(REPLAY, 1, dry_run=True)
        assert records_of(world.world.engine) == []

    in_world(scenario, five)


def test_a_full_disk_ends_a_replay_early() -> None:
    def prepare(world: LetterWorld) -> None:
        world.dead("a", "b", "c", "d", size=10_000)

    async def scenario(world: AdminWorld) -> None:
        world.world.leave_room(RESERVE_BYTES // 4 + 25_000)
        reply = await world.settle(REPLAY, 0, 1, 2, 3)
        assert list(reply.outcomes) == ["REPLAYED"] * 3
        assert "replays no dead letters" in reply.stopped_by
        assert await error_of(world.settle(REPLAY, 3)) == "DiskFull"

    in_world(scenario, prepare, disk_reserve_bytes=RESERVE_BYTES)


def test_one_replay_may_replace_its_message() -> None:
    async def scenario(world: AdminWorld) -> None:
        reply = await world.settle(REPLAY, 0, blob=blob("corrected"))
        assert list(reply.outcomes) == ["REPLAYED"]
        assert world.world.bodies() == ["corrected"]

    in_world(scenario, five)


def test_wrong_requests_change_nothing() -> None:
    async def scenario(world: AdminWorld) -> None:
        end = world.world.engine.log.log_end
        for call in (
            world.settle(REPLAY),
            world.settle(pb.DEAD_LETTER_ACTION_UNSPECIFIED, 1),
            world.settle(REPLAY, *range(1_001)),
            world.settle(REPLAY, 0, 1, blob=blob("x")),
            world.settle(DISCARD, 0, blob=blob("x")),
            world.find(page_size=1_001),
        ):
            assert await error_of(call) == "BadRequest"
        request = pb.SettleDeadLettersRequest(group="missing", action=REPLAY, offsets=[0])
        assert await error_of(world.admin.SettleDeadLetters(request)) == "GroupNotFound"
        for offset in (5, 2**63):
            asked = pb.GetDeadLetterRequest(group=GROUP, offset=offset)
            assert await error_of(world.admin.GetDeadLetter(asked)) == "MessageNotFound"
        assert world.world.engine.log.log_end == end

    in_world(scenario, five)


def test_a_purged_dead_letter_is_no_longer_shown() -> None:
    def prepare(world: LetterWorld) -> None:
        five(world)
        world.purge(DEAD, low=3)

    async def scenario(world: AdminWorld) -> None:
        assert await world.offsets() == [4, 3]
        asked = pb.GetDeadLetterRequest(group=GROUP, offset=1)
        assert await error_of(world.admin.GetDeadLetter(asked)) == "MessageNotFound"
        assert list((await world.settle(DISCARD, 1)).outcomes) == ["EXPIRED"]

    in_world(scenario, prepare)


@pytest.mark.parametrize(("groups", "topics", "slices"), [(2, 64, 5), (64, 1, 2)])
def test_a_slice_looks_up_a_bounded_number_of_groups(
    monkeypatch: pytest.MonkeyPatch, groups: int, topics: int, slices: int
) -> None:
    monkeypatch.setattr(inspection, "GROUPS_A_STEP", groups)
    monkeypatch.setattr(inspection, "TOPICS_A_STEP", topics)

    def prepare(world: LetterWorld) -> None:
        for n in range(7):
            world.group(f"empty-{n}")
        five(world)
        world.group("second", max_attempts=1)
        world.fail(*world.pop(1, group="second"))

    async def scenario(world: AdminWorld) -> None:
        assert [one.group for one in (await world.find()).letters] == ["second", *[GROUP] * 5]
        summary = await world.admin.SummarizeDeadLetters(pb.SummarizeDeadLettersRequest())
        assert {one.group: one.open for one in summary.groups} == {GROUP: 5, "second": 1}
        inspected = world.world.engine.letter_inspection
        for reader in (LetterSearch(inspected, LetterQuery(1)), LetterSummary(inspected)):
            for _ in range(slices):
                assert not isinstance(reader, LetterSearch) or reader.found == []
                assert reader.step()

    in_world(scenario, prepare)
