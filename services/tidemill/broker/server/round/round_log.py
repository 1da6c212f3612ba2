"""Debug lines about frames and rounds; nothing here runs at another log level.

A frame and a round have a line each. The engine has no log, so the numbers of revived,
dead-lettered and delivered messages of a round are differences of the engine's counts.
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

# Log events by the name of the engine's count.
EVENTS = {
    "revived": "messages revived",
    "dead_lettered": "messages dead-lettered",
    "extended": "deliveries extended",
    "given_back_ended": "messages of an ended client given back",
    "given_back_revoked": "messages of a client without its right given back",
    "given_back_silent": "messages of a silent client given back",
}


def log_frame(frame: pb.RequestFrame, requested: Mapping[str, Any]) -> None:
    """Log the number of requests of each command in a frame."""
    counts = {
        name: len(getattr(requests, "request_ids", requests))
        for name, requests in requested.items()
        if name != "sequence"
    }
    log.debug("frame", sequence=frame.sequence, bytes=frame.ByteSize(), **counts)


@final
class RoundLog:
    """The writer of a line for each round that had work."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._log_end: int = engine.log.log_end
        self._counts: Counter[tuple[str, int, int]] = Counter()
        self._delivered: Counter[TopicId] = Counter()
        self._read_counts()

    def log_round(self, number: int, *, work_count: int, began_s: float) -> None:
        """Log a round, and its batches of revived, dead-lettered and delayed messages."""
        written, log_end = self._engine.log.log_end - self._log_end, self._engine.log.log_end
        if not work_count and not written:
            return
        before, delivered = self._counts, self._delivered
        self._read_counts()
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
        for (name, group_id, topic_id), count in (self._counts - before).items():
            group, topic = catalog.groups.get(group_id), catalog.topics.get(topic_id)  # type: ignore[call-overload]  # Ids are numbers here.
            log.debug(
                EVENTS[name],
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

    def _read_counts(self) -> None:
        counts = self._engine.state.counts
        self._counts = Counter({key: n for key, n in counts.items() if key[0] in EVENTS})
        self._delivered = Counter({**self._engine.timers.deliverer.delivered})
