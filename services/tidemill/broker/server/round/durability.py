"""The only release point: the effects of a round wait here until the round is committed.

    round loop   ── add(effects) ──▶  rounds in flight, in the order of the log
    sync loop       one sync at a time, of everything that was written when it began
                 ── synced(log_offset) ──▶  the log is durable here; without replicas: committed
    replicas     ── release() ──▶  `committed_offset` has moved, because the replicas have the log
                    effects of committed rounds are released at once, first round first
    release loop    releases the remaining effects if they take more than a turn

Rounds do not wait for the sync: while one round is synced, the next is gathered and written. A
round that has written nothing waits for the rounds before it, because its results depend on them.

Invariant: commands reach the engine only from the round loop. The loops here move
`committed_offset`, which no command reads to decide, and read durable messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, final

from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.server.round.round_times import RoundTimes, SyncLog
from tidemill.broker.server.round.sync_pace import SyncPace
from tidemill.common.histogram import Histogram
from tidemill.common.slices import run_in_turns, run_turn

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.sync_process import HasFileno

# Rounds that are written and not released. A round takes 50 us or more, so this many are written
# during a slow sync of 1 or 2 ms. More rounds gain nothing: fewer rounds then do the same work.
ROUNDS_IN_FLIGHT_MAX = 32
# Bytes of the log. Equal to the bytes that may wait for a round: a stalled disk keeps twice this
# number in memory.
IN_FLIGHT_BYTES_MAX = 64 << 20
# Upper bounds of writes and syncs, in microseconds. A good disk syncs in 150, a spinning disk in
# 10,000, a stalled one in seconds.
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
    """The means to make files durable."""

    async def sync(self, files: Iterable[HasFileno]) -> None:
        """Return when everything written to `files` is durable."""
        ...


class RoundEffect(Protocol):
    """An action of a round outside the engine, such as a reply."""

    def release(self) -> Iterator[None]:
        """Do the action; yield between slices."""
        ...


@final
class Durability:
    """The rounds in flight, and the progress of the committed log."""

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
        # Bounded by both limits: the round loop checks `has_room` before it gathers.
        self._in_flight: deque[tuple[LogOffset, Sequence[RoundEffect]]] = deque()
        self._written_offset = engine.log.log_end
        self._has_written = asyncio.Event()
        self._leaving: Iterator[None] | None = None  # a release that takes more than a turn
        self._has_rest = asyncio.Event()
        self._wake: Callable[[], None] = lambda: None
        # Called when more of the log is written or durable, to replicate it.
        self.on_moved: Callable[[], None] = lambda: None
        # Returns further files to sync with the log; called after the previous sync.
        self.beside: Callable[[], Iterable[HasFileno]] = tuple
        # Whether the replicas forbid a new round although there is room.
        self.is_held: Callable[[], bool] = lambda: False
        self.sync_times_us: Histogram[tuple[()]] = Histogram(DISK_BUCKETS_US)
        self.sync_log = SyncLog()
        self._pace = SyncPace()
        self.has_replicas = False  # whether replicas must confirm a round
        self.is_syncing = False
        self.sync_count = 0  # that have ended

    @property
    def has_room(self) -> bool:
        """Whether a new round may begin."""
        behind_bytes = self._written_offset - self._engine.log.committed_offset
        has_room = len(self._in_flight) < self._rounds_max and behind_bytes < self._bytes_max
        return has_room and not self.is_held()

    @property
    def is_slow(self) -> bool:
        """Whether the disk is slow; see `SyncPace`."""
        return self._pace.is_slow(_now_ms())

    @property
    def is_caught_up(self) -> bool:
        """Whether everything written is committed."""
        return self._written_offset <= self._engine.log.committed_offset

    @property
    def is_empty(self) -> bool:
        """Whether all effects are released."""
        return not self._in_flight

    def add(self, effects: Sequence[RoundEffect], times: RoundTimes | None = None) -> None:
        """Keep the effects of a round; called at once after the round is written."""
        log_offset = self._engine.log.log_end
        if times is not None:
            now_s = time.monotonic()
            times.note_written(now_s, log_offset, self.sync_log, has_replicas=self.has_replicas)
        if log_offset > self._written_offset:
            self._written_offset = log_offset
            self._has_written.set()
        elif not effects:
            return
        self._in_flight.append((log_offset, effects))
        self.on_moved()
        if log_offset <= self._engine.log.committed_offset:
            self._release()

    def note_written(self) -> None:
        """Sync the part of the master's log that this replica has written, as soon as possible."""
        written = self._engine.log.written_offset
        if written > self._written_offset:
            self._has_written.set()
        self._written_offset = written

    def sync_again(self) -> None:
        """Sync the files of `beside`, even if the log has not grown."""
        self._has_written.set()

    def synced(self, log_offset: LogOffset) -> None:
        """Note that the log is durable before `log_offset`; without replicas it is committed."""
        self._engine.log.note_synced(log_offset)
        self.on_moved()
        self.release()

    def release(self) -> None:
        """Release the effects of all committed rounds, and wake the round loop."""
        self._release()
        self._wake()

    @contextlib.asynccontextmanager
    async def running(self, wake: Callable[[], None]) -> AsyncIterator[None]:
        """Sync and release until the block ends; call `wake` after each step of either.

        A failed sync ends the block: no later promise of durability would be true.
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
            log_offset, of_log = self._engine.log.begin_sync()
            files = [*of_log, *self.beside()]
            if files:
                began_s = time.monotonic()
                self._pace.note_begin(_now_ms())
                self.is_syncing = True
                await self._syncs.sync(files)
                self.is_syncing = False
                self.sync_count += 1
                self._pace.note_end(_now_ms())
                ended_s = time.monotonic()
                self.sync_times_us.observe((), (ended_s - began_s) * US_PER_S)
                self.sync_log.note(log_offset, ended_s)
            self.synced(log_offset)

    def _release(self) -> None:
        """Release the effects of all committed rounds."""
        if self._leaving is not None:
            return  # The release loop is running and releases these, too.
        # A release is nearly always short, and a task would cost as much as the round.
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
        while in_flight and in_flight[0][0] <= engine.log.committed_offset:
            for effect in in_flight[0][1]:
                yield from effect.release()
                yield
            in_flight.popleft()
            self._wake()


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
