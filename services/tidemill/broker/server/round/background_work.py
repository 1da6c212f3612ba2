"""The engine's background work: when a slice of it is due, and the syncs it asks for.

A slice is done between two rounds, by the round loop. Files that it names are synced by a helper
of their own, beside the rounds, and the next slice waits for them.
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

# Retention is a matter of time alone: nothing need happen for it to have work.
LOOK_PERIOD_MS = 10_000


@final
class BackgroundWork:
    """Slices, one at a time."""

    def __init__(self, engine: Engine, syncs: Syncs) -> None:
        self._engine = engine
        self._background = engine.background
        self._syncs = syncs
        self._files: list[HasFileno] = []  # being synced
        self._has_files = asyncio.Event()
        self._idle_at_ms = 0  # when nothing was to be done, monotonic,
        self._idle_offset = -1  # and what was committed then

    @property
    def wants_quiet(self) -> bool:
        """Whether the next slice waits for a moment at which all that was written is committed."""
        return self._background.wants_quiet

    def is_due(self, turn: Turn) -> bool:
        """Whether a slice is to be done, or something to be looked for."""
        if self._files:
            return False
        return (
            self._idle_offset != self._engine.committed_offset
            or turn.monotonic_ms >= self._idle_at_ms + LOOK_PERIOD_MS
            or self._background.is_wanted(turn.now_ms)
        )

    def next_ms(self) -> int | None:
        """Return when something is due by wall time; None: not before something happens."""
        return None if self._files else self._background.next_ms()

    def step(self, turn: Turn) -> bool:
        """Do one slice; True when there is more to do at once."""
        files = self._background.step(
            turn.now_ms, firing_ms=turn.firing_ms, monotonic_ms=turn.monotonic_ms
        )
        if files is None:
            self._idle_at_ms = turn.monotonic_ms
            self._idle_offset = self._engine.committed_offset
            return False
        if files:
            self._files = list(files)
            self._has_files.set()
            return False
        return True

    @contextlib.asynccontextmanager
    async def syncing(self, wake: Callable[[], None]) -> AsyncIterator[None]:
        """Sync what slices ask for until the block ends; `wake` is called after each sync."""
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(self._sync(wake), name="background sync")
            yield
            task.cancel()

    async def _sync(self, wake: Callable[[], None]) -> None:
        while True:
            await self._has_files.wait()
            self._has_files.clear()
            await self._syncs.sync(self._files)
            self._files = []
            wake()
