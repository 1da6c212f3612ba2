"""The release point by itself: what leaves when, over a real engine and syncs behind a gate."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

from tests.support.worlds.engine_world import World
from tests.support.worlds.round_world import GatedSyncs, idle
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.server.round.durability import Durability


class Noted:
    """An effect that says when it leaves."""

    def __init__(self, name: str, left: list[str]) -> None:
        self._name = name
        self._left = left

    def release(self) -> Iterator[None]:
        self._left.append(self._name)
        yield


class Scene:
    """Rounds that are written by hand."""

    def __init__(self, **limits: int) -> None:
        self.world = World()
        self.world.topic()
        self.syncs = GatedSyncs()
        self.syncs.gate.clear()
        self.durability = Durability(self.world.engine, self.syncs, **limits)
        self.left: list[str] = []
        self.wakes = 0

    def write(self, name: str, *, has_record: bool = False) -> LogOffset:
        """Do a round that has something for somebody; return where it ends in the log."""
        world = self.world
        if has_record:
            world.engine.administration.put_topic(name, queues=1, type_=None, now_ms=world.now_ms)
        world.engine.write(world.now_ms)
        self.durability.add([Noted(name, self.left)])
        return world.engine.log_end

    def wake(self) -> None:
        self.wakes += 1


def in_scene(act: Callable[[Scene], Awaitable[None]], **limits: int) -> None:
    async def main() -> None:
        scene = Scene(**limits)
        async with scene.durability.running(scene.wake):
            await act(scene)

    asyncio.run(main())


def test_effects_leave_in_the_order_of_the_log() -> None:
    async def act(scene: Scene) -> None:
        scene.write("a", has_record=True)
        await idle()
        scene.write("b", has_record=True)
        scene.write("asks only")
        scene.write("c", has_record=True)
        await idle()
        assert scene.left == []
        scene.syncs.let_one_pass()
        await idle()
        assert scene.left == ["a"]
        scene.syncs.let_one_pass()
        await idle()
        assert scene.left == ["a", "b", "asks only", "c"]
        assert scene.syncs.count == 2, "one sync for all that was written by then"
        assert scene.durability.is_empty

    in_scene(act)


def test_what_rests_on_nothing_new_leaves_at_once() -> None:
    async def act(scene: Scene) -> None:
        scene.write("asks only")
        await idle()
        assert scene.left == ["asks only"]
        assert scene.syncs.count == 0

    in_scene(act)


def test_whoever_moves_the_committed_offset_releases() -> None:
    """With replicas it is their confirm offset, and the end of the sync is not enough."""

    async def act(scene: Scene) -> None:
        first_end = scene.write("a", has_record=True)
        scene.write("b", has_record=True)
        scene.durability.synced(first_end)
        await idle()
        assert scene.left == ["a"]
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
        assert scene.wakes, "who waits for room is told"

    async def measure(scene: Scene) -> None:
        scene.write("a", has_record=True)
        assert not scene.durability.has_room
        await idle()
        scene.syncs.let_one_pass()
        await idle()
        assert scene.durability.has_room

    in_scene(count, rounds_max=2)
    in_scene(measure, bytes_max=64)


def test_a_round_with_much_to_send_gives_way() -> None:
    """The clock of slices is real, so this one takes its two milliseconds."""

    class Long:
        def release(self) -> Iterator[None]:
            while not gone:
                yield
            done.set()

    gone: list[bool] = []
    done = asyncio.Event()

    async def act(scene: Scene) -> None:
        scene.durability.add([Long()])
        asyncio.get_running_loop().call_later(0.005, gone.append, True)
        await done.wait()

    in_scene(act)
