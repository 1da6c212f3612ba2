"""J7: send archived messages to a topic, at once or with their original or scaled spacing.

A replay is a stream over the archive with a checkpoint, so a stopped run can be resumed. The batch
in flight may then be sent twice; the property `tidemill-original-id` identifies the copies. Spacing
uses delayed messages; Spark itself never waits.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

from pyspark.errors import AnalysisException, StreamingQueryException

from tidemill.common.clock import SystemClock
from tidemill_pipeline.archive.store import ArchiveStore, no_archive
from tidemill_pipeline.client import connect
from tidemill_pipeline.data_source import NAME
from tidemill_pipeline.errors import BadOption, PipelineError, is_late_start
from tidemill_pipeline.jobs.inputs import InputRanges
from tidemill_pipeline.jobs.replay_plan import (
    CHECKPOINT,
    LEAD_MS,
    ReplayPlan,
    ReplaySettings,
    committed_offsets,
    load_or_create_plan,
    load_plan,
    plan,
    read_archived,
    remaining_bounds,
    selected_messages,
    sink_options,
    source_options,
    store_plan,
    times_of,
)
from tidemill_pipeline.jobs.running import (
    RunRecord,
    Say,
    check_folder,
    end_line,
    progress_line,
    recorded,
    say_batch,
    session,
)
from tidemill_pipeline.listener import SilentListener
from tidemill_pipeline.metrics import PipelineMetrics, serve
from tidemill_pipeline.offsets import SourceQueue
from tidemill_pipeline.option_values import instant_ms
from tidemill_pipeline.options import parse_sink, parse_source
from tidemill_pipeline.schema import ddl
from tidemill_pipeline.sink.target_topics import check_target
from tidemill_pipeline.source.topics import check_archived
from tidemill_pipeline.transforms.replay import ReplaySchedule, due_ms, to_send
from tidemill_pipeline.transforms.setting import (
    ExpressionEffect,
    check_expressions,
    check_names,
    effects,
    read_bodies,
    value_errors,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from tidemill_pipeline.transforms.setting import Expressions

STARTS_MAX: Final = 3  # of the query, if Spark's Python process is late
TRIGGER_ROWS: Final = 50_000  # per batch: a kill repeats at most one batch
REPORT_TIMEOUT_S: Final = 60.0  # for Spark's report of the last batch, which comes after its end
_SENT: Final = "tidemill-sent"  # name of a batch's observation
_FIRST_DUE: Final = "first_due_ms"  # columns of the observation of a timed replay
_LAST_DUE: Final = "last_due_ms"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """Result of a replay run."""

    plan: ReplayPlan
    left: int | None = None  # dry run only: messages that an earlier run has not sent
    effects: tuple[ExpressionEffect, ...] = ()  # dry run only: effects of the expressions
    sent: int = 0
    bad: int = 0  # rows that this run could not send and wrote to the table of bad rows
    late_ms: int = 0  # timed replay: the largest delay of a message after its due time


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayBatch:
    """A sent batch."""

    number: int
    rows: int
    took_ms: int
    sent: int  # by this run so far, including this batch


def look(spark: SparkSession, settings: ReplaySettings) -> ReplayResult:
    """Return the plan of a replay and the effects of its expressions, without sending.

    For a stopped replay also count the remaining messages.
    """
    check_set(spark, settings)
    begun = load_plan(settings)
    found_plan = plan(spark, settings) if begun is None else begun
    bounds = remaining_bounds(settings, found_plan)
    left = None if begun is None else times_of(spark, settings, bounds).count()
    bounds["bodyEncoding"] = "decode"
    with value_errors(settings.expressions):
        found = effects(
            read_archived(spark, settings, ddl("messages"), bounds), settings.expressions
        )
    return ReplayResult(plan=found_plan, left=left, effects=found)


def check_set(spark: SparkSession, settings: ReplaySettings) -> None:
    """Raise BadOption for expressions that are invalid or have the wrong type."""
    check_names(settings.expressions, timing=settings.timing)
    if settings.expressions:
        check_expressions(spark.createDataFrame([], ddl("messages")), settings.expressions)


def send(
    spark: SparkSession,
    settings: ReplaySettings,
    *,
    now_ms: Callable[[], int],
    report: Callable[[ReplayBatch], None] = lambda _batch: None,
    report_shift: Callable[[int], None] = lambda _ms: None,
    report_start: Callable[[int], None] = lambda _number: None,
) -> ReplayResult:
    """Send the remaining messages; call `report` after each batch.

    If all remaining messages are postponed, call `report_shift` with the milliseconds. Before the
    query starts again, call `report_start` with the number of the start.
    """
    check_set(spark, settings)
    begun = load_or_create_plan(spark, settings, now_ms)
    timing = None
    if settings.timing != "asap":
        shift_ms = _shift_ms(spark, settings, begun, now_ms())
        if shift_ms:
            begun = replace(begun, begin_ms=begun.begin_ms + shift_ms)
            store_plan(settings, begun)
            report_shift(shift_ms)
        timing = _timing(settings, begun)
    reader = spark.readStream.format(NAME)
    # Compressed bodies are sent as they were stored.
    is_packed = not read_bodies(spark.createDataFrame([], ddl("messages")), settings.expressions)
    stream = {
        **source_options(settings),
        "startingOffsets": "earliest",
        "endingOffsets": json.dumps(begun.ends),
        "bodyEncoding": "raw" if is_packed else "decode",
        "maxRowsPerTrigger": str(TRIGGER_ROWS),
        # One task per queue keeps its messages in order.
        "rowsPerPartition": str(TRIGGER_ROWS),
    }
    for name, value in stream.items():
        reader = reader.option(name, value)
    selected = selected_messages(reader.load(), settings)
    bad_before = _bad_rows(spark, settings)
    counting = _BatchCounter(report)
    sent = to_send(selected, timing, settings.expressions, is_packed=is_packed)
    writer = counting.observed(sent, is_timed=timing is not None).writeStream.format(NAME)
    for name, value in sink_options(settings).items():
        writer = writer.option(name, value)
    checkpoint = f"{settings.state.rstrip('/')}/{CHECKPOINT}"
    writer = writer.option("checkpointLocation", checkpoint)
    spark.streams.addListener(counting)
    try:
        _run_query(writer, counting, settings.expressions, report_start)
    finally:
        spark.streams.removeListener(counting)
    bad = _bad_rows(spark, settings) - bad_before
    return ReplayResult(plan=begun, sent=counting.rows - bad, bad=bad, late_ms=counting.late_ms)


def _run_query(
    writer: DataStreamWriter,
    counting: _BatchCounter,
    expressions: Expressions,
    report_start: Callable[[int], None],
) -> None:
    """Run the query to its end. Start it again if Spark's Python process was late.

    The process starts before the first batch, so a query with a late process has sent nothing.
    """
    for start in range(1, STARTS_MAX + 1):
        if start > 1:
            report_start(start)
        counting.expect_query()
        query = writer.trigger(availableNow=True).start()
        try:
            with value_errors(expressions):
                query.awaitTermination()
        except StreamingQueryException as error:
            if start == STARTS_MAX or not is_late_start(error):
                raise
        except KeyboardInterrupt:
            # Otherwise the query would continue to send. Its last batches are not reported.
            with suppress(Exception):  # The JVM may have ended as well.
                query.stop()
            counting.is_over.set()
            raise
        else:
            return
        finally:
            counting.is_over.wait(REPORT_TIMEOUT_S)


def _timing(settings: ReplaySettings, begun: ReplayPlan) -> ReplaySchedule:
    return ReplaySchedule(
        first_stored_ms=begun.first_stored_ms,
        begin_ms=begun.begin_ms,
        speed=settings.speed if settings.timing == "scaled" else 1.0,
    )


def _shift_ms(spark: SparkSession, settings: ReplaySettings, begun: ReplayPlan, now_ms: int) -> int:
    """Return by how much to postpone the remaining messages; 0 if all are due in the future.

    Messages that came due while the replay was stopped would otherwise arrive all at once.
    """
    from pyspark.sql import functions as F  # noqa: N812  # The usual name among users of Spark.

    low_ms = begun.first_stored_ms
    bounds = remaining_bounds(settings, begun)
    if "startingOffsets" in bounds:
        (oldest,) = (
            times_of(spark, settings, bounds)
            .agg(F.min(F.unix_millis("store_timestamp")).alias("low"))
            .collect()
        )
        if oldest.low is None:
            return 0  # No message remains.
        low_ms = oldest.low
    first_due_ms = due_ms(low_ms, _timing(settings, begun))
    return max(0, now_ms + LEAD_MS - first_due_ms) if first_due_ms < now_ms else 0


def run(settings: ReplaySettings, *, is_dry: bool) -> ReplayResult:
    """Run a replay or a dry run."""
    # Check everything that needs no Spark first.
    if not ArchiveStore(settings.archive).has_entries:
        raise BadOption(no_archive(settings.archive))
    options = parse_source(source_options(settings), is_stream=False)
    check_archived(ArchiveStore(settings.archive).archive(), options)
    sink = parse_sink(sink_options(settings))
    check_names(settings.expressions, timing=settings.timing)
    check_folder(settings.state)
    load_plan(settings)
    if not is_dry:
        check_target(connect(sink.connection), sink)
    say = progress_line()
    say("starting Spark")
    with (
        nullcontext(RunRecord(job="", run=""))
        if is_dry
        else recorded("replay", settings.state) as record,
        session("replay", settings.master) as spark,
    ):
        if is_dry:
            if warning := topic_warning(settings):
                say(warning)
                end_line()
            return look(spark, settings)

        metrics = PipelineMetrics("replay", settings.cluster)
        serve(metrics, settings.metrics_port)
        into, clock = sink.topic, SystemClock()

        def report(batch: ReplayBatch) -> None:
            metrics.rows[into] = record.rows = batch.sent
            metrics.batches_ms.observe(metrics.work, batch.took_ms)
            say_batch(
                say,
                f"sent {batch.sent:,} messages",
                job=metrics.work,
                batch=batch.number,
                rows=batch.rows,
                took_ms=batch.took_ms,
            )

        with _noted(record.inputs, settings):
            replayed = send(
                spark,
                settings,
                now_ms=clock.wall_ms,
                report=report,
                report_shift=partial(_say_shift, say),
                report_start=partial(_say_start, say),
            )
        record.rows = replayed.sent
        metrics.succeeded_at_ms = clock.wall_ms()
        if settings.metrics_file:
            metrics.write(settings.metrics_file)
        return replayed


def _say_shift(say: Say, by_ms: int) -> None:
    say(
        "messages came due while the replay was stopped; all remaining messages come"
        f" {by_ms / 1000:,.0f} s later"
    )
    end_line()


def _say_start(say: Say, number: int) -> None:
    say(
        "Spark's Python process did not start within 10 s: starting the query again"
        f" ({number} of {STARTS_MAX})"
    )
    end_line()


@contextmanager
def _noted(inputs: InputRanges, settings: ReplaySettings) -> Iterator[None]:
    """Record the ranges that a stream reads in the block, even if it fails."""
    archived = ArchiveStore(settings.archive).archive().queues
    first = {key.queue: queue.start for key, queue in archived.items()}
    before = _places(settings)
    try:
        yield
    finally:
        for queue, end in _places(settings).items():
            start = before.get(queue, first.get(queue, 0))
            if start < end:
                inputs.note(queue, start, end)


def _places(settings: ReplaySettings) -> dict[SourceQueue, int]:
    """Return the committed offset of each queue; empty before the first batch."""
    # The resumed stream reports a damaged checkpoint.
    with suppress(OSError, ValueError, PipelineError):
        reached = committed_offsets(settings)
        return {} if reached is None else {**reached.at, **reached.passed}
    return {}


def topic_warning(settings: ReplaySettings) -> str:
    """Return a warning if the target topic is missing or unknown; "" if it exists.

    A dry run needs no cluster.
    """
    sink = parse_sink(sink_options(settings))
    try:
        check_target(connect(sink.connection), sink)
    except BadOption as error:
        return str(error)
    except PipelineError as error:
        return f"cannot check whether topic {sink.topic} exists: {error}"
    return ""


@final
class _BatchCounter(SilentListener):
    """Counter of the rows that a query passes to the sink, from Spark's batch reports."""

    def __init__(self, report: Callable[[ReplayBatch], None]) -> None:
        self._report = report
        self._run = ""
        self.rows = 0
        self.late_ms = 0  # the largest delay of a message after its due time
        self.is_over = threading.Event()  # set after the query's last report

    def observed(self, frame: DataFrame, *, is_timed: bool) -> DataFrame:
        """Return the frame with an observation that counts its rows."""
        from pyspark.sql import functions as F  # noqa: N812  # The usual name among users of Spark.

        counted = [F.count("*").alias("rows")]
        if is_timed:
            at_ms = F.unix_millis("due_timestamp")
            counted += [F.min(at_ms).alias(_FIRST_DUE), F.max(at_ms).alias(_LAST_DUE)]
        return frame.observe(_SENT, *counted)

    def expect_query(self) -> None:
        """Count the batches of the next query that starts."""
        self._run = ""
        self.is_over.clear()

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802  # Spark's name.
        """Remember the query: Spark calls this during its start."""
        self._run = self._run or str(event.runId)

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802  # Spark's name.
        """Count a batch."""
        progress = event.progress
        counted = progress.observedMetrics.get(_SENT)
        if str(progress.runId) == self._run and counted is not None and counted.rows:
            self.rows += counted.rows
            took_ms = int(progress.batchDuration)
            if _FIRST_DUE in counted:
                late_ms = late_of(
                    began_ms=instant_ms(progress.timestamp) or 0,
                    took_ms=took_ms,
                    first_due_ms=counted[_FIRST_DUE],
                    last_due_ms=counted[_LAST_DUE],
                )
                self.late_ms = max(self.late_ms, late_ms)
            self._report(
                ReplayBatch(
                    number=progress.batchId, rows=counted.rows, took_ms=took_ms, sent=self.rows
                )
            )

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802  # Spark's name.
        """Wake the thread that waits for the last count."""
        if str(event.runId) == self._run:
            self.is_over.set()


def late_of(*, began_ms: int, took_ms: int, first_due_ms: int, last_due_ms: int) -> int:
    """Return the largest delay of a batch's messages after their due time; 0 if none was late.

    The first message may have been due before the batch began, the last one before it ended.
    """
    return max(0, began_ms - first_due_ms, began_ms + took_ms - last_due_ms)


def _bad_rows(spark: SparkSession, settings: ReplaySettings) -> int:
    """Return the number of rows in the table of bad rows."""
    path = sink_options(settings).get("deadLetterPath", "")
    if not path:
        return 0
    try:
        return int(spark.read.parquet(path).count())
    except AnalysisException:
        return 0  # The first bad row creates the table.
