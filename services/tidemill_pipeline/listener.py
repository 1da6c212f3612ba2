"""Listeners of streaming queries: metrics, one JSON log line per batch, and a group's progress.

The source's `commit` does not publish offsets. Spark calls it one batch late, and never for the
last batch of an AvailableNow run.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, final

from pyspark.sql.streaming.listener import StreamingQueryListener

from tidemill.common.clock import SystemClock
from tidemill_pipeline.client import ClusterClient, connect
from tidemill_pipeline.errors import ClusterRejection, PipelineError
from tidemill_pipeline.metrics import PipelineMetrics
from tidemill_pipeline.offsets import VERSION, Offsets
from tidemill_pipeline.options import parse_connection
from tidemill_pipeline.source.events import LogPosition, is_of_events, places_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log: Final = logging.getLogger("tidemill_pipeline")
EVERY: Final = "*"  # topic label of rows of several topics


class SilentListener(StreamingQueryListener):
    """A listener that ignores all events except progress."""

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802  # Spark's name.
        """Do nothing."""

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802  # Spark's name.
        """Do nothing."""

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802  # Spark's name.
        """Do nothing: `awaitTermination` raises the error of the query."""


@final
class ProgressPublisher(SilentListener):
    """Publisher of the progress of queries with the option `reportProgressAs`.

    The source writes the group and the proxies into the query's offsets, but no credentials. The
    constructor therefore takes the access key.
    """

    def __init__(self, access_key: str = "") -> None:
        self._access_key = access_key

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802  # Spark's name.
        """Publish the end of a batch."""
        for source in event.progress.sources:
            end = offsets_of(source.endOffset)
            if end is None:
                continue
            report = json.loads(source.endOffset).get("report")
            if report is None:
                continue
            given = report["at"]
            if "auth.secretKeyFile" in given:
                given = {**given, "auth.accessKey": self._access_key}
            try:
                client = connect(parse_connection(given))
            except PipelineError as error:
                log.warning("cannot publish progress: %s", error)
                continue
            publish(client, report["as"], end, since=offsets_of(source.startOffset))


def publish(client: ClusterClient, group: str, end: Offsets, *, since: Offsets | None) -> None:
    """Set the pull offsets of a group in queues that moved since `since`. Only log failures.

    Dashboards use these offsets, so a failure must not end the query. The next batch that moves a
    queue publishes it again.
    """
    for queue, at in end.at.items():
        if since is not None and since.at.get(queue) == at:
            continue
        try:
            client.update_offset(group, queue, at)
        except ClusterRejection as error:
            # The topic was deleted, or only an archive has it. Publish the other queues.
            log.warning("cannot publish progress of %s: %s", queue, error)
        except PipelineError as error:
            log.warning("cannot publish progress: %s", error)
            return


@final
class QueryMetrics(SilentListener):
    """Metrics of the session's queries with a Tidemill source."""

    def __init__(self, metrics: PipelineMetrics) -> None:
        self._metrics = metrics

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802  # Spark's name.
        """Count a batch."""
        progress = event.progress
        rows = Counter[str]()
        for source in progress.sources:
            end, latest = offsets_of(source.endOffset), offsets_of(source.latestOffset)
            begin = offsets_of(source.startOffset)
            if end is None:
                logs = logs_of(source.endOffset)
                if logs:
                    rows[EVERY] += source.numInputRows
                    self._record_log_backlog(logs, logs_of(source.latestOffset))
                continue
            if begin is None:
                # Spark does not report the start of the first batch of a query.
                topics = {queue.topic for queue in end.at}
                rows[topics.pop() if len(topics) == 1 else EVERY] += source.numInputRows
            else:
                for queue, at in end.at.items():
                    rows[queue.topic] += at - begin.at.get(queue, at)
            self._record_backlog(end, latest)
        self._metrics.rows.update(rows)
        self._metrics.batches_ms.observe(self._metrics.work, int(progress.batchDuration))
        self._metrics.succeeded_at_ms = SystemClock().wall_ms()
        line = {
            "event": "batch",
            "query": str(progress.name or progress.id),
            "batch": progress.batchId,
            "rows": progress.numInputRows,
            "took_ms": progress.batchDuration,
        }
        log.info("%s", json.dumps(line))

    def _record_backlog(self, end: Offsets, latest: Offsets | None) -> None:
        if latest is None:
            return
        waiting = Counter[str]()
        for queue, at in latest.at.items():
            waiting[queue.topic] += max(0, at - end.at.get(queue, at))
        self._metrics.waiting.update(waiting)

    def _record_log_backlog(
        self, end: Mapping[str, LogPosition], latest: Mapping[str, LogPosition]
    ) -> None:
        # The number of events between two log positions is unknown, so the metric counts bytes. An
        # unreachable log keeps its last value. Of a new log, all bytes are unread.
        for broker, last in latest.items():
            at = end.get(broker)
            is_same = at is not None and at.log_id in {"", last.log_id}
            read_to = at.at if at is not None and is_same else 0
            self._metrics.waiting_bytes[broker] = max(0, last.at - read_to)


def offsets_of(text: str | None) -> Offsets | None:
    """Return the offsets in a source's document; None for a document of another source."""
    document = _document_of(text)
    is_ours = document.get("v") == VERSION and "o" in document
    return Offsets.from_document(document) if is_ours else None


def logs_of(text: str | None) -> dict[str, LogPosition]:
    """Return the log positions in a document of dataset `events`; empty for another document."""
    document = _document_of(text)
    return places_of(document) if is_of_events(document) else {}


def _document_of(text: str | None) -> dict[str, Any]:
    """Return a source's document; an empty one if it is not a JSON object."""
    try:
        document = json.loads(text or "{}")
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def watch(spark: SparkSession, metrics: PipelineMetrics) -> QueryMetrics:
    """Add a listener for the metrics of a session's queries."""
    listener = QueryMetrics(metrics)
    spark.streams.addListener(listener)
    return listener


# Sessions with a publisher. Several builders may share one session.
_publishing: Final[weakref.WeakSet[SparkSession]] = weakref.WeakSet()


def publish_progress(spark: SparkSession, *, access_key: str = "") -> None:
    """Add a publisher of progress to a session, unless it has one."""
    if spark in _publishing:
        return
    spark.streams.addListener(ProgressPublisher(access_key))
    _publishing.add(spark)
