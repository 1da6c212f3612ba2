"""Deliveries of push consumers are extended while their client is alive, and given back later."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.disk.log_checker import judge
from tests.support.worlds.engine_world import GROUP, TOPIC, PoppedMessage, World
from tidemill.broker.engine.configuration.administration import ResetTarget
from tidemill.broker.engine.layout import delivery_rows, pop_checkpoint, renewal
from tidemill.broker.engine.layout.numbers import DeliverySlot, GroupId, QueueId, TopicId
from tidemill.broker.engine.layout.pop_checkpoint import (
    FLAG_HOLDER,
    FLAG_ORDERED,
    FLAG_RENEWS,
    PopCheckpoint,
)
from tidemill.broker.engine.layout.record import RecordKind
from tidemill.broker.engine.layout.renewal import Renewal, RenewalReason
from tidemill.broker.engine.pop.deliveries import AckResult
from tidemill.broker.engine.pop.holder_numbers import HolderNumbers
from tidemill.broker.engine.pop.renewals import (
    CHECK_PERIOD_MS,
    DISCONNECTED_GRACE_MS,
    HELD_MAX_MS,
    MINUTE_MS,
    SILENT_GRACE_MS,
    SILENT_MS,
    START_GRACE_MS,
    step_of,
)
from tidemill.common.errors import InvalidReceiptHandle
from tidemill.message.client_key import NO_OWNER, UNKNOWN_CLIENT, ClientKey

FIRST_MS = 60_000  # the invisible duration that proxies use for push consumers
ONE = "client-1"
OTHER = "client-2"
HEARTBEAT_MS = 10_000
RECONNECT_MS = 10_000  # after the end of a connection, until a proxy reports it


def world_with(*texts: str, is_ordered: bool = False) -> World:
    world = World(is_followed=True)
    world.topic()
    world.group(is_ordered=is_ordered)
    world.send(*texts)
    return world


def push(world: World, client_id: str = ONE, want: int = 32, **options: str) -> list[PoppedMessage]:
    """Pop as a proxy does for a push consumer."""
    return world.pop(
        want,
        invisible_ms=FIRST_MS,
        client_id=client_id,
        renews=True,
        attempt_id=options.get("attempt_id", ""),
    )


def test_a_client_that_held_nothing_for_long_is_not_silent_after_a_pop() -> None:
    world = world_with("a", "b")
    [first] = push(world, want=1)
    world.alive(ONE)
    world.ack(first)
    world.advance(SILENT_MS + FIRST_MS)  # A laptop was suspended, or a proxy was stuck.
    popped = push(world, want=1)
    hand_over(world, *popped)
    world.advance(CHECK_PERIOD_MS)
    world.advance(CHECK_PERIOD_MS + SILENT_GRACE_MS)
    assert not push(world, OTHER)
    world.advance(SILENT_MS)
    assert [one.body for one in push(world, OTHER)] == ["b"], "now it is"


def test_a_handover_does_not_renew_a_delivery_without_renewal() -> None:
    world = world_with("a")
    popped = world.pop(1, invisible_ms=FIRST_MS, client_id=ONE)
    hand_over(world, *popped)
    live_on(world, FIRST_MS, ONE)
    assert [one.body for one in push(world, OTHER)] == ["a"]


def test_a_released_and_replaced_extended_batch_ends_the_same_after_a_start() -> None:
    world = world_with(*[f"m{n}" for n in range(5)], is_ordered=True)
    popped = push(world, want=5)
    slot = popped[0].delivery.slot
    hand_over(world, *popped)
    live_on(world, 30 * MINUTE_MS, ONE)
    world.release_lock(group=GROUP, topic=TOPIC)
    again = push(world, OTHER, want=5)
    hand_over(world, *again)
    world.ack(*again)
    world.advance(1)
    free = world.engine.state.table.ids[slot]
    world.disk = world.disk.after_kill()
    world.open()
    world.run_due()
    assert world.engine.state.table.ids[slot] == free


@pytest.mark.parametrize("held_ms", [0, 30 * MINUTE_MS])
def test_messages_of_a_disconnected_client_return_a_minute_after_its_end(held_ms: int) -> None:
    world = world_with("a")
    hand_over(world, *push(world))
    world.alive(ONE)
    live_on(world, held_ms, ONE)
    world.advance(RECONNECT_MS)
    world.disconnect(ONE)
    assert not push(world, OTHER)
    world.advance(DISCONNECTED_GRACE_MS)
    assert [one.body for one in push(world, OTHER)] == ["a"]


def test_a_client_that_comes_back_keeps_its_messages() -> None:
    world = world_with("a")
    hand_over(world, *push(world))
    live_on(world, 30 * MINUTE_MS, ONE)
    world.advance(RECONNECT_MS)
    world.disconnect(ONE)
    world.advance(HEARTBEAT_MS)
    live_on(world, 10 * MINUTE_MS, ONE)
    assert not push(world, OTHER)


def test_a_client_that_another_proxy_hears_is_not_disconnected() -> None:
    world = world_with("a")
    [popped] = push(world)
    hand_over(world, popped)
    live_on(world, 30 * MINUTE_MS, ONE)
    before = visible_at(world, popped)
    world.alive(ONE)
    world.advance(1_000)
    world.disconnect(ONE)
    assert visible_at(world, popped) == before


def test_the_acks_of_a_disconnected_client_are_applied() -> None:
    world = world_with("a")
    popped = push(world)
    world.advance(RECONNECT_MS)
    world.disconnect(ONE)
    assert world.ack(*popped) == [AckResult.APPLIED]


def live_on(world: World, duration_ms: int, *client_ids: str) -> None:
    """Let time pass while these clients send heartbeats."""
    for _ in range(duration_ms // HEARTBEAT_MS):
        world.alive(*client_ids)
        world.advance(HEARTBEAT_MS)


def visible_at(world: World, popped: PoppedMessage) -> int:
    table = world.engine.state.table
    assert table.ids[popped.delivery.slot] == popped.delivery.delivery_id
    return table.visible_at_ms[popped.delivery.slot]


# ---------------------------------------------------------------- layouts


def test_a_checkpoint_has_its_holder_after_all_other_parts() -> None:
    ck = PopCheckpoint(
        DeliverySlot(1),
        GroupId(2),
        TopicId(3),
        QueueId(4),
        1,
        FLAG_ORDERED | FLAG_HOLDER,
        0,
        10,
        20,
        11,
        None,
        None,
        (3,),
        "try",
        ONE,
        renews=True,
    )
    body = pop_checkpoint.encode(ck)
    assert body[pop_checkpoint.BODY_SIZE :] == b"\0\3" + b"\3try" + b"\1\x08client-1"
    assert pop_checkpoint.decode(body) == ck
    assert pop_checkpoint.decode(pop_checkpoint.encode(ck._replace(renews=False))).renews is False


def test_a_client_id_is_cut_to_whole_characters() -> None:
    assert pop_checkpoint.cut_client(ClientKey("a" * 300, 7)) == ("a" * 255, 7)
    assert pop_checkpoint.cut_client(ClientKey("ä" * 200)) == ("ä" * 127, NO_OWNER)
    world = world_with("m")
    (popped,) = push(world, "ä" * 200)
    assert world.engine.state.table.client_of(popped.delivery.slot).client_id == "ä" * 127
    live_on(world, 90_000, "ä" * 200)
    assert world.bodies() == [], "signs of life are cut the same way"


def test_a_renewal_matches_its_drawing() -> None:
    found = Renewal(258, RenewalReason.CLIENT_SILENT, "ab", [(1, 2), (3, 4)])
    body = renewal.encode(found)
    assert body == bytes.fromhex(
        "0000000000000102 03 02 6162 00000001 0000000000000002 00000003 0000000000000004"
    )
    assert renewal.decode(memoryview(body)) == found


def test_rows_carry_their_holders_and_rows_without_a_holder_have_none() -> None:
    rows = np.zeros(3, dtype=delivery_rows.ROW)
    rows["count"], rows["flags"] = 2, [1, 0, 1]
    gaps: dict[int, tuple[int, ...]] = {0: (0, 5), 2: (0, 9)}
    old = delivery_rows.DeliveryRows(rows, gaps)
    assert delivery_rows.decode(delivery_rows.encode(old)).clients == ()
    named = old._replace(
        clients=[ClientKey("a"), ClientKey("b")], holders=np.array([2, 0, 1], dtype=np.uint32)
    )
    encoded = delivery_rows.encode(named)
    assert encoded.startswith(delivery_rows.encode(old))
    trailer = encoded[len(delivery_rows.encode(old)) :]
    assert trailer == bytes.fromhex("00000002 0161 0162 00000002 00000000 00000001")
    found = delivery_rows.decode(encoded)
    assert found.gaps == gaps
    both = delivery_rows.joined([old, found])
    assert [*both.clients], both.holder_numbers.tolist() == (
        [("a", NO_OWNER), ("b", NO_OWNER)],
        [0, 0, 0, 2, 0, 1],
    )
    part = delivery_rows.part_of(both, 5, 6)
    assert part.gaps == {0: (0, 9)}
    assert [part.clients[n - 1] for n in part.holder_numbers.tolist()] == [("a", NO_OWNER)]
    assert delivery_rows.part_of(both, 0, 3).clients == ()


# ---------------------------------------------------------------- a live client


@pytest.mark.parametrize(
    ("held_minutes", "step_minutes"), [(1, 1), (2, 3), (5, 5), (10, 10), (20, 30), (50, 60)]
)
def test_each_extension_follows_from_the_time_in_flight(
    held_minutes: int, step_minutes: int
) -> None:
    assert step_of(held_minutes * MINUTE_MS) == step_minutes * MINUTE_MS


def test_deliveries_of_a_live_client_are_extended_step_by_step() -> None:
    world = world_with("m")
    popped_at_ms = world.now_ms
    (popped,) = push(world)
    deadlines = [visible_at(world, popped)]
    for _ in range(HELD_MAX_MS // HEARTBEAT_MS - 1):
        live_on(world, HEARTBEAT_MS, ONE)
        if visible_at(world, popped) != deadlines[-1]:
            deadlines.append(visible_at(world, popped))
    minutes = [(deadline - popped_at_ms) // MINUTE_MS for deadline in deadlines]
    assert minutes == [1, 2, 5, 10, 20, 50, 110, 170, 180], "three hours are the limit"
    assert world.bodies() == []
    counts = world.engine.state.counts
    assert counts["extended", world.group(), world.topic()] == 8
    live_on(world, HEARTBEAT_MS, ONE)
    assert [(one.body, one.attempt) for one in world.pop()] == [("m", 2)]
    judge(world)


def test_the_handle_of_the_pop_acks_an_extended_delivery() -> None:
    world = world_with("m")
    (popped,) = push(world)
    live_on(world, 600_000, ONE)
    assert world.ack(popped) == [AckResult.APPLIED]
    live_on(world, 7_200_000, ONE)
    assert world.bodies() == []


def test_deliveries_of_one_client_with_one_deadline_share_a_record() -> None:
    world = world_with(*"abcd")
    for _ in range(4):
        push(world, want=1)
    live_on(world, FIRST_MS, ONE)
    assert judge(world).kinds[RecordKind.RENEW] == 1


def test_a_delivery_without_renewal_runs_out_while_its_client_is_alive() -> None:
    world = world_with("m")
    world.pop(invisible_ms=FIRST_MS, client_id=ONE)
    live_on(world, FIRST_MS, ONE)
    assert world.bodies() == ["m"]


def test_a_changed_invisible_duration_ends_the_renewal() -> None:
    world = world_with("m")
    (popped,) = push(world)
    changed = world.change(popped, 30_000)
    assert world.engine.state.table.client_of(changed.delivery.slot).client_id == ONE
    live_on(world, 30_000, ONE)
    assert world.bodies() == ["m"]


def test_a_reset_voids_renewed_deliveries() -> None:
    world = world_with("m")
    (popped,) = push(world)
    world.engine.administration.reset_offset(GROUP, TOPIC, ResetTarget(earliest=True), world.now_ms)
    world.commit()
    live_on(world, 2 * FIRST_MS, ONE)
    counts, ids = world.engine.state.counts, (world.group(), world.topic())
    assert counts["extended", *ids] == 0
    assert world.ack(popped) == [AckResult.GONE]
    world.end(ONE)
    assert counts["given_back_ended", *ids] == 0
    assert RecordKind.RENEW not in judge(world).kinds


# ---------------------------------------------------------------- a silent or ended client


def test_messages_of_a_silent_client_are_visible_a_second_later() -> None:
    world = world_with("m")
    (popped,) = push(world)
    world.advance(CHECK_PERIOD_MS)
    world.alive(ONE)
    world.advance(SILENT_MS - 1)
    assert visible_at(world, popped) > world.now_ms + SILENT_GRACE_MS, "extended once"
    world.advance(1)
    world.advance(CHECK_PERIOD_MS)
    assert visible_at(world, popped) <= world.now_ms + SILENT_GRACE_MS
    world.advance(SILENT_GRACE_MS)
    assert world.bodies() == ["m"]
    assert world.engine.state.counts["given_back_silent", world.group(), world.topic()] == 1
    with pytest.raises(InvalidReceiptHandle):
        world.change(popped, 1_000)


def test_messages_of_an_ended_client_are_visible_at_once() -> None:
    world = world_with("m", "n", "o")
    push(world, ONE, want=2)
    push(world, OTHER)
    world.end(ONE)
    assert sorted(world.bodies()) == ["m", "n"], "and no message of the other client"
    assert world.engine.state.counts["given_back_ended", world.group(), world.topic()] == 2


def pop_at_once(world: World, client_id: str) -> int:
    """Pop for a push consumer without running due work before. Return the number of messages."""
    batches = world.engine.commands.pop(
        world.group(),
        world.topic(),
        max_messages=32,
        invisible_duration_ms=FIRST_MS,
        attempt_id="",
        now_ms=world.now_ms,
        client=ClientKey(client_id),
        renews=True,
    )
    world.commit()
    return sum(len(batch.indexes) for batch in batches)


def test_a_client_that_returns_under_its_id_keeps_its_new_messages() -> None:
    world = world_with("m")
    push(world)
    world.engine.commands.end_clients([ClientKey(ONE)])
    world.send("n")
    assert pop_at_once(world, ONE) == 1
    world.run_due()
    assert world.bodies() == ["m"]
    live_on(world, 2 * FIRST_MS, ONE)
    assert world.bodies() == ["m"], "its delivery is not renewed"


def test_a_client_without_a_timely_sign_of_life_loses_its_deliveries() -> None:
    world = world_with("m")
    push(world)
    world.advance(CHECK_PERIOD_MS)
    world.alive(ONE)
    world.advance(SILENT_MS - 1)
    world.alive(ONE)
    live_on(world, 600_000, ONE)
    assert world.bodies() == []


def test_a_client_without_deliveries_is_not_tracked() -> None:
    world = world_with()
    world.alive(*[f"client-{n}" for n in range(100)])
    world.end(*[f"client-{n}" for n in range(100)])
    assert len(world.engine.state.table.clients) == 0
    assert world.engine.next_due_ms(world.now_ms, firing_ms=world.now_ms) is None


# ---------------------------------------------------------------- ordered groups


def test_an_ordered_queue_stays_locked_while_its_client_is_alive() -> None:
    world = world_with("m1", "m2", "m3", is_ordered=True)
    first = push(world, want=1)
    live_on(world, 600_000, ONE)
    assert push(world, OTHER) == []
    assert world.ack(*first) == [AckResult.APPLIED]
    assert [one.body for one in push(world, OTHER)] == ["m2", "m3"]
    judge(world)


def test_no_pop_takes_a_message_between_its_deadline_and_its_extension() -> None:
    world = world_with("m1", "m2", is_ordered=True)
    push(world, want=1)
    world.advance(CHECK_PERIOD_MS)
    world.alive(ONE)
    world.now_ms += FIRST_MS
    assert pop_at_once(world, OTHER) == 0
    lock = world.engine.inspection.find_lock((world.group(), world.topic(), QueueId(0)))
    assert lock is not None
    assert lock.client_id == ONE


def test_progress_shows_the_deadline_and_holder_of_a_lock_after_a_start() -> None:
    world = world_with("m1", is_ordered=True)
    (popped,) = push(world)
    live_on(world, FIRST_MS, ONE)
    world.restart()
    lock = world.engine.inspection.find_lock((world.group(), world.topic(), QueueId(0)))
    assert lock is not None
    assert (lock.client_id, lock.until_ms) == (ONE, visible_at(world, popped))


def test_an_ordered_queue_continues_when_its_client_ends() -> None:
    world = world_with("m1", "m2", is_ordered=True)
    push(world, want=1)
    world.end(ONE)
    assert [(one.body, one.attempt) for one in push(world, OTHER)] == [("m1", 2), ("m2", 1)]
    judge(world)


@pytest.mark.parametrize(
    ("extends", "later_ms"),
    [(World.restart, FIRST_MS), (lambda world: world.advance(FIRST_MS), 0)],
    ids=["start", "alive"],
)
def test_no_handle_of_a_repeated_attempt_acks_a_message_given_to_another_client(
    extends: Callable[[World], None], later_ms: int
) -> None:
    world = world_with("m1", is_ordered=True)
    world.alive(ONE)
    first = push(world, attempt_id="x")
    extends(world)
    world.alive(ONE)
    again = push(world, attempt_id="x")
    assert [one.delivery.delivery_id for one in again] == [first[0].delivery.delivery_id]
    world.advance(later_ms)
    world.end(ONE)
    assert [one.body for one in push(world, OTHER, attempt_id="y")] == ["m1"]
    assert world.ack(*again, *first) == [AckResult.GONE] * 2
    judge(world)


def test_a_handle_of_a_repeated_attempt_acks_an_extended_delivery() -> None:
    world = world_with("m1", "m2", is_ordered=True)
    world.alive(ONE)
    push(world, attempt_id="x")
    live_on(world, 600_000, ONE)
    again = push(world, attempt_id="x")
    assert world.ack(*again) == [AckResult.APPLIED] * 2
    judge(world)


# ---------------------------------------------------------------- handover


def leave_unconfirmed(world: World, *popped: PoppedMessage) -> None:
    for one in popped:
        world.engine.state.table.handover[one.delivery.slot] = 1


def hand_over(world: World, *popped: PoppedMessage) -> None:
    """Confirm that clients have deliveries, as a proxy does."""
    deliveries = [(one.delivery.slot, one.delivery.delivery_id) for one in popped]
    world.engine.consumption.renewals.confirm_handovers(deliveries, now_ms=world.now_ms)
    world.commit()


def test_a_delivery_without_a_confirmed_handover_is_not_extended() -> None:
    world = world_with("m", "n")
    lost, kept = push(world, want=1), push(world, want=1)
    leave_unconfirmed(world, *lost, *kept)
    hand_over(world, *kept)
    live_on(world, FIRST_MS - HEARTBEAT_MS, ONE)
    assert world.bodies() == []
    live_on(world, HEARTBEAT_MS, ONE)
    assert world.bodies() == [one.body for one in lost]
    counts = world.engine.state.counts
    assert counts["given_back_unread", world.group(), world.topic()] == 1
    judge(world)


def _change(world: World, popped: PoppedMessage) -> None:
    world.change(popped, 3 * FIRST_MS)


def _dead_letter(world: World, popped: PoppedMessage) -> None:
    world.engine.commands.dead_letter(popped.delivery, world.now_ms)
    world.commit()


def _ack(world: World, popped: PoppedMessage) -> None:
    world.ack(popped)


def _ack_and_give_back(world: World, popped: PoppedMessage) -> None:
    world.ack(popped)
    delivery = popped.delivery._replace(message_index=1)
    world.give_back(PoppedMessage("n", delivery, 1, popped.offset + 1, ""))


@pytest.mark.parametrize("say", [_ack, _change, _dead_letter, _ack_and_give_back])
def test_a_request_about_a_part_of_a_delivery_confirms_all_of_it(
    say: Callable[[World, PoppedMessage], None],
) -> None:
    world = world_with("m", "n", "o")
    popped = push(world)
    leave_unconfirmed(world, *popped)
    say(world, popped[0])
    world.bodies(invisible_ms=HELD_MAX_MS)  # This one was given back.
    live_on(world, 2 * FIRST_MS, ONE)
    assert world.bodies() == []
    judge(world)


def _give_back(world: World, popped: PoppedMessage) -> None:
    world.give_back(popped)


def _release(world: World, popped: PoppedMessage) -> None:
    world.engine.commands.release(popped.delivery, world.now_ms)
    world.commit()


@pytest.mark.parametrize("settle", [_give_back, _release])
@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_part_settled_by_others_does_not_confirm_the_handover(
    settle: Callable[[World, PoppedMessage], None], is_ordered: bool
) -> None:
    world = world_with("m", "n", "o", is_ordered=is_ordered)
    popped = push(world)
    leave_unconfirmed(world, *popped)
    settle(world, popped[2])
    live_on(world, FIRST_MS, ONE)
    assert sorted(world.bodies()) == ["m", "n", "o"]
    judge(world)


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_start_extends_confirmed_deliveries_and_gives_others_a_minute(is_ordered: bool) -> None:
    world = world_with("m", is_ordered=is_ordered)
    (popped,) = push(world)
    live_on(world, 50_000, ONE)
    world.restart(power_cut=True)
    begun_ms = world.now_ms
    hand_over(world, popped)
    live_on(world, 600_000, ONE)
    assert world.bodies() == [], "its client is working"
    world = world_with("m", is_ordered=is_ordered)
    push(world)
    live_on(world, 50_000, ONE)
    world.restart(power_cut=True)
    begun_ms = world.now_ms
    while world.now_ms < begun_ms + START_GRACE_MS - HEARTBEAT_MS:
        live_on(world, HEARTBEAT_MS, ONE)
        assert world.bodies() == []
    # A second start does not extend the time.
    world.restart(power_cut=True)
    live_on(world, HEARTBEAT_MS, ONE)
    assert world.bodies() == ["m"], "maybe no client has it"
    judge(world)


@pytest.mark.parametrize("starts", [1, 2])
def test_deliveries_of_a_client_that_ends_after_a_start_are_given_back_at_once(starts: int) -> None:
    world = world_with("m")
    push(world)
    world.send("n")
    world.pop(
        invisible_ms=2 * FIRST_MS, client_id=ONE
    )  # It is not renewed: the client has chosen its time.
    for _ in range(starts):
        world.restart(power_cut=True)
    world.alive(ONE)
    world.end(ONE)
    assert world.bodies() == ["m"]
    judge(world)


@pytest.mark.parametrize("say", [_ack, _change, _dead_letter])
def test_a_request_after_a_start_leaves_other_deliveries_to_be_given_back(
    say: Callable[[World, PoppedMessage], None],
) -> None:
    world = world_with("m", "n", "o")
    popped = push(world)
    world.restart()
    say(world, popped[0])
    world.end(ONE)
    assert sorted(world.bodies()) == ["n", "o"]
    judge(world)


def test_a_start_and_a_handover_ignore_void_deliveries() -> None:
    world = world_with("m")
    (popped,) = push(world)
    world.engine.administration.reset_offset(GROUP, TOPIC, ResetTarget(earliest=True), world.now_ms)
    world.commit()
    world.restart()
    assert RecordKind.RENEW not in judge(world).kinds
    world = world_with("m")
    (popped,) = push(world)
    world.restart()
    world.engine.administration.reset_offset(GROUP, TOPIC, ResetTarget(earliest=True), world.now_ms)
    hand_over(world, popped)
    assert judge(world).kinds[RecordKind.RENEW] == 1, "the record of the start"


def test_a_handover_does_not_revive_an_expired_delivery() -> None:
    world = world_with("m", "n", "o")
    settled, run_out, ended = (push(world, want=1)[0] for _ in range(3))
    world.restart()
    world.ack(settled)
    world.end(ONE)
    world.advance(2 * START_GRACE_MS)
    hand_over(world, settled, run_out, ended)
    assert sorted(world.bodies()) == ["n", "o"]
    judge(world)


def test_a_late_sign_of_life_keeps_deliveries_that_are_not_given_back_yet() -> None:
    world = world_with("m")
    push(world)
    world.advance(CHECK_PERIOD_MS)
    renewals = world.engine.consumption.renewals
    world.now_ms += SILENT_MS
    renewals.find_silent(monotonic_ms=world.now_ms, log_end=world.engine.log.log_end)
    world.alive(ONE)
    live_on(world, FIRST_MS, ONE)
    assert world.bodies() == []


# ---------------------------------------------------------------- starts


@pytest.mark.parametrize("how", ["kill", "power cut", "snapshot", "segments gone", "fail over"])
@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_start_restores_deadlines_and_holders(how: str, is_ordered: bool) -> None:
    world = world_with("m", is_ordered=is_ordered)
    (popped,) = push(world)
    live_on(world, 2 * FIRST_MS, ONE)
    before = visible_at(world, popped)
    if how == "snapshot":
        world.checkpoint()
    elif how == "segments gone":
        filler = "-" * 1_000
        while len(world.engine.log.segments) < 2:
            world.send(*[filler] * 100, topic="filler")
        world.checkpoint()
        world.retire()
        assert world.engine.log.min_offset > popped.delivery.delivery_id
    if how == "fail over":
        world.fail_over()
    else:
        world.restart(power_cut=how == "power cut")
    table = world.engine.state.table
    assert visible_at(world, popped) == before
    assert table.client_of(popped.delivery.slot).client_id == ONE
    assert table.flags[popped.delivery.slot] & FLAG_RENEWS
    assert table.clients.counts[table.holders[popped.delivery.slot]] == 1
    live_on(world, 4 * FIRST_MS, ONE)
    assert visible_at(world, popped) > before
    world.end(ONE)
    # Retention has removed the message too.
    assert world.bodies() == ([] if how == "segments gone" else ["m"])


def test_all_clients_count_as_alive_for_two_minutes_after_a_start() -> None:
    world = world_with("m")
    (popped,) = push(world)
    live_on(world, FIRST_MS, ONE)
    world.restart()
    world.now_ms += FIRST_MS
    world.run_due()
    world.advance(SILENT_MS - 1)
    assert world.bodies() == [], "a broker that was down has received no sign of life"
    world.advance(CHECK_PERIOD_MS)
    world.advance(SILENT_GRACE_MS)
    assert world.bodies() == ["m"]
    with pytest.raises(InvalidReceiptHandle):
        world.change(popped, 1_000)


def test_an_ended_client_stays_ended_on_a_machine_that_has_just_started() -> None:
    world = world_with("m", "n")
    world.monotonic_ms = 5_000
    world.run_due()
    push(world, want=1)
    world.end(ONE)
    # The delivery had left before its client ended.
    (late,) = push(world, want=1)
    assert world.bodies() == ["m"]
    world.monotonic_ms += FIRST_MS
    world.advance(FIRST_MS)
    assert late.body in world.bodies()


def test_a_delivery_that_was_given_back_is_not_extended_after_a_start() -> None:
    world = world_with("m")
    push(world)
    world.advance(CHECK_PERIOD_MS)
    world.advance(SILENT_MS)
    world.restart()
    world.advance(SILENT_GRACE_MS)
    assert world.bodies() == ["m"]


# ---------------------------------------------------------------- numbers


def test_numbers_of_clients_without_deliveries_are_used_again() -> None:
    holders = HolderNumbers()
    for n in range(10_000):
        number = holders.number_of(ClientKey(f"client-{n}", n % 3))
        holders.counts[number] += 1
        if n >= 10:
            (number,) = holders.find(ClientKey(f"client-{n - 10}", (n - 10) % 3))
            holders.counts[number] -= 1
    assert len(holders) < 32
    found = [holders.find(ClientKey(f"client-{n}", n % 3)) for n in (9_999, 9_990, 5_000)]
    assert list(map(bool, found)) == [True, True, False]


def test_a_replay_of_a_long_log_does_not_keep_all_client_ids() -> None:
    world = World()
    world.topic()
    world.group()
    for n in range(300):
        world.send(f"m{n}")
        world.ack(*world.pop(client_id=f"client-{n}"))
    world.engine.state.table.clients.is_counting = False
    world.restart()
    assert len(world.engine.state.table.clients) == 0


def test_the_count_in_flight_of_a_client_is_in_messages() -> None:
    world = world_with(*"abcdefg")
    look = world.engine.inspection.in_flight_of
    one, other = ClientKey(ONE), ClientKey(OTHER)
    assert look(one) == look(UNKNOWN_CLIENT) == 0
    held = world.pop(3, client_id=ONE)
    world.pop(1, client_id=OTHER)
    assert (look(one), look(other)) == (3, 1)
    world.ack(held[0], held[2])
    assert look(one) == 1
    world.ack(held[1])
    assert look(one) == 0


def test_a_void_delivery_removed_from_the_table_has_no_holder() -> None:
    world = world_with(*"abc")
    world.pop(3, client_id=ONE)
    world.engine.administration.delete_group(GROUP, world.now_ms)
    world.commit()
    world.now_ms += 3_600_000
    world.run_due()
    assert world.engine.inspection.in_flight_of(ClientKey(ONE)) == 0
