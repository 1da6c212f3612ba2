"""The progress of all consumer groups of a PRIORITY topic, by level."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from tidemill.broker.server.round.rpc import read_in_round
from tidemill.broker.server.scrape.lag import PROGRESS_A_ROUND, queues_of_groups
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.layout.numbers import GroupId, TopicId
    from tidemill.broker.engine.pop.progress_index import ProgressKey
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn


async def read_level_readers(rounds: Rounds, topic_id: TopicId) -> list[pb.LevelReader]:
    """Return the consumer groups of a PRIORITY topic with their progress in each level.

    Each round reads at most `PROGRESS_A_ROUND` queues and consumer groups.
    """
    unseen = queues_of_groups(rounds.engine, topic_id)
    readers: dict[GroupId, pb.LevelReader] = {}
    levels: dict[tuple[GroupId, int], pb.LevelProgress] = {}

    def read_some(engine: Engine, _turn: Turn) -> bool:
        some = list(islice(unseen, PROGRESS_A_ROUND))
        for key in filter(None, some):
            _add(engine, key)
        return len(some) == PROGRESS_A_ROUND

    def _add(engine: Engine, key: ProgressKey) -> None:
        group_id, _, level = key
        progress = engine.inspection.find_progress(key)
        if progress is None:
            return
        if group_id not in readers:
            readers[group_id] = pb.LevelReader(group=engine.catalog.groups[group_id].name)
        if not progress.ready_count and not progress.in_flight_count:
            return
        if (group_id, level) not in levels:
            levels[group_id, level] = readers[group_id].levels.add(level=level)
        found = levels[group_id, level]
        found.ready_count += progress.ready_count - progress.blocked_count
        found.blocked_count += progress.blocked_count
        found.in_flight_count += progress.in_flight_count
        times_ms = (
            found.oldest_ready_at_ms,
            0 if progress.is_locked else progress.oldest_ready_at_ms,
        )
        found.oldest_ready_at_ms = min(filter(None, times_ms), default=0)

    while await read_in_round(rounds, read_some):
        pass
    return list(readers.values())
