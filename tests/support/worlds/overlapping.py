"""Overlapping rounds, as in the broker, over an engine whose disk may lose power.

The world writes rounds without waiting for a sync. A random schedule begins and ends syncs between
the rounds, one at a time. A sync covers the bytes that were written when it began. Clients get
their answers when the log is committed up to the end of their round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from tests.support.disk.quiet import has_pending
from tests.support.worlds.engine_world import World
from tests.support.worlds.timer_world import TimerWorld
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.store.disk import File

ROUNDS_MAX = 6  # in flight; some schedules reach this limit


class OverlappingWorld(World):
    """A world in which `commit` only writes the round."""

    def __init__(self, *arguments: Any, schedule: Random, **options: Any) -> None:
        self._schedule = schedule
        self._told: deque[tuple[int, Callable[[], object]]] = deque()
        self._round_ends: deque[int] = deque()
        self._sync: tuple[int, list[File]] | None = None  # end and files of the running sync
        self.overlaps = 0  # rounds written during a sync
        super().__init__(*arguments, **options)

    def commit(self) -> None:
        """Write the round. Syncs may begin and end."""
        log_end = self.engine.log.committed_offset
        self.engine.write(self.now_ms)
        if self.engine.log.log_end > (self._round_ends[-1] if self._round_ends else log_end):
            self._round_ends.append(self.engine.log.log_end)
            self.overlaps += self._sync is not None
        for _ in range(self._schedule.choice((0, 0, 0, 1, 1, 2))):
            self._move()
        while len(self._round_ends) > ROUNDS_MAX:
            self._move()

    def react(self, what: Callable[..., object], *arguments: Any) -> None:
        """Call `what`, a client's reaction to its answer, when the last round is committed."""
        self._told.append((self.engine.log.log_end, partial(what, *arguments)))
        self._release()

    def settle(self) -> None:
        """Commit all rounds."""
        self.engine.write(self.now_ms)
        while has_pending(self.engine):
            self._move()
        self._release()

    def _move(self) -> None:
        """End the running sync, or begin one."""
        if self._sync is None:
            self._sync = self.engine.log.begin_sync()
            # The sync reaches the disk before the next rounds, or after them. In the second case
            # it covers more bytes than it promises.
            if self._schedule.random() < 0.6:
                self._sync_files()
            return
        self._sync_files()
        (log_offset, _), self._sync = self._sync, None
        self.engine.log.note_synced(LogOffset(log_offset))
        self._release()

    def _sync_files(self) -> None:
        assert self._sync is not None
        log_offset, files = self._sync
        self._sync = log_offset, []
        for file in files:
            file.sync()

    def _release(self) -> None:
        committed = self.engine.log.committed_offset
        while self._round_ends and self._round_ends[0] <= committed:
            self._round_ends.popleft()
        while self._told and self._told[0][0] <= committed:
            self._told.popleft()[1]()


class OverlappingTimerWorld(OverlappingWorld, TimerWorld):
    """An overlapping world with timers. It checks the timer log up to the committed offset."""
