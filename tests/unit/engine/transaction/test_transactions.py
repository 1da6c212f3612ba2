"""Transactions of one engine: decisions, checks, expiry, recovery, and their share of the log."""

from __future__ import annotations

import pytest

from tests.support.worlds.engine_world import TOPIC
from tests.support.worlds.packed_worlds import floors, move_floor, pack_all
from tests.support.worlds.transaction_world import SENDER, TransactionWorld
from tidemill.broker.engine.layout.numbers import HalfId, LogOffset, TopicId
from tidemill.broker.engine.layout.transaction import TransactionState
from tidemill.broker.engine.metadata.transaction_policy import PolicyChange
from tidemill.broker.engine.transaction import checks as checks_module
from tidemill.broker.engine.transaction.config import TransactionConfig
from tidemill.common.errors import (
    BadRequest,
    Conflict,
    DiskFull,
    InvalidTransactionId,
    Overloaded,
    Repairing,
    TransactionNotFound,
    VersionUnsupported,
)
from tidemill.message.resource_names import HALF_DEAD_LETTER_TOPIC

HOUR_MS = 3_600_000
FAST = PolicyChange(first_check_ms=1_000, period_ms=1_000, attempts=2)


def expired(world: TransactionWorld, text: str = "a") -> HalfId:
    """Return a half message after all its checks were written and none was answered."""
    world.set_policy(FAST)
    half_id = world.half(text)
    for _ in range(2):
        world.advance(1_100)
        assert half_id in world.write_checks()
    world.advance(1_100)
    assert world.state(half_id) is TransactionState.EXPIRED
    return half_id


ENDED = (
    TransactionState.COMMITTED,
    TransactionState.ROLLED_BACK,
    TransactionState.EXPIRED,
    TransactionState.RECOVERED,
)


def in_state(world: TransactionWorld, state: TransactionState) -> HalfId:
    if state in {TransactionState.EXPIRED, TransactionState.RECOVERED}:
        half_id = expired(world)
        if state is TransactionState.RECOVERED:
            world.recover(half_id)
        return half_id
    half_id = world.half("a")
    if state is TransactionState.COMMITTED:
        world.commit_half(half_id)
    if state is TransactionState.ROLLED_BACK:
        world.roll_back(half_id)
    return half_id


@pytest.mark.parametrize("state", list(TransactionState))
def test_each_state_answers_a_decision_as_specified(state: TransactionState) -> None:
    """All cells of the table of answers: COMMIT, ROLLBACK and an answer without a decision."""
    for decision, agreed in (
        ("commit", TransactionState.COMMITTED),
        ("roll back", TransactionState.ROLLED_BACK),
    ):
        world = TransactionWorld()
        half_id = in_state(world, state)
        decide = world.commit_half if decision == "commit" else world.roll_back
        if state in {TransactionState.HALF, agreed}:
            decide(half_id)
            decide(half_id)
            assert world.state(half_id) is agreed
        else:
            text = f"was {state.name.lower().replace('_', ' ')} at "
            with pytest.raises(InvalidTransactionId, match=text):
                decide(half_id)
            assert world.state(half_id) is state
    world = TransactionWorld()
    half_id = in_state(world, state)
    end = world.engine.log.log_end
    world.engine.transactions.note_unsure(half_id)
    assert world.engine.log.log_end == end, "nothing changes"


def test_an_unknown_transaction_and_one_of_another_topic_are_not_found() -> None:
    world = TransactionWorld()
    half_id = world.half("a")
    transactions = world.engine.transactions
    for unknown, topic_id in ((HalfId(half_id + 1), None), (half_id, TopicId(999))):
        with pytest.raises(TransactionNotFound):
            transactions.commit(unknown, topic_id=topic_id, now_ms=0, firing_ms=0)
        with pytest.raises(TransactionNotFound):
            transactions.roll_back(unknown, topic_id=topic_id, now_ms=0)
        with pytest.raises(TransactionNotFound):
            transactions.note_unsure(unknown, topic_id=topic_id)


def test_only_a_committed_message_is_delivered_and_only_once() -> None:
    world = TransactionWorld(is_followed=True)
    yes, no, _ = [world.half(text) for text in ("yes", "no", "open")]
    world.roll_back(no)
    world.commit_half(yes)
    world.commit_half(yes)
    assert world.drain() == ["yes"]
    world.restart(power_cut=True)
    assert world.state(yes) is TransactionState.COMMITTED
    world.commit_half(yes)
    assert world.drain(group="others") == ["yes"]


def test_a_commit_before_the_due_time_schedules_the_message() -> None:
    world = TransactionWorld(is_followed=True)
    half_id = world.half("later", due_at_ms=world.now_ms + 60_000)
    world.advance(1_000)
    world.commit_half(half_id)
    assert world.drain() == []
    assert world.engine.timers.index.pending_count == 1
    world.restart(power_cut=True)
    world.advance(58_000)
    assert world.drain() == []
    world.advance(2_000)
    assert world.drain() == ["later"]
    assert world.state(half_id) is TransactionState.COMMITTED


def test_a_commit_after_the_due_time_delivers_the_message_at_once() -> None:
    world = TransactionWorld()
    half_id = world.half("now", due_at_ms=world.now_ms + 2_000)
    world.advance(3_000)
    world.commit_half(half_id)
    assert world.drain() == ["now"]


def test_a_check_counts_only_when_a_producer_got_it() -> None:
    world = TransactionWorld()
    half_id = world.half("a")
    world.advance(5_900)
    assert world.take_checks() == {}
    world.advance(200)
    assert world.take_checks() == {half_id: "a"}
    world.engine.half_checks.add(half_id, world.now_ms + 1_000)
    world.advance(1_100)
    (status,) = [world.engine.transactions.status(half_id)]
    assert (status.checks, status.client, status.message_id) == (0, SENDER, "id-a")
    assert world.write_checks() == {half_id: "a"}
    status = world.engine.transactions.status(half_id)
    assert (status.checks, status.time_ms) == (1, world.now_ms + 30_000)
    world.advance(29_000)
    assert world.take_checks() == {}
    world.advance(1_200)
    assert world.take_checks() == {half_id: "a"}


def test_the_duration_of_a_message_replaces_the_first_delay_of_its_topic() -> None:
    world = TransactionWorld()
    world.set_policy(PolicyChange(first_check_ms=60_000))
    slow, fast = world.half("slow"), world.half("fast", first_check_ms=1_000)
    world.advance(1_100)
    assert set(world.write_checks()) == {fast}
    world.set_policy(PolicyChange(first_check_ms=1_000))
    world.advance(2_000)
    assert world.take_checks() == {}, "a change applies to new half messages"
    world.advance(58_000)
    assert slow in world.take_checks()


def test_after_the_last_check_the_message_becomes_a_dead_letter() -> None:
    world = TransactionWorld(is_followed=True)
    half_id = expired(world)
    world.restart(power_cut=True)
    assert world.state(half_id) is TransactionState.EXPIRED
    (dead,) = world.pop(topic=HALF_DEAD_LETTER_TOPIC)
    assert (dead.body, dead.origin) == ("a", TOPIC)
    assert world.drain() == []
    assert world.engine.half_checks.next_due_ms() is None


def test_a_recovered_transaction_is_open_again_under_a_new_id() -> None:
    world = TransactionWorld(is_followed=True)
    half_id = expired(world)
    new_id = world.recover(half_id)
    assert new_id != half_id
    with pytest.raises(Conflict, match="this one is recovered"):
        world.recover(half_id)
    with pytest.raises(Conflict, match="this one is half"):
        world.recover(new_id)
    world.restart(power_cut=True)
    assert world.state(half_id) is TransactionState.RECOVERED
    assert world.engine.transactions.status(new_id).checks == 0
    world.commit_half(new_id)
    assert world.drain() == ["a"]
    assert [one.body for one in world.pop(topic=HALF_DEAD_LETTER_TOPIC)] == ["a"]


def test_a_check_that_an_operator_asks_for_is_due_at_once_and_counts() -> None:
    world = TransactionWorld()
    half_id = world.half("a")
    world.engine.transactions.check_now(half_id)
    assert world.write_checks() == {half_id: "a"}
    assert world.engine.transactions.status(half_id).checks == 1
    world.advance(6_500)
    assert world.take_checks() == {}, "the next check is one period after the last"
    world.commit_half(half_id)
    with pytest.raises(Conflict, match="this one is committed"):
        world.engine.transactions.check_now(half_id)


def test_overdue_checks_are_spread_after_a_takeover() -> None:
    world = TransactionWorld()
    half_ids = [world.half(f"m{n}") for n in range(50)]
    world.now_ms += HOUR_MS
    world.restart()
    assert world.take_checks() == {}
    seen: list[HalfId] = []
    for _ in range(80):
        world.advance(100)
        found = world.write_checks()
        assert len(found) <= 3
        seen += found
    assert sorted(seen) == half_ids


def test_the_limit_of_open_half_messages_rejects_new_ones() -> None:
    world = TransactionWorld(transaction=TransactionConfig(open_max=2))
    first, _ = world.half("a"), world.half("b")
    with pytest.raises(Overloaded, match=r"2 half messages .* transaction_open_max"):
        world.half("c")
    world.roll_back(first)
    world.half("d")


def test_below_its_feature_level_a_broker_stores_no_half_message() -> None:
    world = TransactionWorld(feature_level=3)
    with pytest.raises(VersionUnsupported, match=r"need feature level 4, and .* has 3"):
        world.half("a")


def test_a_policy_outside_of_its_bounds_is_rejected() -> None:
    world = TransactionWorld()
    for change in (
        PolicyChange(first_check_ms=999),
        PolicyChange(period_ms=HOUR_MS + 1),
        PolicyChange(attempts=0),
        PolicyChange(attempts=101),
    ):
        with pytest.raises(BadRequest):
            world.set_policy(change)
    assert world.engine.catalog.find_topic(TOPIC) is None


def test_a_full_disk_rejects_half_messages_and_takes_decisions_from_the_reserve() -> None:
    world = TransactionWorld(disk_reserve_bytes=4 << 20)
    world.leave_room(64 << 20)
    a, b, c = [world.half(text) for text in "abc"]
    world.leave_room(3 << 20)
    with pytest.raises(DiskFull):
        world.half("d")
    world.commit_half(a)
    world.leave_room(0)
    with pytest.raises(DiskFull, match="half message stays open"):
        world.commit_half(b)
    assert world.state(b) is TransactionState.HALF
    world.roll_back(c)
    assert world.state(c) is TransactionState.ROLLED_BACK


def test_the_deletion_of_a_topic_ends_its_half_messages() -> None:
    world = TransactionWorld(is_followed=True)
    half_id, other = world.half("a"), world.half("b", topic="others")
    world.engine.administration.delete_topic(TOPIC, world.now_ms)
    world.commit()
    assert world.state(half_id) is None
    with pytest.raises(TransactionNotFound):
        world.commit_half(half_id)
    world.restart(power_cut=True)
    assert world.state(half_id) is None
    assert world.state(other) is TransactionState.HALF


def filled(world: TransactionWorld, segments: int = 4) -> None:
    """Write messages until there are so many segments, and a checkpoint that covers them."""
    while len(world.engine.log.segments) < segments:
        world.send(*(f"filler {n}" for n in range(20)), topic="filler", size=2_000)
    world.checkpoint()


@pytest.mark.parametrize("is_decided", [False, True])
def test_an_open_half_message_is_rewritten_and_its_segment_is_freed(*, is_decided: bool) -> None:
    world = TransactionWorld(segment_bytes=64 << 10, is_followed=True)
    half_id, ended = world.half("kept", size=3_000), world.half("ended")
    world.roll_back(ended)
    filled(world)
    world.now_ms += 2 * HOUR_MS  # The result is forgotten.
    low = floors(world)[1]
    move_floor(world, low)
    row = world.engine.transaction_table.find(half_id)
    assert row is not None
    assert row.log_offset > low > half_id
    pack_all(world)
    if is_decided:
        world.commit_half(half_id)
    world.fail_over()
    world.restart(power_cut=True)
    if not is_decided:
        assert world.state(half_id) is TransactionState.HALF
        world.commit_half(half_id)
    assert world.drain() == ["kept"]
    world.engine.transaction_table.oldest_result(world.now_ms)
    assert world.state(ended) is None


def test_the_state_floor_waits_for_a_remembered_result() -> None:
    world = TransactionWorld(segment_bytes=64 << 10, event_retention_ms=60_000)
    half_id = world.half("a")
    world.roll_back(half_id)
    filled(world)
    world.advance(HOUR_MS // 2)
    world.background()
    assert world.engine.log.state_floor == 0
    world.advance(HOUR_MS)
    world.background()
    assert world.engine.log.state_floor > half_id


def damage(world: TransactionWorld, half_id: HalfId) -> None:
    """Flip a bit in the body of a half message that is on the disk."""
    world.checkpoint()
    record = world.engine.log.record_at(LogOffset(half_id))
    end = half_id + record.header.size
    segment = world.engine.log.segments[0]
    world.disk = world.disk.after_kill()
    world.disk.damage(segment.name, end - segment.start - 4)
    world.open()


def test_a_damaged_half_message_cannot_be_committed_and_expires_with_its_properties() -> None:
    world = TransactionWorld()
    world.set_policy(FAST)
    half_id = world.half("a", size=500)
    damage(world, half_id)
    with pytest.raises(Repairing, match=f"half message {half_id} is damaged"):
        world.commit_half(half_id)
    assert world.state(half_id) is TransactionState.HALF
    world.advance(8_000)
    assert world.take_checks() == {}
    assert world.state(half_id) is TransactionState.EXPIRED
    (found,) = world.find(
        world.engine.catalog.topics[world.topic(HALF_DEAD_LETTER_TOPIC)], message_id="id-a"
    )
    assert found.queue_offset == 0


def test_results_are_forgotten_a_bounded_part_in_a_look() -> None:
    """A night of transactions becomes old at the same moment."""
    world = TransactionWorld()
    for _ in range(8):
        for number in range(500):
            half_id = world.half(f"m{number}")
            world.engine.transactions.roll_back(half_id, now_ms=world.now_ms)
        world.commit()
    table = world.engine.transaction_table
    before = len(table)
    table.oldest_result(world.now_ms + 2 * HOUR_MS)
    assert 0 < before - len(table) <= 2_048
    for _ in range(4):
        table.oldest_result(world.now_ms + 2 * HOUR_MS)
    assert len(table) == 0


def test_a_round_expires_a_bounded_part() -> None:
    """Commands of clients wait for the end of the round."""
    world = TransactionWorld()
    world.set_policy(PolicyChange(first_check_ms=1_000, period_ms=1_000, attempts=1))
    half_ids = [world.half(f"m{number}") for number in range(2_000)]
    checks = world.engine.half_checks
    for half_id in half_ids:
        checks.note_written(half_id, world.now_ms)
    world.commit()
    world.now_ms += 1_100
    open_before = world.engine.transaction_table.open_count
    slices = sum(1 for _ in checks.due_slices(world.now_ms, due_ms=world.now_ms))
    assert slices <= 4
    assert 0 < open_before - world.engine.transaction_table.open_count <= 256
    world.run_due()
    while world.engine.transaction_table.open_count:
        assert checks.next_due_ms() is not None
        world.engine.run_due(world.now_ms, firing_ms=world.now_ms)
        world.commit()


def test_after_the_last_decision_there_is_no_timer() -> None:
    """X-8: no deadline is left when no half message is open."""
    world = TransactionWorld()
    half_id = world.half("a", first_check_ms=HOUR_MS)
    assert world.engine.half_checks.next_due_ms() is not None
    world.commit_half(half_id)
    assert world.engine.half_checks.next_due_ms() is None


def test_due_half_messages_beyond_the_line_of_their_topic_follow_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks_module, "DUE_A_TOPIC_MAX", 3)
    world = TransactionWorld()
    half_ids = [world.half(f"m{n}", first_check_ms=1_000) for n in range(10)]
    other = world.half("other", topic="others", first_check_ms=1_000)
    world.advance(1_100)
    checks, topic_id = world.engine.half_checks, world.topic()
    assert {one: len(line) for one, line in checks.due.items()} == {
        topic_id: 3,
        world.topic("others"): 1,
    }
    seen: list[HalfId] = []
    for _ in range(10):
        found = world.write_checks()
        seen += [one for one in found if one != other]
        checks.list_again(topic_id)
        world.run_due()
    assert sorted(seen) == half_ids, "each is checked once"


def test_a_line_without_a_producer_is_found_again_in_the_table() -> None:
    world = TransactionWorld()
    half_ids = [world.half(f"m{n}", first_check_ms=1_000) for n in range(5)]
    world.advance(1_100)
    checks, topic_id = world.engine.half_checks, world.topic()
    assert checks.unlist(topic_id) == 5
    assert checks.next_due_ms() is None
    world.roll_back(half_ids[0])
    checks.list_again(topic_id)
    assert sorted(world.write_checks()) == half_ids[1:]
