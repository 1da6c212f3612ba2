"""The shares of consumer groups in the delivery table."""

from __future__ import annotations

import pytest

from tests.support.disk.counted_work import each_turn
from tests.support.worlds.engine_world import GROUP, PoppedMessage, World
from tidemill.broker.engine.configuration.administration import ResetTarget
from tidemill.broker.engine.message_filter import EVERY_MESSAGE
from tidemill.broker.engine.pop.deliveries import AckResult
from tidemill.broker.engine.pop.delivery_limits import POLLING_MS
from tidemill.broker.engine.pop.owner_numbers import SLOTS_FOUND_A_SWEEP
from tidemill.common.errors import Overloaded

HOUR_MS = 3_600_000
MOST = 64  # deliveries in flight
FEW = 2


def filled_world(*, is_ordered: bool = False, queues: int = 1) -> World:
    """Let the group GREEDY take all deliveries, for hours. Another group then begins to poll."""
    world = World(deliveries_max=MOST, is_followed=True)
    world.topic(queues=queues)
    world.group(GREEDY, is_ordered=is_ordered)
    for queue_id in range(queues):
        world.send(*[f"m{n}" for n in range(200 // queues)], queue_id=queue_id)
    take_all(world, GREEDY)
    return world


GREEDY = "greedy"


def take_all(world: World, group: str, *, want: int = 1) -> list[PoppedMessage]:
    """Pop until the broker rejects a pop of a group."""
    popped: list[PoppedMessage] = []
    for _ in range(1_000):
        try:
            popped += world.pop(want, group=group, invisible_ms=12 * HOUR_MS)
        except Overloaded:
            return popped
    raise AssertionError("no limit")


def live_count(world: World, group: str) -> int:
    return world.engine.state.index.slots_of(world.group(group)).live


def test_a_group_that_polls_alone_may_take_all_deliveries() -> None:
    world = filled_world()
    assert live_count(world, GREEDY) == MOST


def test_a_group_is_served_though_another_has_taken_all_deliveries() -> None:
    world = filled_world()
    first, second = world.pop(1), world.pop(1)
    with pytest.raises(Overloaded, match=f"{GROUP} has 2 .* its limit of 64"):
        world.pop(1)
    world.ack(*first)
    assert len(world.pop(1)) == len(second)


def test_no_group_takes_more_than_half_while_another_polls() -> None:
    world = World(deliveries_max=MOST)
    world.send(*[f"m{n}" for n in range(200)])
    assert len(world.pop(1)) == 1
    taken = take_all(world, GREEDY)
    assert len(taken) == MOST // 2
    with pytest.raises(Overloaded, match=f"{GREEDY} has 32 .* half of deliveries_max"):
        world.pop(1, group=GREEDY)
    assert len(take_all(world, GROUP)) == MOST // 2 - 1
    world.ack(taken[0])
    assert len(take_all(world, GREEDY)) == 1


def test_a_group_that_waits_for_notifications_polls() -> None:
    world = World(deliveries_max=MOST)
    world.send(*[f"m{n}" for n in range(200)])
    ready = world.engine.consumption.ready_count
    assert ready(
        world.group(), world.topic(), wanted=EVERY_MESSAGE, now_ms=world.now_ms
    ).ready_count
    assert len(take_all(world, GREEDY)) == MOST // 2


def test_a_group_may_take_all_again_when_the_others_have_stopped_to_poll() -> None:
    world = World(deliveries_max=MOST)
    world.send(*[f"m{n}" for n in range(200)])
    world.ack(*world.pop(1))
    assert len(take_all(world, GREEDY)) == MOST // 2
    world.advance(POLLING_MS)
    assert len(take_all(world, GREEDY)) == MOST // 2


def test_a_pop_of_many_queues_stays_within_the_share() -> None:
    world = World(deliveries_max=MOST)
    world.topic(queues=8)
    for queue_id in range(8):
        world.send(*[f"m{queue_id}-{n}" for n in range(20)], queue_id=queue_id)
    world.ack(*world.pop(1))
    popped = [one for _ in range(6) for one in world.pop(5, group=GREEDY)]
    popped += world.pop(32, group=GREEDY)
    assert live_count(world, GREEDY) <= MOST // 2
    world.ack(*popped[:1])


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_deletion_frees_all_deliveries_of_a_group(is_ordered: bool) -> None:
    queues = MOST if is_ordered else 1
    world = filled_world(is_ordered=is_ordered, queues=queues)
    held = world.engine.state.table.used_count
    assert held == MOST
    world.engine.administration.delete_group(GREEDY, world.now_ms)
    world.commit()
    world.run_due()
    assert world.engine.state.table.used_count == 0
    world.fail_over()
    world.run_due()
    assert world.engine.state.table.used_count == 0
    assert len(take_all(world, GROUP)) == MOST


def test_the_deletion_of_a_topic_frees_its_deliveries_and_no_others() -> None:
    world = filled_world()
    world.send("other", topic="other")
    (kept,) = world.pop(1, topic="other", group=GROUP)
    world.engine.administration.delete_topic("orders", world.now_ms)
    world.commit()
    world.run_due()
    assert world.engine.state.table.used_count == 1
    assert live_count(world, GREEDY) == 0
    assert world.ack(kept) == [AckResult.APPLIED]


def test_a_reset_frees_the_deliveries_that_it_voids() -> None:
    world = World(deliveries_max=MOST)
    world.send(*[f"m{n}" for n in range(200)])
    popped = take_all(world, GREEDY)
    target = ResetTarget(earliest=True)
    world.engine.administration.reset_offset(GREEDY, "orders", target, world.now_ms)
    world.commit()
    (again,) = world.pop(1, group=GREEDY)
    world.run_due()
    assert live_count(world, GREEDY) == world.engine.state.table.used_count == 1
    assert world.ack(popped[0], again) == [AckResult.GONE, AckResult.APPLIED]


def test_a_release_frees_all_deliveries_of_a_group() -> None:
    world = World(deliveries_max=MOST, is_followed=True)
    world.group(GREEDY, max_attempts=1_000)
    world.send(*[f"m{n}" for n in range(200)])
    world.ack(*world.pop(1))  # Acked; the handle stays valid for repeated acks.
    for _ in range(4):
        for one in take_all(world, GREEDY):
            world.engine.commands.release(one.delivery, world.now_ms)
        world.commit()
        world.run_due()
        assert live_count(world, GREEDY) == 0
        assert len(world.pop(1)) == 1
        # Of the deliveries that only reject old handles, the table keeps a bounded number.
        assert world.engine.state.table.used_count < MOST


def test_old_handles_are_rejected_after_the_table_has_dropped_their_deliveries() -> None:
    world = World(deliveries_max=MOST, is_followed=True)
    world.send(*[f"m{n}" for n in range(200)])
    (mine,) = world.pop(1, invisible_ms=12 * HOUR_MS)
    world.ack(mine)
    (held, *released) = take_all(world, GREEDY)
    for one in released:
        world.engine.commands.release(one.delivery, world.now_ms)
    world.commit()
    world.run_due()
    for begins_again in (world.run_due, world.restart, world.fail_over):
        begins_again()
        world.run_due()
        assert world.engine.state.kept_count <= MOST // 4
        assert world.ack(*released) == [AckResult.GONE] * len(released)
        assert world.ack(mine) == [AckResult.ALREADY], "of another group"
    assert world.ack(held) == [AckResult.APPLIED], "the table has it"


def test_changes_of_one_group_do_not_block_those_of_another() -> None:
    world = World(deliveries_max=MOST)
    world.send(*[f"m{n}" for n in range(200)])
    greedy = world.pop(32, group=GREEDY, invisible_ms=12 * HOUR_MS)
    for _ in range(10):
        greedy = [world.change(one, 12 * HOUR_MS) for one in greedy]
        world.run_due()
    (mine,) = world.pop(1)
    for _ in range(10):
        mine = world.change(mine, 12 * HOUR_MS)
    assert world.ack(mine) == [AckResult.APPLIED]


def test_each_slice_of_a_deletion_is_bounded() -> None:
    world = World(segment_bytes=16 << 20)
    count = 4 * SLOTS_FOUND_A_SWEEP
    world.send(*[f"m{n}" for n in range(count)])
    for _ in range(count):
        world.pop(1, group=GREEDY, invisible_ms=12 * HOUR_MS)
    world.engine.administration.delete_group(GREEDY, world.now_ms)
    world.commit()
    turns = list(each_turn(world.engine, world.now_ms, world.commit))
    assert max(turn.items for turn in turns) <= 2 * SLOTS_FOUND_A_SWEEP
    assert world.engine.state.table.used_count == 0


def test_ended_deliveries_of_an_ordered_group_are_replaced_in_a_full_table() -> None:
    """They stay in the table until the next batch of their queue, so they must not prevent it."""
    world = World(deliveries_max=MOST, is_followed=True)
    world.topic(queues=3)
    world.group(GROUP, is_ordered=True)
    for queue_id in range(3):
        world.send(*[f"m{n}" for n in range(60)], queue_id=queue_id)
    held = [one for _ in range(3) for one in world.pop(1, invisible_ms=10 * POLLING_MS)]
    assert live_count(world, GROUP) == len(held) == FEW + 1
    world.now_ms += 2 * POLLING_MS
    take_all(world, GREEDY)
    with pytest.raises(Overloaded, match=f"{GROUP} has 3 "):
        world.pop(1)
    world.now_ms += 10 * POLLING_MS
    world.run_due()
    again = [one for _ in range(3) for one in world.pop(1)]
    assert sorted(one.body for one in again) == sorted(one.body for one in held)
    assert live_count(world, GROUP) == FEW + 1
    world.ack(*again)
    assert live_count(world, GROUP) == 0
