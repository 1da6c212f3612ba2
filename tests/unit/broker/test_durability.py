"""The release point alone, over a real engine, with syncs that wait at a gate."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

from tests.support.worlds.engine_world import World
from tests.support.worlds.round_world import GatedSyncs, idle
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.server.round.durability import Durability


class NamedEffect:
    """An effect that adds its name to a list on release."""

    def __init__(self, name: str, released: list[str]) -> None:
        self._name = name
        self._released = released

    def release(self) -> Iterator[None]:
        self._released.append(self._name)
        yield


class Scene:
    """A release point, and rounds that the test writes itself."""

    def __init__(self, **limits: int) -> None:
        self.world = World()
        self.world.topic()
        self.syncs = GatedSyncs()
        self.syncs.gate.clear()
        self.durability = Durability(self.world.engine, self.syncs, **limits)
        self.released: list[str] = []
        self.wakes = 0

    def write(self, name: str, *, has_record: bool = False) -> LogOffset:
        """Write a round with one effect; return the end of the log."""
        world = self.world
        if has_record:
            world.engine.administration.put_topic(name, queues=1, type_=None, now_ms=world.now_ms)
        world.engine.write(world.now_ms)
        self.durability.add([NamedEffect(name, self.released)])
        return world.engine.log.log_end

    def wake(self) -> None:
        self.wakes += 1


def in_scene(act: Callable[[Scene], Awaitable[None]], **limits: int) -> None:
    async def main() -> None:
        scene = Scene(**limits)
        async with scene.durability.running(scene.wake):
            await act(scene)

    asyncio.run(main())


def test_effects_are_released_in_the_order_of_the_log() -> None:
    async def act(scene: Scene) -> None:
        scene.write("a", has_record=True)
        await idle()
        scene.write("b", has_record=True)
        scene.write("reads only")
        scene.write("c", has_record=True)
        await idle()
        assert scene.released == []
        scene.syncs.let_one_pass()
        await idle()
        assert scene.released == ["a"]
        scene.syncs.let_one_pass()
        await idle()
        assert scene.released == ["a", "b", "reads only", "c"]
        assert scene.syncs.count == 2, "one sync for everything written before it"
        assert scene.durability.is_empty

    in_scene(act)


def test_a_round_without_unsynced_records_is_released_at_once() -> None:
    async def act(scene: Scene) -> None:
        scene.write("reads only")
        await idle()
        assert scene.released == ["reads only"]
        assert scene.syncs.count == 0

    in_scene(act)


def test_a_moved_committed_offset_releases_effects() -> None:
    """With replicas the confirm offset moves it; the end of the sync alone does not."""

    async def act(scene: Scene) -> None:
        first_end = scene.write("a", has_record=True)
        scene.write("b", has_record=True)
        scene.durability.synced(first_end)
        await idle()
        assert scene.released == ["a"]
        assert not scene.durability.is_caught_up

    in_scene(act)


def test_rounds_and_bytes_in_flight_are_bounded() -> None:
    async def count(scene: Scene) -> None:
        found = [scene.durability.has_room]
        for has_record in (True, False):
            scene.write("round", has_record=has_record)
            found.append(scene.durability.has_room)
        await idle()
        scene.syncs.let_one_pass()
        await idle()
        assert [*found, scene.durability.has_room] == [True, True, False, True]
        assert scene.wakes, "the round loop, which waits for room, is woken"

    async def measure(scene: Scene) -> None:
        scene.write("a", has_record=True)
        assert not scene.durability.has_room
        await idle()
        scene.syncs.let_one_pass()
        await idle()
        assert scene.durability.has_room

    in_scene(count, rounds_max=2)
    in_scene(measure, bytes_max=64)


def test_a_long_release_yields_to_the_event_loop() -> None:
    """The clock of slices is real, so the release takes its two milliseconds."""

    class LongEffect:
        def release(self) -> Iterator[None]:
            while not may_end:
                yield
            done.set()

    may_end: list[bool] = []
    done = asyncio.Event()

    async def act(scene: Scene) -> None:
        scene.durability.add([LongEffect()])
        asyncio.get_running_loop().call_later(0.005, may_end.append, True)
        await done.wait()

    in_scene(act)
