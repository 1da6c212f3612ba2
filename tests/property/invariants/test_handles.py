"""Invariants 26 to 29 of pop.md section 10: checkpoints, handles and the clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.worlds.engine_world import GROUP, TOPIC, World
from tidemill.broker.engine.layout import pop_checkpoint
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.record import RecordKind
from tidemill.broker.engine.store.log_opening import LogOpening
from tidemill.common.errors import BadRequest, InvalidReceiptHandle, codes_of
from tidemill.message.receipt_handle import INDEX_COUNT_MAX, HandleSigner

HOUR_MS = 3_600_000
NAMES = st.text("abz019_-%|", min_size=1, max_size=60)


def handle_of(world: World, group: str, topic: str, popped: object) -> str:
    delivery = popped.delivery  # type: ignore[attr-defined]  # a Popped
    signer = HandleSigner(world.engine.catalog.handle_secret, world.engine.catalog.broker_name)
    signed = signer.sign(
        group,
        topic,
        slot=delivery.slot,
        delivery_id=delivery.delivery_id,
        visible_at_ms=delivery.visible_at_ms,
    )
    return signed.handle(delivery.message_index).decode()


def test_invariant_26_similar_deliveries_have_different_handles() -> None:
    """One instant, similar queues and offsets, equal offsets in two topics, a clock set back."""
    world = World()
    handles: set[str] = set()
    count = 0
    for topic in (TOPIC, "other"):
        world.topic(topic, queues=13)
        for queue_id, offsets in ((1, 24), (12, 4)):
            world.send(*[f"m{n}" for n in range(offsets)], topic=topic, queue_id=queue_id)
    for group in (GROUP, "another"):
        for topic in (TOPIC, "other"):
            while popped := world.pop(1, group=group, topic=topic):
                handles.add(handle_of(world, group, topic, popped[0]))
                count += 1
    assert len(handles) == count == 2 * 2 * 28
    world.now_ms -= HOUR_MS
    world.restart()
    world.send("late", queue_id=1)
    (late,) = world.pop(1)
    handles.add(handle_of(world, GROUP, TOPIC, late))
    assert len(handles) == count + 1


def test_invariant_26_a_reused_slot_has_another_delivery_id() -> None:
    world = World()
    seen = set()
    for n in range(50):
        world.send(f"m{n}")
        (popped,) = world.pop(1)
        seen.add((popped.delivery.slot, popped.delivery.delivery_id))
        world.ack(popped)
        if n % 10 == 0:
            world.restart(power_cut=True)
    assert len({slot for slot, _ in seen}) < 10
    assert len(seen) == 50


@given(
    group=NAMES,
    topic=NAMES,
    slot=st.integers(0, 2**32 - 1),
    delivery_id=st.integers(0, 2**63),
    visible_at_ms=st.integers(0, 2**62),
    index=st.integers(0, INDEX_COUNT_MAX - 1),
)
def test_invariant_27_a_handle_contains_its_delivery(
    group: str, topic: str, slot: int, delivery_id: int, visible_at_ms: int, index: int
) -> None:
    signer = HandleSigner(bytes(range(32)), "broker-0")
    signed = signer.sign(
        group, topic, slot=slot, delivery_id=delivery_id, visible_at_ms=visible_at_ms
    )
    found = signer.open(signed.handle(index).decode(), group, topic)
    assert found == (slot, delivery_id, visible_at_ms, index)


@given(text=st.text() | st.text("ABCabc019-_", min_size=50, max_size=60))
def test_invariant_27_an_invalid_handle_is_rejected_with_its_code(text: str) -> None:
    signer = HandleSigner(bytes(range(32)), "broker-0")
    with pytest.raises(InvalidReceiptHandle) as refused:
        signer.open(text, GROUP, TOPIC)
    assert codes_of(refused.value).rocketmq == 40013


def test_invariant_28_a_checkpoint_holds_at_most_32_rising_offsets() -> None:
    world = World()
    for n in range(200):
        world.send(f"m{n}", tag="a" if n % 3 else "b")
    world.pop(32, tags=("a",))
    world.pop(32)
    with pytest.raises(BadRequest):
        world.pop(33)
    with pytest.raises(BadRequest):
        world.pop(0)
    disk = world.disk
    world.restart()
    found = [
        pop_checkpoint.decode(bytes(one.body))
        for one in LogOpening(world.engine.log, world.disk, world.engine.mappings).scan(
            LogOffset(0)
        )
        if one.header.kind == RecordKind.CK
    ]
    assert disk is not world.disk
    assert [ck.num for ck in found] == [32, 32]
    assert found[0].gaps is not None
    for ck in found:
        offsets = list(ck.offsets)
        assert offsets == sorted(set(offsets))
        assert offsets[0] == ck.start_offset


@pytest.mark.parametrize("jump_ms", [HOUR_MS, 30 * HOUR_MS])
@pytest.mark.parametrize("duration", [5_000, 2 * HOUR_MS])
def test_invariant_29_a_clock_jump_ahead_hides_no_message_for_longer(
    jump_ms: int, duration: int
) -> None:
    """No message is visible early by more than the jump."""
    world = World()
    world.send("before", "after")
    world.pop(1, invisible_ms=duration)
    world.now_ms += jump_ms
    bodies = world.drain(invisible_ms=duration)
    assert "after" in bodies
    assert ("before" in bodies) == (jump_ms >= duration)
    world.now_ms += duration - 1
    assert "after" not in world.drain(invisible_ms=1)
    world.now_ms += 1
    assert sorted(world.drain()) == ["after", "before"]


def test_invariant_29_a_start_before_the_last_stop_loses_nothing() -> None:
    """A wall clock was set back while the broker was down."""
    world = World(now_ms=2 * HOUR_MS)
    world.send("m0", "m1")
    world.pop(1, invisible_ms=5_000)
    world.now_ms -= HOUR_MS
    world.restart()
    assert world.bodies(1, invisible_ms=5_000) == ["m1"]
    world.advance(5_000)
    assert sorted(world.drain()) == ["m0", "m1"], "each message was hidden for its five seconds"
