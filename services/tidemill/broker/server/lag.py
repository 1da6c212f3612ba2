"""Consumer progress for the metrics: read in rounds when somebody scrapes, and not too often."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tidemill.broker.engine.layout.numbers import GroupId
from tidemill.broker.metrics import LAG_AGE_MS_MAX, Lag
from tidemill.common.errors import UnavailableError

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.inspection import QueueProgress
    from tidemill.broker.server.rounds import Rounds, Turn
    from tidemill.common.clock import Clock

LAG_WAIT_S = 1  # for rounds that wait for the disk; then a scrape shows the last numbers


class LagReader:
    """Brings `Lag` up to date; awaited before each scrape."""

    def __init__(self, rounds: Rounds, lag: Lag, clock: Clock) -> None:
        self._rounds = rounds
        self._lag = lag
        self._clock = clock
        self._read_at_ms = -LAG_AGE_MS_MAX

    async def __call__(self) -> None:
        """Read the progress of all groups, unless it was read a moment ago."""
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._read_at_ms < LAG_AGE_MS_MAX:
            return
        self._read_at_ms = now_ms
        progress: dict[GroupId, list[QueueProgress]] = {}
        try:
            # One group a round, so that many groups do not make one long turn.
            async with asyncio.timeout(LAG_WAIT_S):
                for group_id in await self._rounds.call(_group_ids):
                    progress[group_id] = await self._rounds.call(_Progress(group_id))
        except (UnavailableError, TimeoutError):
            return  # Draining, or a disk that stalls: the last numbers stay.
        self._lag.progress = progress
        self._lag.now_ms = self._clock.wall_ms()


class _Progress:
    def __init__(self, group_id: GroupId) -> None:
        self._group_id = group_id

    def __call__(self, engine: Engine, _turn: Turn) -> list[QueueProgress]:
        group = engine.catalog.groups.get(self._group_id)
        return engine.inspection.group_progress(group) if group is not None else []


def _group_ids(engine: Engine, _turn: Turn) -> list[GroupId]:
    return list(engine.catalog.groups)
