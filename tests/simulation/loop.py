"""An event loop without I/O: virtual time, and a random order of what is ready."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import random as global_random
from collections.abc import Coroutine, Iterator
from random import Random
from typing import Any, TypeVar
from unittest import mock

T = TypeVar("T")

BEGIN_S = 1_000.0  # monotonic time when a run begins
STEPS_MAX = 3_000_000  # callbacks of one run: beyond it something spins


class Deadlocked(AssertionError):
    """Nothing is ready, and no timer is set."""


class SimulationLoop(asyncio.base_events.BaseEventLoop):
    """Runs one callback at a time."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random
        self.now_s = BEGIN_S
        self.steps = 0
        self.trace = 0  # a hash over the order of all callbacks: equal for equal runs

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        scheduled, ready = self._scheduled, self._ready  # type: ignore[attr-defined]  # of the base
        while scheduled and scheduled[0].cancelled():
            self._drop(heapq.heappop(scheduled))
        if not ready and not scheduled:
            raise Deadlocked("nothing is ready, and nothing will be")
        if not ready:
            self.now_s = max(self.now_s, scheduled[0].when())
        while scheduled and scheduled[0].when() <= self.now_s:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            if not handle.cancelled():
                ready.append(handle)
        if not ready:
            return
        at = self._random.randrange(len(ready))
        handle = ready[at]
        del ready[at]
        self.steps += 1
        if self.steps > STEPS_MAX:
            raise Deadlocked(f"{STEPS_MAX} callbacks by {self.now_s:.3f} s: something spins")
        self.trace = hash((self.trace, at, len(ready), round(self.now_s * 1e6)))
        if not handle.cancelled():
            handle._run()

    @staticmethod
    def _drop(handle: asyncio.TimerHandle) -> None:
        handle._scheduled = False  # type: ignore[attr-defined]  # as the base does

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Let it be: it is dropped when its time comes."""

    def _write_to_self(self) -> None:
        """Do nothing: no other thread wakes this loop."""

    def _process_events(self, _events: object) -> None:
        """Do nothing: there are none."""


def simulate(main: Coroutine[Any, Any, T], random: Random) -> tuple[T, SimulationLoop]:
    """Run `main` to its end on a loop of its own, on which `time.monotonic` is the loop's."""
    loop = SimulationLoop(random)
    with _virtual_time(loop, random), contextlib.closing(loop):
        asyncio.set_event_loop(loop)
        try:
            result = loop.run_until_complete(main)
            assert not asyncio.all_tasks(loop), "what a run has begun ends with it"
            return result, loop
        finally:
            asyncio.set_event_loop(None)


@contextlib.contextmanager
def _virtual_time(loop: SimulationLoop, random: Random) -> Iterator[None]:
    """Let whoever asks for the time be told the loop's; each look takes up to half a millisecond.

    So work in slices gives way at moments that the seed chooses.
    """
    state = global_random.getstate()
    global_random.seed(random.random())

    def monotonic_ns() -> int:
        return round(loop.now_s * 1e9) + random.randrange(500_000) * 10

    patches = (
        mock.patch("time.monotonic", loop.time),
        mock.patch("time.monotonic_ns", monotonic_ns),
    )
    try:
        with patches[0], patches[1]:
            yield
    finally:
        global_random.setstate(state)
