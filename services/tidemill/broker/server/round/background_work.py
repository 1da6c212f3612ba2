"""The engine's background work: when a slice is due, and the syncs that slices ask for.

The round loop does a slice between two rounds. A separate sync process syncs the files that a slice
names, in parallel to the rounds. The next slice waits for these syncs, and longer if its job has a
limited rate.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.server.round.durability import Syncs
    from tidemill.broker.server.round.turn import Turn
    from tidemill.broker.sync_process import HasFileno

# Period of a slice without other work: retention has work when enough time has passed.
IDLE_PERIOD_MS = 10_000
# Slices with a limited rate make up for a delay of at most this. They are then closer together, but
# sends still have the time between them.
MADE_UP_S_MAX = 0.5
SHORTEST_PAUSE_PART = 4  # of the time that the rate demands
# A slice waits for a sync of the log for at most this. A slow disk must not stop the slices.
BREAK_MS_MAX = 2


@final
class RatePauses:
    """The pauses after slices that must not exceed a rate. All times are in seconds."""

    def __init__(self) -> None:
        self._until_s = 0.0  # the rate allows the last slices then

    def next_s(self, now_s: float, pace_s: float) -> float:
        """Return the pause from now on, after slices that must take `pace_s`."""
        self._until_s = max(self._until_s, now_s - MADE_UP_S_MAX) + pace_s
        return max(self._until_s - now_s, pace_s / SHORTEST_PAUSE_PART)


@final
class BackgroundWork:
    """The slices of background work, one at a time."""

    def __init__(self, engine: Engine, syncs: Syncs) -> None:
        self._engine = engine
        self._background = engine.background
        self._syncs = syncs
        self._files: list[HasFileno] = []  # being synced
        self._has_files = asyncio.Event()
        self._has_stepped = asyncio.Event()
        self._now_ms = self._stepped_at_ms = 0  # wall and monotonic time of the last slice
        self._pauses = RatePauses()
        # The last time that a slice found no work: monotonic, and the committed offset then.
        self._idle_at_ms = 0
        self._idle_offset = -1

    @property
    def needs_quiet(self) -> bool:
        """Whether the next slice waits until all written records are committed."""
        return self._background.needs_quiet

    def is_due(self, turn: Turn) -> bool:
        """Whether a slice may have work."""
        if self._files:
            return False
        return (
            self._idle_offset != self._engine.log.committed_offset
            or turn.monotonic_ms >= self._idle_at_ms + IDLE_PERIOD_MS
            or self._background.is_due(turn.now_ms)
        )

    def may_wait(self, turn: Turn) -> bool:
        """Whether a slice may wait for the end of a sync of the log."""
        has_waited = turn.monotonic_ms - self._stepped_at_ms >= BREAK_MS_MAX
        return not has_waited and not self._engine.checkpoints.is_requested

    def next_ms(self) -> int | None:
        """Return when a slice is due, by wall time; None if only an event makes one due."""
        return None if self._files else self._background.next_ms()

    def step(self, turn: Turn) -> bool:
        """Do one slice; return True if more can be done at once."""
        self._has_stepped.set()
        self._now_ms, self._stepped_at_ms = turn.now_ms, turn.monotonic_ms
        files = self._background.step(
            turn.now_ms, firing_ms=turn.firing_ms, monotonic_ms=turn.monotonic_ms
        )
        if files is None:
            self._idle_at_ms = turn.monotonic_ms
            self._idle_offset = self._engine.log.committed_offset
            return False
        if files:
            self._files = list(files)
            self._has_files.set()
            return False
        return True

    async def write_checkpoint(self, wake: Callable[[], None]) -> None:
        """Request a checkpoint, and wait until slices have written it or found no room for it."""
        self._engine.checkpoints.request()
        wake()
        while self._engine.checkpoints.is_requested:
            self._has_stepped.clear()
            await self._has_stepped.wait()

    @contextlib.asynccontextmanager
    async def syncing(self, wake: Callable[[], None]) -> AsyncIterator[None]:
        """Sync the files of slices until the block ends; call `wake` after each sync."""
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(self._sync(wake), name="background sync")
            yield
            task.cancel()

    async def _sync(self, wake: Callable[[], None]) -> None:
        while True:
            await self._has_files.wait()
            self._has_files.clear()
            await self._syncs.sync(self._files)
            await self._keep_pace()
            self._files = []
            wake()

    async def _keep_pace(self) -> None:
        """Wait until the limited rate allows another slice."""
        pace_s = self._background.take_pace_s(self._now_ms)
        if pace_s:
            now_s = asyncio.get_running_loop().time()
            await asyncio.sleep(self._pauses.next_s(now_s, pace_s))
