"""What a streaming query tells while it runs: metrics, a JSON line a batch, and a group's progress.

Offsets are published from here and not from the source's `commit`, which Spark calls one batch late
and not at all for the last one of an AvailableNow run.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, final

from pyspark.sql.streaming.listener import StreamingQueryListener

from tidemill.common.clock import SystemClock
from tidemill.pipeline.client import Client
from tidemill.pipeline.errors import PipelineError
from tidemill.pipeline.metrics import PipelineMetrics
from tidemill.pipeline.offsets import VERSION, Offsets

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log: Final = logging.getLogger("tidemill.pipeline")
EVERY: Final = "*"  # topic of what cannot be told apart


@final
class QueryWatch(StreamingQueryListener):
    """Watches the queries of a session whose source is ours."""

    def __init__(
        self, metrics: PipelineMetrics, *, client: Client | None = None, group: str = ""
    ) -> None:
        self._metrics = metrics
        self._client, self._group = client, group
        self._read: dict[str, Offsets] = {}

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802  # Spark's name.
        """Begin anew for a query."""
        self._read.pop(str(event.id), None)

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802  # Spark's name.
        """Count a batch."""
        progress = event.progress
        rows = Counter[str]()
        for source in progress.sources:
            end, latest = offsets_of(source.endOffset), offsets_of(source.latestOffset)
            begin = offsets_of(source.startOffset)
            if end is None:
                continue
            if begin is None:
                # The first batch of a query: Spark does not say where it began.
                topics = {queue.topic for queue in end.at}
                rows[topics.pop() if len(topics) == 1 else EVERY] += source.numInputRows
            else:
                for queue, at in end.at.items():
                    rows[queue.topic] += at - begin.at.get(queue, at)
            self._tell_waiting(end, latest)
            self._publish(end)
        self._metrics.rows.update(rows)
        self._metrics.batches_ms.observe(self._metrics.work, int(progress.batchDuration))
        self._metrics.succeeded_at_ms = SystemClock().wall_ms()
        told = {
            "event": "batch", "query": str(progress.name or progress.id),
            "batch": progress.batchId, "rows": progress.numInputRows,
            "took_ms": progress.batchDuration,
        }  # fmt: skip
        log.info("%s", json.dumps(told))

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802  # Spark's name.
        """Nothing to tell."""

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802  # Spark's name.
        """Nothing to tell: who waits for the query gets its error."""

    def _tell_waiting(self, end: Offsets, latest: Offsets | None) -> None:
        if latest is None:
            return
        waiting = Counter[str]()
        for queue, at in latest.at.items():
            waiting[queue.topic] += max(0, at - end.at.get(queue, at))
        self._metrics.waiting.update(waiting)

    def _publish(self, end: Offsets) -> None:
        if self._client is None or not self._group:
            return
        for queue, at in end.at.items():
            try:
                self._client.update_offset(self._group, queue, at)
            except PipelineError as error:
                # It is for dashboards: the query does not fail for it, and the next batch tells it.
                log.warning("progress is not published: %s", error)
                return


def offsets_of(text: str | None) -> Offsets | None:
    """Return the offsets of a source's document; None of another source's."""
    if not text:
        return None
    try:
        document = json.loads(text)
    except ValueError:
        return None
    is_ours = isinstance(document, dict) and document.get("v") == VERSION and "o" in document
    return Offsets.from_document(document) if is_ours else None


def watch(
    spark: SparkSession, metrics: PipelineMetrics, *, client: Client | None = None, group: str = ""
) -> QueryWatch:
    """Watch a session's queries; with a group their progress is published as its pull offsets."""
    watching = QueryWatch(metrics, client=client, group=group)
    spark.streams.addListener(watching)
    return watching
