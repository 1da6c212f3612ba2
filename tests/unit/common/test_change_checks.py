"""All items of an owner are checked after a change, some in each turn of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tidemill.common.change_checks import ChangeChecks

A_TURN = 64
COUNT = 10 * A_TURN
TURNS_MAX = 1_000  # A slow machine checks fewer items in a turn.


class World:
    """Items with the number of the last change that their checks have seen."""

    def __init__(self, count: int = COUNT) -> None:
        self.items = dict.fromkeys(range(count), 0)
        self.change = 0
        self.checked_count = 0
        self.damaged = -1  # the item whose check fails
        self.checks = ChangeChecks(self.items, self.check, a_turn=A_TURN)

    def check(self, item: int) -> None:
        if item == self.damaged:
            raise RuntimeError("a damaged item")
        self.items[item] = self.change
        self.checked_count += 1

    def make_change(self) -> None:
        self.change += 1
        self.checks.check_soon()


def run(scenario: Callable[[World], Awaitable[None]], world: World | None = None) -> None:
    async def main() -> None:
        await scenario(World() if world is None else world)

    asyncio.run(main())


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_each_item_is_checked_after_a_change_over_several_turns() -> None:
    async def scenario(world: World) -> None:
        world.make_change()
        await turns(1)
        assert 0 < world.checked_count <= A_TURN
        await turns(TURNS_MAX)
        assert set(world.items.values()) == {1}
        assert world.checked_count == COUNT, "the checks end"

    run(scenario)


def test_frequent_changes_delay_the_check_of_no_item() -> None:
    """An import makes a change for each user. No item waits for the end of the import."""

    async def scenario(world: World) -> None:
        for _ in range(100):
            world.make_change()
            await turns(5)
        assert min(world.items.values()) > 0

    run(scenario)


def test_a_change_during_a_pass_reaches_the_items_that_were_checked_before() -> None:
    async def scenario(world: World) -> None:
        world.make_change()
        await turns(5)
        world.make_change()
        await turns(TURNS_MAX)
        assert set(world.items.values()) == {2}
        assert world.checked_count == 2 * COUNT

    run(scenario)


def test_many_changes_of_one_turn_cause_one_pass() -> None:
    async def scenario(world: World) -> None:
        for _ in range(100):
            world.make_change()
        await turns(TURNS_MAX)
        assert world.checked_count == COUNT

    run(scenario)


def test_an_item_that_ends_before_its_check_is_not_checked() -> None:
    async def scenario(world: World) -> None:
        world.make_change()
        world.items.clear()
        await turns(TURNS_MAX)
        assert world.checked_count == 0

    run(scenario)


def test_an_error_in_one_check_does_not_keep_the_other_items_from_theirs() -> None:
    async def scenario(world: World) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
        world.damaged = COUNT // 2
        world.make_change()
        await turns(TURNS_MAX)
        assert world.checked_count == COUNT - 1

    run(scenario)


def test_an_owner_without_items_needs_no_event_loop() -> None:
    World(0).make_change()
