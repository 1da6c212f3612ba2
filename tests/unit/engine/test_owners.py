"""A client is its id and its user: another user cannot settle, end or extend its deliveries."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.worlds.engine_world import PoppedMessage, World
from tidemill.broker.engine.layout import delivery_rows, pop_checkpoint
from tidemill.broker.engine.layout.record import UnknownRecord
from tidemill.broker.engine.pop.deliveries import AckResult
from tidemill.broker.engine.pop.holder_numbers import HolderNumbers
from tidemill.broker.engine.pop.renewals import SILENT_GRACE_MS, SILENT_MS
from tidemill.common.errors import InvalidReceiptHandle
from tidemill.message.client_key import NO_OWNER, ClientKey

ONE, MALLORY = 5, 6
CLIENT = "client-1"
FIRST_MS = 60_000


def owned(count: int = 1, *, is_ordered: bool = False) -> World:
    world = World(is_followed=True)
    world.topic()
    world.group(is_ordered=is_ordered)
    world.send(*[f"m{n}" for n in range(count)])
    return world


def push(world: World, owner: int = ONE) -> list[PoppedMessage]:
    return world.pop(invisible_ms=FIRST_MS, client_id=CLIENT, owner=owner, renews=True)


def of(popped: PoppedMessage, owner: int) -> PoppedMessage:
    """Return a delivery as another user names it."""
    delivery = popped.delivery._replace(owner=owner)
    return PoppedMessage(popped.body, delivery, popped.attempt, popped.offset, popped.origin)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(
    ("holder", "caller", "may"),
    [
        (ONE, ONE, True),
        (ONE, MALLORY, False),
        (ONE, NO_OWNER, True),
        (NO_OWNER, MALLORY, True),
        (NO_OWNER, NO_OWNER, True),
    ],
)
def test_only_its_owner_settles_a_delivery(
    holder: int, caller: int, may: bool, restarts: bool
) -> None:
    world = owned(3)
    acked, changed, dead = (of(one, caller) for one in push(world, holder))
    if restarts:
        world.restart()
    assert world.ack(acked) == [AckResult.APPLIED if may else AckResult.GONE]
    if may:
        world.change(changed, 0)
        world.engine.commands.dead_letter(dead.delivery, world.now_ms)
        return
    with pytest.raises(InvalidReceiptHandle):
        world.change(changed, 0)
    with pytest.raises(InvalidReceiptHandle):
        world.engine.commands.dead_letter(dead.delivery, world.now_ms)
    with pytest.raises(InvalidReceiptHandle):
        world.engine.commands.dead_letter_again(dead.delivery, world.now_ms)
    with pytest.raises(InvalidReceiptHandle):
        world.engine.commands.change_invisible_again(
            changed.delivery, invisible_duration_ms=0, suspend=False, now_ms=world.now_ms
        )
    assert world.bodies() == [], "a refused request changes nothing"


def test_a_changed_delivery_keeps_its_owner() -> None:
    world = owned()
    (popped,) = push(world)
    changed = world.change(popped, FIRST_MS)
    world.restart()
    assert world.ack(of(changed, MALLORY)) == [AckResult.GONE]
    with pytest.raises(InvalidReceiptHandle):
        world.engine.commands.change_invisible_again(
            popped.delivery._replace(owner=MALLORY),
            invisible_duration_ms=0,
            suspend=False,
            now_ms=world.now_ms,
        )
    assert world.ack(changed) == [AckResult.APPLIED]


@pytest.mark.parametrize("fails_over", [False, True])
@pytest.mark.parametrize(("ended", "comes_back"), [(ONE, True), (MALLORY, False), (NO_OWNER, True)])
def test_only_its_owner_ends_a_client(ended: int, comes_back: bool, fails_over: bool) -> None:
    world = owned()
    push(world)
    if fails_over:
        world.fail_over()
    world.end(CLIENT, owner=ended)
    assert world.bodies() == (["m0"] if comes_back else [])


@pytest.mark.parametrize(("alive", "is_kept"), [(ONE, True), (MALLORY, False), (NO_OWNER, True)])
def test_only_its_owner_keeps_a_client_alive(alive: int, is_kept: bool) -> None:
    world = owned()
    (popped,) = push(world)
    world.engine.consumption.renewals.confirm_handovers(
        [(popped.delivery.slot, popped.delivery.delivery_id)], world.now_ms
    )
    for _ in range(2 * SILENT_MS // 10_000):
        world.advance(10_000)
        world.alive(CLIENT, owner=alive)
    world.advance(SILENT_GRACE_MS)
    assert world.bodies() == ([] if is_kept else ["m0"])


def test_a_report_with_an_owner_counts_for_deliveries_without_one() -> None:
    world = owned()
    push(world, NO_OWNER)
    world.end(CLIENT, owner=MALLORY)
    assert world.bodies() == ["m0"]


def test_another_user_with_the_attempt_id_gets_no_batch() -> None:
    world = owned(2, is_ordered=True)
    world.pop(invisible_ms=FIRST_MS, client_id=CLIENT, owner=ONE, attempt_id="a")
    assert world.bodies(client_id=CLIENT, owner=MALLORY, attempt_id="a") == []
    assert world.bodies(client_id=CLIENT, owner=ONE, attempt_id="a") == ["m0", "m1"]


def test_a_snapshot_contains_the_owners() -> None:
    world = owned(2)
    push(world)
    world.checkpoint()
    world.restart()
    world.end(CLIENT, owner=MALLORY)
    assert world.bodies() == []
    world.end(CLIENT, owner=ONE)
    assert sorted(world.bodies()) == ["m0", "m1"]


# ---------------------------------------------------------------- layouts and numbers


def test_a_checkpoint_has_the_owner_after_the_client_id() -> None:
    world = owned()
    (popped,) = push(world)
    ck = pop_checkpoint.decode(world.engine.log.record_at(popped.delivery.delivery_id).body)
    body = pop_checkpoint.encode(ck)
    assert body[pop_checkpoint.BODY_SIZE :] == b"\x03\x08client-1\0\0\0\x05"
    assert pop_checkpoint.decode(body) == ck
    plain = pop_checkpoint.encode(ck._replace(owner=NO_OWNER))
    assert plain[pop_checkpoint.BODY_SIZE :] == b"\x01\x08client-1"
    unknown = bytearray(body)
    unknown[pop_checkpoint.BODY_SIZE] |= 4
    with pytest.raises(UnknownRecord):
        pop_checkpoint.decode(bytes(unknown))


def test_rows_have_owners_only_if_one_is_known() -> None:
    rows = np.zeros(2, dtype=delivery_rows.ROW)
    holders = np.array([1, 2], dtype=np.uint32)
    plain = delivery_rows.DeliveryRows(rows, {}, [ClientKey("a"), ClientKey("b")], holders)
    owned_rows = plain._replace(clients=[ClientKey("a"), ClientKey("b", 7)])
    encoded = delivery_rows.encode(owned_rows)
    assert encoded == delivery_rows.encode(plain) + bytes.fromhex("00000000 00000007")
    assert delivery_rows.decode(encoded).clients == owned_rows.clients
    assert delivery_rows.decode(delivery_rows.encode(plain)).clients == plain.clients


def test_a_key_without_an_owner_finds_all_owners() -> None:
    holders = HolderNumbers()
    keys = [ClientKey("a"), ClientKey("a", 5), ClientKey("a", 6), ClientKey("b", 5)]
    numbers = {}
    for key in keys:
        numbers[key] = holders.number_of(key)
        holders.counts[numbers[key]] += 1
    for key in keys:
        expected = {number for one, number in numbers.items() if one.matches(key)}
        assert set(holders.find(key)) == expected
    holders.recount(np.array([numbers[keys[1]]]))
    assert holders.find(ClientKey("a")) == [numbers[keys[1]]]
    assert holders.find(ClientKey("b")) == []
