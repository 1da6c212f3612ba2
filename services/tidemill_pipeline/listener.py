"""What a streaming query tells while it runs: metrics, a JSON line a batch, and a group's progress.

Offsets are published from here and not from the source's `commit`, which Spark calls one batch late
and not at all for the last one of an AvailableNow run.
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
EVERY: Final = "*"  # topic of what cannot be told apart


class SilentListener(StreamingQueryListener):
    """What listeners of ours hear nothing of."""

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802  # Spark's name.
        """Nothing to tell."""

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802  # Spark's name.
        """Nothing to tell."""

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802  # Spark's name.
        """Nothing to tell: who waits for the query gets its error."""


@final
class ProgressPublisher(SilentListener):
    """Publishes the progress of queries that ask for it: option `reportProgressAs` of the source.

    Group and proxies are in the query's offsets, where the source has put them; of a credential
    nothing is, so whose calls they are is told to who makes this.
    """

    def __init__(self, access_key: str = "") -> None:
        self._access_key = access_key

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802  # Spark's name.
        """Publish where a batch ends."""
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
                log.warning("progress is not published: %s", error)
                continue
            publish(client, report["as"], end, since=offsets_of(source.startOffset))


def publish(client: ClusterClient, group: str, end: Offsets, *, since: Offsets | None) -> None:
    """Set a group's pull offsets to what has moved `since`. What is refused is told, and no error.

    It is for dashboards: no query fails for it, and a batch that moves a queue tells of it again.
    """
    for queue, at in end.at.items():
        if since is not None and since.at.get(queue) == at:
            continue
        try:
            client.update_offset(group, queue, at)
        except ClusterRejection as error:
            # A topic that was deleted, or that only an archive has: others have their progress.
            log.warning("progress of %s is not published: %s", queue, error)
        except PipelineError as error:
            log.warning("progress is not published: %s", error)
            return


@final
class QueryMetrics(SilentListener):
    """Watches the queries of a session whose source is ours."""

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
                # The first batch of a query: Spark does not say where it began.
                topics = {queue.topic for queue in end.at}
                rows[topics.pop() if len(topics) == 1 else EVERY] += source.numInputRows
            else:
                for queue, at in end.at.items():
                    rows[queue.topic] += at - begin.at.get(queue, at)
            self._record_backlog(end, latest)
        self._metrics.rows.update(rows)
        self._metrics.batches_ms.observe(self._metrics.work, int(progress.batchDuration))
        self._metrics.succeeded_at_ms = SystemClock().wall_ms()
        told = {
            "event": "batch",
            "query": str(progress.name or progress.id),
            "batch": progress.batchId,
            "rows": progress.numInputRows,
            "took_ms": progress.batchDuration,
        }
        log.info("%s", json.dumps(told))

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
        # Only a log itself knows how many events lie between two places in it. One that gave no
        # answer keeps what was told of it; of a store that was made anew all of it waits.
        for broker, last in latest.items():
            at = end.get(broker)
            is_same = at is not None and at.log_id in {"", last.log_id}
            read_to = at.at if at is not None and is_same else 0
            self._metrics.waiting_bytes[broker] = max(0, last.at - read_to)


def offsets_of(text: str | None) -> Offsets | None:
    """Return the offsets of a source's document; None of another source's."""
    document = _document_of(text)
    is_ours = document.get("v") == VERSION and "o" in document
    return Offsets.from_document(document) if is_ours else None


def logs_of(text: str | None) -> dict[str, LogPosition]:
    """Return the places in logs of a document of dataset `events`; none of another one."""
    document = _document_of(text)
    return places_of(document) if is_of_events(document) else {}


def _document_of(text: str | None) -> dict[str, Any]:
    """Return a source's document; an empty one of a source whose is no object."""
    try:
        document = json.loads(text or "{}")
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def watch(spark: SparkSession, metrics: PipelineMetrics) -> QueryMetrics:
    """Watch a session's queries."""
    watching = QueryMetrics(metrics)
    spark.streams.addListener(watching)
    return watching


# Sessions that have a publisher: a session is the same for all who build it.
_publishing: Final[weakref.WeakSet[SparkSession]] = weakref.WeakSet()


def publish_progress(spark: SparkSession, *, access_key: str = "") -> None:
    """Have the queries of a session publish their progress that ask for it; once a session."""
    if spark in _publishing:
        return
    spark.streams.addListener(ProgressPublisher(access_key))
    _publishing.add(spark)
