"""Elections and late masters: the reports of a link, its dials and its pauses."""

from __future__ import annotations

from tests.component.proxy.test_silent_masters import World, play
from tests.unit.proxy.test_masters import GROUP, A, B, view
from tidemill.transport.routes.masters import LATE_MAX, Masters

FIRST_PAUSE_S = 0.12  # of a link after one failed attempt: 100 ms, and the step of `until`
LONGEST_PAUSE_S = 0.25


def test_a_doubtful_master_that_is_late_stays_doubtful() -> None:
    masters = Masters()
    masters.learn(GROUP, view(master=0, version=8))
    assert masters.dial(A) == A
    masters.note_failure(A, A)
    masters.note_rejection(A, A, version=7, master=B)
    masters.note_failure(A, A)
    assert masters.master_of(A) == ""


def test_a_route_without_a_master_is_no_election() -> None:
    masters = Masters()
    masters.learn(GROUP, view(version=7))
    assert masters.dial(A) == A
    assert masters.learn(GROUP, view(version=8)._replace(master=None)) == []


def test_each_election_lets_the_master_be_late_again() -> None:
    masters = Masters()
    masters.learn(GROUP, view(master=0, version=8)._replace(epoch=3))
    assert masters.dial(A) == A
    for version in (8, 9):
        for _ in range(LATE_MAX):
            masters.note_rejection(A, A, version=version - 1, master=B)
            masters.note_failure(A, A)
            assert (masters.is_late(A), masters.dial(A)) == (True, A)
        masters.learn(GROUP, view(master=0, version=9)._replace(epoch=4))


def test_the_pauses_grow_anew_after_an_election() -> None:
    async def scenario(world: World) -> None:
        await world.lose_all()
        world.network.refusing.add(A)
        dialled = len(world.network.dialled)
        world.elect(0)
        await world.until(lambda: len(world.network.dialled) > dialled)
        assert await world.until(lambda: len(world.network.dialled) > dialled + 1) < FIRST_PAUSE_S

    play(scenario)


def test_lost_replicas_are_dialled_with_long_pauses() -> None:
    async def scenario(world: World) -> None:
        await world.lose_all()
        world.network.refusing.add(A)
        dialled = len(world.network.dialled)
        took_s = await world.until(lambda: len(world.network.dialled) == dialled + 20)
        assert took_s > 20 * LONGEST_PAUSE_S / 2

    play(scenario)
