"""The input ranges of a run for its record, in the format of stream checkpoints.

A range of a queue begins at the first message that was read and ends after the last one. A range
of a log does the same with positions, as far as events contain them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, final

from tidemill_pipeline.client import connect
from tidemill_pipeline.cluster_state import BrokerLog
from tidemill_pipeline.offsets import Offsets, SourceQueue
from tidemill_pipeline.options import LATEST, TopicSelection, parse_source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

QUEUES_MAX: Final = 1000  # per record, about 64 KiB; of further queues only the count is recorded


@final
class InputRanges:
    """Input ranges that a run has read so far."""

    def __init__(self) -> None:
        self._queues: dict[SourceQueue, tuple[int, int]] = {}
        self._logs: dict[str, tuple[str, int, int]] = {}

    def note(self, queue: SourceQueue, start: int, end: int) -> None:
        """Add the offsets from `start` up to, but not including, `end`."""
        first, last = self._queues.get(queue, (start, end))
        self._queues[queue] = min(first, start), max(last, end)

    def note_log(self, broker: str, log_id: str, start: int, end: int) -> None:
        """Add a part of a broker group's log."""
        self._logs[broker] = log_id, start, end

    def as_document(self) -> dict[str, Any]:
        """Return the ranges as JSON values; empty if the run read nothing."""
        if self._logs:
            return {"start": self._places(1), "end": self._places(2)}
        if not self._queues:
            return {}
        first = sorted(self._queues.items())[:QUEUES_MAX]
        document: dict[str, Any] = {
            name: Offsets(at={queue: span[i] for queue, span in first}).as_document()
            for i, name in enumerate(("start", "end"))
        }
        left_out = len(self._queues) - len(first)
        return {**document, "queues_left_out": left_out} if left_out else document

    def _places(self, which: int) -> dict[str, Any]:
        # Jobs without Spark also write a record.
        from tidemill_pipeline.source.events import VERSION

        places = {
            broker: {"at": of[which], "log": of[0]} for broker, of in sorted(self._logs.items())
        }
        return {"v": VERSION, "e": places}


def logs_before(given: Mapping[str, str]) -> dict[str, BrokerLog]:
    """Return the bounds of the logs, before events are read."""
    options = parse_source({**given, "dataset": "events"}, is_stream=False)
    return dict(connect(options.connection).whole_cluster(TopicSelection()).logs)


def note_events(
    inputs: InputRanges, given: Mapping[str, str], logs: Mapping[str, BrokerLog], events: DataFrame
) -> None:
    """Add the parts of logs that were read: the bounds from before, extended by the events."""
    from pyspark.sql import functions as F  # noqa: N812  # The usual name among users of Spark.

    last = {
        row.broker: row.at
        for row in events.groupBy("broker").agg(F.max("log_position").alias("at")).collect()
    }
    is_new_alone = parse_source({**given, "dataset": "events"}, is_stream=False).start.everywhere
    for broker, log in logs.items():
        start = log.log_end if is_new_alone == LATEST else log.log_min
        inputs.note_log(broker, log.log_id, start, max(log.log_end, last.get(broker) or 0))
