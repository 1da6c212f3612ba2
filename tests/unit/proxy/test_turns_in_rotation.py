"""Turns rotate over keys, however many requests each key has."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tidemill.proxy.fair_turns import FairTurns


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(10):
            await scenario()

    asyncio.run(main())


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class TurnRequests:
    """Requests for turns. Each holds its turn until it is released."""

    def __init__(self, count: int) -> None:
        self.turns = FairTurns(count)
        self.had: list[str] = []
        self._let_go: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def want(self, name: str) -> None:
        self._let_go[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._have(name))

    async def _have(self, name: str) -> None:
        async with self.turns.turn(name[0]):
            self.had.append(name)
            await self._let_go[name].wait()

    async def let_go(self, *names: str) -> None:
        for name in names:
            self._let_go[name].set()
            await settle()


def test_many_turns_of_one_address_alternate_with_others() -> None:
    async def scenario() -> None:
        wanted = TurnRequests(1)
        for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1"):
            wanted.want(name)
            await settle()
        assert wanted.had == ["a1"]
        await wanted.let_go("a1", "a2", "b1", "c1", "a3", "b2", "a4")
        assert wanted.had == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]
        await asyncio.gather(*wanted.tasks.values())

    run(scenario)


def test_concurrent_turns_are_limited_and_a_free_turn_starts_at_once() -> None:
    async def scenario() -> None:
        wanted = TurnRequests(2)
        for name in ("a1", "a2", "a3"):
            wanted.want(name)
        await settle()
        assert wanted.had == ["a1", "a2"]
        await wanted.let_go("a2", "a1", "a3")
        wanted.want("b1")
        await settle()
        assert wanted.had[-1] == "b1"
        await wanted.let_go("b1")

    run(scenario)


def test_a_cancelled_wait_keeps_no_turn() -> None:
    async def scenario() -> None:
        wanted = TurnRequests(1)
        for name in ("a1", "b1", "c1"):
            wanted.want(name)
        await settle()
        wanted.tasks["b1"].cancel()
        await settle()
        # In the turn of the event loop that grants it.
        wanted._let_go["a1"].set()
        await asyncio.sleep(0)
        wanted.tasks["c1"].cancel()
        await settle()
        wanted.want("d1")
        await settle()
        assert wanted.had[-1] == "d1"
        await wanted.let_go("d1")

    run(scenario)
