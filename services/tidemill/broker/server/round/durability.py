"""The one release point: what rounds have for others waits here until it is committed.

    round loop   ── add(effects) ──▶  rounds in flight, in the order of the log
    sync loop       one sync at a time, each for all that was written when it began,
                 ── synced(log_offset) ──▶  what is durable here: with no replicas it is committed
    replicas     ── release() ──▶  `committed_offset` has moved: they have it too
                    what the committed rounds have for others leaves at once, first round first
    release loop    the rest of it, where that takes more than a turn

Rounds do not wait for the sync: while one is synced the next is gathered and written. A round that
has written nothing waits for the rounds before it, since what it says rests on them.

Invariant: commands reach the engine from the round loop alone. The loops here move
`committed_offset`, on which no command decides, and read messages that are durable.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, final

from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.server.round.sync_pace import SyncPace
from tidemill.common.histogram import Histogram
from tidemill.common.slices import run_in_turns, run_turn

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.sync_process import HasFileno

# Written or leaving. Rounds take 50 us and more, so that many are written during a slow sync of a
# millisecond or two; beyond it more rounds gain nothing, and their work is done in fewer.
ROUNDS_IN_FLIGHT_MAX = 32
# Of the log. As much as may wait for a round: a disk that stalls holds up twice that in memory.
IN_FLIGHT_BYTES_MAX = 64 << 20
# Upper bounds in microseconds, of a write and of a sync: a good disk syncs in 150, a spinning one
# in ten thousand, one that stalls in seconds.
DISK_BUCKETS_US = (
    50,
    100,
    250,
    500,
    1_000,
    2_500,
    5_000,
    10_000,
    25_000,
    50_000,
    100_000,
    250_000,
    1_000_000,
    5_000_000,
)
US_PER_S = 1_000_000


class Syncs(Protocol):
    """What makes files durable."""

    async def sync(self, files: Iterable[HasFileno]) -> None:
        """Return when all that was written to `files` is durable."""
        ...


class RoundEffect(Protocol):
    """What a round does outside the engine, once it is committed."""

    def release(self) -> Iterator[None]:
        """Do it; yield between slices."""
        ...


@final
class Durability:
    """The rounds in flight, and how far the log is committed."""

    def __init__(
        self,
        engine: Engine,
        syncs: Syncs,
        *,
        rounds_max: int = ROUNDS_IN_FLIGHT_MAX,
        bytes_max: int = IN_FLIGHT_BYTES_MAX,
    ) -> None:
        self._engine = engine
        self._syncs = syncs
        self._rounds_max = rounds_max
        self._bytes_max = bytes_max
        # Bounded by both: the round loop asks `has_room` before it gathers.
        self._in_flight: deque[tuple[LogOffset, Sequence[RoundEffect]]] = deque()
        self._written_offset = engine.log_end
        self._has_written = asyncio.Event()
        self._leaving: Iterator[None] | None = None  # what takes more than a turn
        self._has_rest = asyncio.Event()
        self._wake: Callable[[], None] = lambda: None
        # Told that more was written, or is durable: replicas are to have it.
        self.on_moved: Callable[[], None] = lambda: None
        # Returns what is to be synced with the log; called when the sync before has ended.
        self.beside: Callable[[], Iterable[HasFileno]] = tuple
        # Whether no round may be begun, though there is room: replicas say so.
        self.is_held: Callable[[], bool] = lambda: False
        self.sync_times_us: Histogram[tuple[()]] = Histogram(DISK_BUCKETS_US)
        self._pace = SyncPace()

    @property
    def has_room(self) -> bool:
        """Whether another round may be begun."""
        behind_bytes = self._written_offset - self._engine.committed_offset
        has_room = len(self._in_flight) < self._rounds_max and behind_bytes < self._bytes_max
        return has_room and not self.is_held()

    @property
    def is_slow(self) -> bool:
        """Whether syncs of the log have taken too long for a while."""
        return self._pace.is_slow(_now_ms())

    @property
    def is_caught_up(self) -> bool:
        """Whether all that was written is committed."""
        return self._written_offset <= self._engine.committed_offset

    @property
    def is_empty(self) -> bool:
        """Whether all that rounds had for others has left."""
        return not self._in_flight

    def add(self, effects: Sequence[RoundEffect]) -> None:
        """Keep what a round has for others; called when it is written, before anything else."""
        log_offset = self._engine.log_end
        if log_offset > self._written_offset:
            self._written_offset = log_offset
            self._has_written.set()
        elif not effects:
            return
        self._in_flight.append((log_offset, effects))
        self.on_moved()
        if log_offset <= self._engine.committed_offset:
            self._release()

    def note_written(self) -> None:
        """Sync what a replica has written of its master's log, as soon as that can be."""
        written = self._engine.log.written_offset
        if written > self._written_offset:
            self._has_written.set()
        self._written_offset = written

    def sync_again(self) -> None:
        """Sync what stands beside the log, also where nothing is written."""
        self._has_written.set()

    def synced(self, log_offset: LogOffset) -> None:
        """Hear that the log is durable before `log_offset`: all it takes without replicas."""
        self._engine.synced(log_offset)
        self.on_moved()
        self.release()

    def release(self) -> None:
        """Let go what rests on the log before `committed_offset`."""
        self._release()
        self._wake()

    @contextlib.asynccontextmanager
    async def running(self, wake: Callable[[], None]) -> AsyncIterator[None]:
        """Sync and release until the block ends; `wake` is called whenever either has moved.

        A failed sync ends the block: nothing may be promised any more.
        """
        self._wake = wake
        async with asyncio.TaskGroup() as tasks:
            loops = [
                tasks.create_task(self._sync(), name="sync"),
                tasks.create_task(self._release_rest(), name="release"),
            ]
            yield
            for loop in loops:
                loop.cancel()

    async def _sync(self) -> None:
        while True:
            await self._has_written.wait()
            self._has_written.clear()
            log_offset, of_log = self._engine.begin_sync()
            files = [*of_log, *self.beside()]
            if files:
                began_s = time.monotonic()
                self._pace.began(_now_ms())
                await self._syncs.sync(files)
                self._pace.ended(_now_ms())
                self.sync_times_us.observe((), (time.monotonic() - began_s) * US_PER_S)
            self.synced(log_offset)

    def _release(self) -> None:
        """Let go what is committed."""
        if self._leaving is not None:
            return  # The release loop is at it, and comes to this too.
        # Nearly always it is little, and a task would cost as much as the round.
        leaving = self._leave()
        if not run_turn(leaving):
            self._leaving = leaving
            self._has_rest.set()

    async def _release_rest(self) -> None:
        while True:
            await self._has_rest.wait()
            self._has_rest.clear()
            if self._leaving is not None:
                await run_in_turns(self._leaving)
                self._leaving = None

    def _leave(self) -> Iterator[None]:
        in_flight, engine = self._in_flight, self._engine
        while in_flight and in_flight[0][0] <= engine.committed_offset:
            for effect in in_flight[0][1]:
                yield from effect.release()
                yield
            in_flight.popleft()
            self._wake()


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
