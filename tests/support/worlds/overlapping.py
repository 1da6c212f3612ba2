"""Rounds that overlap, as those of the shell do, over an engine whose disk may lose power.

A round is written and left; syncs begin and end between rounds as a seed says, one at a time, each
for what was written when it began. What clients are told waits until the log is committed up to
where their round ended.
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

ROUNDS_MAX = 6  # in flight; the seed lets it come to that now and then


class OverlappingWorld(World):
    """A world in which `commit` does not commit."""

    def __init__(self, *arguments: Any, schedule: Random, **options: Any) -> None:
        self._schedule = schedule
        self._told: deque[tuple[int, Callable[[], object]]] = deque()
        self._round_ends: deque[int] = deque()
        self._sync: tuple[int, list[File]] | None = None  # what the one under way makes durable
        self.overlaps = 0  # rounds written while another was being synced
        super().__init__(*arguments, **options)

    def commit(self) -> None:
        """Write the round; syncs may begin and end."""
        log_end = self.engine.log.committed_offset
        self.engine.write(self.now_ms)
        if self.engine.log.log_end > (self._round_ends[-1] if self._round_ends else log_end):
            self._round_ends.append(self.engine.log.log_end)
            self.overlaps += self._sync is not None
        for _ in range(self._schedule.choice((0, 0, 0, 1, 1, 2))):
            self._move()
        while len(self._round_ends) > ROUNDS_MAX:
            self._move()

    def tell(self, what: Callable[..., object], *arguments: Any) -> None:
        """Do what the answer of the last round lets a client do, when that round is committed."""
        self._told.append((self.engine.log.log_end, partial(what, *arguments)))
        self._release()

    def settle(self) -> None:
        """Let all rounds be committed."""
        self.engine.write(self.now_ms)
        while has_pending(self.engine):
            self._move()
        self._release()

    def _move(self) -> None:
        """Let the sync under way end, or begin one."""
        if self._sync is None:
            self._sync = self.engine.log.begin_sync()
            # It reaches the disk before the rounds that are written until it is known to have
            # ended; or behind them, and then it covers more than it promises.
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
    """The same with timers, whose log is judged as far as it is committed."""
