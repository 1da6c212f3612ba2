"""What the debug log says of frames and rounds; nothing here runs at another level.

A line a frame says what was asked, and a line a round what came of it. The engine has no log: what
it revived, dead-lettered or delivered in a round is the difference of its counts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

import structlog

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.layout.numbers import TopicId
    from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

log = structlog.get_logger()

# What happens to messages without being asked for, by what the engine counts.
TOLD = {
    "revived": "messages revived",
    "dead_lettered": "messages dead-lettered",
    "extended": "deliveries extended",
    "given_back_ended": "messages of an ended client given back",
    "given_back_silent": "messages of a silent client given back",
}


def log_frame(frame: pb.RequestFrame, requested: Mapping[str, Any]) -> None:
    """Write how many requests of each command a frame has."""
    counts = {
        name: len(getattr(requests, "request_ids", requests))
        for name, requests in requested.items()
        if name != "sequence"
    }
    log.debug("frame", sequence=frame.sequence, bytes=frame.ByteSize(), **counts)


@final
class RoundLog:
    """Writes a line for each round that did something."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._log_end: int = engine.log_end
        self._counts: Counter[tuple[str, int, int]] = Counter()
        self._delivered: Counter[TopicId] = Counter()
        self._look()

    def tell(self, number: int, *, work_count: int, began_s: float) -> None:
        """Write what the round has done, and its batches of retries, dead letters and timers."""
        written, log_end = self._engine.log_end - self._log_end, self._engine.log_end
        if not work_count and not written:
            return
        before, delivered = self._counts, self._delivered
        self._look()
        took_ms = round((time.monotonic() - began_s) * 1000, 3)
        log.debug(
            "round",
            round=number,
            work=work_count,
            log_bytes=written,
            log_end=log_end,
            due_and_write_ms=took_ms,
        )
        self._log_end = log_end
        catalog = self._engine.catalog
        for (what, group_id, topic_id), count in (self._counts - before).items():
            group, topic = catalog.groups.get(group_id), catalog.topics.get(topic_id)  # type: ignore[call-overload]  # Ids are numbers here.
            log.debug(
                TOLD[what],
                round=number,
                group=group.name if group else "",
                topic=topic.name if topic else "",
                count=count,
            )
        for topic_id, count in (self._delivered - delivered).items():
            topic = catalog.topics.get(topic_id)
            log.debug(
                "timers delivered", round=number, topic=topic.name if topic else "", count=count
            )

    def _look(self) -> None:
        counts = self._engine.state.counts
        self._counts = Counter({key: n for key, n in counts.items() if key[0] in TOLD})
        self._delivered = Counter({**self._engine.timers.deliverer.delivered})
