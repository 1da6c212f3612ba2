"""Deliveries of clients that have lost a right go to others at once."""

from __future__ import annotations

import pytest

from tests.support.disk.log_checker import judge
from tests.support.worlds.engine_world import GROUP, TOPIC, World
from tidemill.broker.engine.pop import revocations
from tidemill.broker.engine.pop.deliveries import AckResult
from tidemill.common.errors import InvalidReceiptHandle
from tidemill.message.client_key import ClientKey

ONE, OTHER = "client-1", "client-2"
USER, OTHER_USER = 1, 2
INVISIBLE_MS = 600_000


def world_with(*texts: str, is_ordered: bool = False) -> World:
    world = World(is_followed=True)
    world.topic()
    world.group(is_ordered=is_ordered)
    world.send(*texts)
    return world


def revoke_later(world: World, topic: str = "") -> None:
    """Report that the client has lost a right, without running due work."""
    world.engine.commands.revoke_deliveries(ClientKey(ONE, USER), group="", topic=topic)


@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("renews", [False, True])
def test_messages_of_a_revoked_client_go_to_others_at_once(is_ordered: bool, renews: bool) -> None:
    world = world_with("a", "b", "c", is_ordered=is_ordered)
    held = world.pop(32, invisible_ms=INVISIBLE_MS, client_id=ONE, owner=USER, renews=renews)
    world.ack(held[0])
    world.revoke(ONE, owner=USER)
    again = world.pop(32, client_id=OTHER, owner=OTHER_USER)
    assert sorted(one.body for one in again) == ["b", "c"]
    assert sorted(one.attempt for one in again) == ([1, 2] if is_ordered else [2, 2])
    assert world.engine.state.counts["given_back_revoked", world.group(), world.topic()] == 2
    judge(world)


def test_handles_of_a_revoked_client_are_invalid_until_their_end() -> None:
    world = world_with("a")
    [held] = world.pop(1, invisible_ms=INVISIBLE_MS, client_id=ONE, owner=USER)
    world.revoke(ONE, owner=USER)
    assert len(world.pop(1, client_id=OTHER, owner=OTHER_USER, invisible_ms=INVISIBLE_MS)) == 1
    for _ in range(2):
        world.advance(INVISIBLE_MS // 2 - 1)
        assert world.ack(held) == [AckResult.GONE]
        with pytest.raises(InvalidReceiptHandle):
            world.change(held, 1_000)
    judge(world)


def test_only_the_client_of_the_user_loses_its_deliveries() -> None:
    world = world_with("a", "b")
    world.pop(1, invisible_ms=INVISIBLE_MS, client_id=ONE, owner=USER)
    world.pop(1, invisible_ms=INVISIBLE_MS, client_id=ONE, owner=OTHER_USER)
    world.revoke(ONE, owner=USER)
    assert world.bodies() == ["a"]


def test_a_client_keeps_the_deliveries_of_other_topics_and_groups() -> None:
    world = world_with("a")
    world.topic("T2")
    world.group("G2")
    world.send("b", topic="T2")
    for group in (GROUP, "G2"):
        for topic in (TOPIC, "T2"):
            held = world.pop(
                1, group=group, topic=topic, invisible_ms=INVISIBLE_MS, client_id=ONE, owner=USER
            )
            assert len(held) == 1

    def visible() -> set[tuple[str, str]]:
        return {
            (group, topic)
            for group in (GROUP, "G2")
            for topic in (TOPIC, "T2")
            if world.bodies(group=group, topic=topic, invisible_ms=INVISIBLE_MS)
        }

    world.revoke(ONE, owner=USER, topic="missing")
    world.revoke(ONE, owner=USER, group="missing")
    assert not visible()
    world.revoke(ONE, owner=USER, topic="T2", group=GROUP)
    assert visible() == {(GROUP, "T2")}
    world.revoke(ONE, owner=USER, topic=TOPIC)
    assert visible() == {(GROUP, TOPIC), ("G2", TOPIC)}
    world.revoke(ONE, owner=USER, group="G2")
    assert visible() == {("G2", "T2")}


def test_a_client_with_more_scopes_than_the_limit_loses_all_deliveries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(revocations, "SCOPES_MAX", 2)
    world = world_with("a")
    for topic in ("T2", "T3", "T4"):
        world.topic(topic)
    world.pop(1, invisible_ms=INVISIBLE_MS, client_id=ONE, owner=USER)
    for topic in ("T2", "T3"):
        revoke_later(world, topic)
    assert not world.bodies()
    for topic in ("T2", "T3", "T4"):
        revoke_later(world, topic)
    assert world.bodies() == ["a"]


def test_a_client_that_returns_keeps_its_new_deliveries() -> None:
    world = world_with("a", "b")
    world.pop(1, invisible_ms=INVISIBLE_MS, client_id=ONE, owner=USER)
    revoke_later(world)
    [batch] = world.engine.commands.pop(
        world.group(),
        world.topic(),
        max_messages=1,
        invisible_duration_ms=INVISIBLE_MS,
        attempt_id="",
        now_ms=world.now_ms,
        client=ClientKey(ONE, USER),
    )
    world.commit()
    assert list(batch.queue_offsets) == [1]
    assert world.bodies() == ["a"]


def test_the_messages_of_a_large_client_are_given_back_in_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(revocations, "MESSAGES_A_TURN", 4)
    world = world_with(*[f"m{n:02}" for n in range(20)])
    for _ in range(10):
        world.pop(2, invisible_ms=INVISIBLE_MS, client_id=ONE, owner=USER)
    world.revoke(ONE, owner=USER)
    bodies = [one.body for _ in range(2) for one in world.pop(32, client_id=OTHER)]
    assert sorted(bodies) == [f"m{n:02}" for n in range(20)]
    assert world.engine.consumption.revocations.next_at_ms() is None
    judge(world)


def test_a_revocation_survives_a_kill() -> None:
    world = world_with("a")
    [held] = world.pop(1, invisible_ms=INVISIBLE_MS, client_id=ONE, owner=USER)
    world.revoke(ONE, owner=USER)
    world.disk = world.disk.after_kill()
    world.open()
    world.run_due()
    assert world.ack(held) == [AckResult.GONE]
    assert world.bodies() == ["a"]
    judge(world)
