"""The size of each topic in the log, for the metrics; read in rounds at a scrape."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tidemill.broker.engine.layout.numbers import QueueId, TopicId
from tidemill.broker.metrics.store_metrics import TopicSizes
from tidemill.common.errors import QueryFailed, UnavailableError

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn
    from tidemill.common.clock import Clock

SIZES_AGE_MS_MAX = 10_000  # a scrape reads the sizes again unless they are younger
SIZES_WAIT_S = 1  # after it a scrape shows the previous sizes, and the next scrape continues
QUEUES_A_ROUND = 32  # a few reads each, perhaps of uncached pages: a millisecond


class SizeReader:
    """Brings `TopicSizes` up to date; awaited before each scrape."""

    def __init__(self, rounds: Rounds, sizes: TopicSizes, clock: Clock) -> None:
        self._rounds = rounds
        self._sizes = sizes
        self._clock = clock
        self._read_at_ms = -SIZES_AGE_MS_MAX
        # The current pass: queues not read yet, and the sizes so far.
        self._unseen: list[tuple[TopicId, QueueId]] = []
        self._found: dict[TopicId, int] = {}
        self._oldest: dict[TopicId, int] = {}

    async def __call__(self) -> None:
        """Read the sizes of all queues, unless the last ones are young enough."""
        if not self._unseen:
            now_ms = self._clock.monotonic_ms()
            if now_ms - self._read_at_ms < SIZES_AGE_MS_MAX:
                return
            self._read_at_ms = now_ms
        try:
            async with asyncio.timeout(SIZES_WAIT_S):
                if not self._unseen:
                    self._unseen = await self._rounds.read(_queues)
                    self._found, self._oldest = {}, {}
                while self._unseen:
                    await self._rounds.read(self._look_at_some)
        except (UnavailableError, QueryFailed, TimeoutError):
            return  # Draining, a defect, a stalled disk, or many queues: the previous sizes stay.
        self._sizes.log_bytes, self._sizes.oldest_at_ms = self._found, self._oldest

    def _look_at_some(self, engine: Engine, _turn: Turn) -> None:
        found, queues = self._found, engine.catalog.queues
        for key in self._unseen[-QUEUES_A_ROUND:]:
            queue = queues.get(key)
            if queue is not None:
                found[key[0]] = found.get(key[0], 0) + engine.inspection.log_bytes(queue)
                at_ms = engine.inspection.oldest_stored_at_ms(queue)
                if at_ms is not None:
                    self._oldest[key[0]] = min(at_ms, self._oldest.get(key[0], at_ms))
        del self._unseen[-QUEUES_A_ROUND:]


def _queues(engine: Engine, _turn: Turn) -> list[tuple[TopicId, QueueId]]:
    return list(engine.catalog.queues)
