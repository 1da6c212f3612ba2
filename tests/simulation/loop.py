"""An event loop without I/O: it has virtual time and runs ready callbacks in random order."""

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
STEPS_MAX = 3_000_000  # callbacks of one run; a run with more has an endless loop


class Deadlock(AssertionError):
    """No callback is ready and no timer is set, or callbacks run without end."""


class SimulationLoop(asyncio.base_events.BaseEventLoop):
    """A loop that runs one callback at a time."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random
        self.now_s = BEGIN_S
        self.steps = 0
        self.trace = 0  # a hash of the order of all callbacks; equal for equal runs

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        scheduled, ready = self._scheduled, self._ready  # type: ignore[attr-defined]  # of the base
        while scheduled and scheduled[0].cancelled():
            self._drop(heapq.heappop(scheduled))
        if not ready and not scheduled:
            raise Deadlock("no callback is ready and no timer is set")
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
            raise Deadlock(f"{STEPS_MAX} callbacks by {self.now_s:.3f} s: an endless loop")
        self.trace = hash((self.trace, at, len(ready), round(self.now_s * 1e6)))
        if not handle.cancelled():
            handle._run()

    @staticmethod
    def _drop(handle: asyncio.TimerHandle) -> None:
        handle._scheduled = False  # type: ignore[attr-defined]  # as the base does

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: the loop drops a cancelled timer when it is due."""

    def _write_to_self(self) -> None:
        """Do nothing: no other thread wakes this loop."""

    def _process_events(self, _events: object) -> None:
        """Do nothing: a loop without I/O has no events."""


def simulate(main: Coroutine[Any, Any, T], random: Random) -> tuple[T, SimulationLoop]:
    """Run `main` to its end on a new loop, whose time replaces `time.monotonic`."""
    loop = SimulationLoop(random)
    with _virtual_time(loop, random), contextlib.closing(loop):
        asyncio.set_event_loop(loop)
        try:
            result = loop.run_until_complete(main)
            assert not asyncio.all_tasks(loop), "a task has outlived the run that began it"
            return result, loop
        finally:
            asyncio.set_event_loop(None)


@contextlib.contextmanager
def _virtual_time(loop: SimulationLoop, random: Random) -> Iterator[None]:
    """Replace the monotonic clock by the time of the loop.

    Each reading in nanoseconds adds up to 5 ms of chance, so work in slices yields at moments that
    the seed chooses.
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
