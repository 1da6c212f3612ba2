"""Deadlines on few timers: order, delay, and the removal of discarded items."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

from tidemill.common.deadlines import TICK_S, Deadlines


class JumpingLoop(asyncio.SelectorEventLoop):
    """A loop whose time advances only when it has nothing to do."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]  # asyncio's own
            next_s = self._scheduled[0].when()  # type: ignore[attr-defined]  # as above
            self.now_s = max(self.now_s, next_s)
        super()._run_once()  # type: ignore[misc]  # as above


class World:
    """Deadlines of names, with the time at which each expired."""

    def __init__(self) -> None:
        self.expired: list[tuple[str, float]] = []
        self.deadlines: Deadlines[str] = Deadlines(self.expire)

    def expire(self, names: Collection[str]) -> None:
        now_s = asyncio.get_running_loop().time()
        self.expired += [(name, now_s) for name in names]

    def names(self) -> list[str]:
        return [name for name, _ in self.expired]


def run(scenario: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario(World())

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(main())


def test_each_item_expires_after_its_time_and_at_most_one_tick_late() -> None:
    async def scenario(world: World) -> None:
        timeouts_s = {"a": 0.0, "b": 0.01, "c": 0.05, "d": 0.07, "e": 3.0}
        for name, timeout_s in timeouts_s.items():
            world.deadlines.add(name, timeout_s)
        await asyncio.sleep(4)
        assert world.names() == list(timeouts_s)
        for name, at_s in world.expired:
            assert timeouts_s[name] <= at_s <= timeouts_s[name] + TICK_S + 1e-9

    run(scenario)


def test_items_of_one_tick_share_a_timer_and_expire_in_order() -> None:
    async def scenario(world: World) -> None:
        for n in range(100):
            world.deadlines.add(f"{n:02}", 1.0)
        assert len(world.deadlines) == 1
        await asyncio.sleep(2)
        assert world.names() == [f"{n:02}" for n in range(100)]
        assert len(world.deadlines) == 0

    run(scenario)


def test_a_discarded_item_does_not_expire_and_leaves_no_timer() -> None:
    async def scenario(world: World) -> None:
        far = world.deadlines.add("far", 36_000.0)
        near = world.deadlines.add("near", 1.0)
        world.deadlines.add("kept", 1.0)
        world.deadlines.discard("far", far)
        world.deadlines.discard("near", near)
        assert len(world.deadlines) == 1
        await asyncio.sleep(2)
        assert world.names() == ["kept"]
        world.deadlines.discard("kept", near)

    run(scenario)


def test_an_expired_item_may_discard_another_of_its_tick() -> None:
    async def scenario(world: World) -> None:
        ticks: dict[str, int] = {}

        def expire(names: Collection[str]) -> None:
            for name in names:
                for other, tick in ticks.items():
                    deadlines.discard(other, tick)
                world.expired.append((name, 0.0))

        deadlines: Deadlines[str] = Deadlines(expire)
        for name in ("a", "b"):
            ticks[name] = deadlines.add(name, 1.0)
        await asyncio.sleep(2)
        assert world.names() == ["a", "b"]

    run(scenario)
