"""J7: an archive, or a part of it, into a topic again: at once, as it was spaced, or faster.

A stream over the archive with a checkpoint, so a run that is stopped goes on where it was; what was
in flight then may come twice, and is known by the property `tidemill-original-id`. Spark does not
wait for anything: messages that come later are delayed messages.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, final

from pyspark.errors import AnalysisException

from tidemill.common.clock import SystemClock
from tidemill_pipeline.archive.store import ArchiveStore, no_archive
from tidemill_pipeline.client import connect
from tidemill_pipeline.data_source import NAME
from tidemill_pipeline.errors import BadOption, PipelineError
from tidemill_pipeline.jobs.inputs import Inputs
from tidemill_pipeline.jobs.replay_plan import (
    CHECKPOINT,
    LEAD_MS,
    Plan,
    ReplaySettings,
    begun_of,
    keep_plan,
    kept_of,
    kept_plan,
    left_of,
    of_sink,
    of_source,
    plan,
    reached_of,
    read_archived,
    times_of,
)
from tidemill_pipeline.jobs.running import (
    Run,
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
from tidemill_pipeline.options import TopicSelection, parse_sink, parse_source
from tidemill_pipeline.schema import ddl
from tidemill_pipeline.source.topics import EVERY_TOPIC, check_archived, meant
from tidemill_pipeline.transforms.replay import Timing, due_ms, to_send
from tidemill_pipeline.transforms.setting import (
    Effect,
    check_expressions,
    check_names,
    effects,
    read_bodies,
    told_of_values,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TRIGGER_ROWS: Final = 50_000  # of one batch: what a kill repeats at most
TOLD_S: Final = 60.0  # until Spark, which tells of batches afterwards, has told of the last one
_SENT: Final = "tidemill-sent"  # what the count of a batch is called
_FIRST_DUE: Final = "first_due_ms"  # and what is beside it, of a timing
_LAST_DUE: Final = "last_due_ms"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The plan, and what of it this run has sent."""

    plan: Plan
    left: int | None = None  # where it was looked at alone: what an earlier run has not sent
    effects: tuple[Effect, ...] = ()  # of what is set, where it was looked at alone
    sent: int = 0
    bad: int = 0  # that this run could not send, and has put into the table of bad rows
    late_ms: int = 0  # of a timing: by how much at most messages were sent after they were due


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch that is sent."""

    number: int
    rows: int
    took_ms: int
    sent: int  # by this run, with it


def look(spark: SparkSession, settings: ReplaySettings) -> Replayed:
    """Look at what would be sent, and at what is set of it, and send nothing.

    Of a replay that was begun that is what is left of it.
    """
    check_set(spark, settings)
    begun = kept_plan(settings)
    looked = plan(spark, settings) if begun is None else begun
    bounds = left_of(settings, looked)
    left = None if begun is None else times_of(spark, settings, bounds).count()
    bounds["bodyEncoding"] = "decode"
    with told_of_values(settings.expressions):
        found = effects(
            read_archived(spark, settings, ddl("messages"), bounds), settings.expressions
        )
    return Replayed(plan=looked, left=left, effects=found)


def check_set(spark: SparkSession, settings: ReplaySettings) -> None:
    """Raise BadOption for expressions that cannot be what is sent of their columns."""
    check_names(settings.expressions, timing=settings.timing)
    if settings.expressions:
        check_expressions(spark.createDataFrame([], ddl("messages")), settings.expressions)


def send(
    spark: SparkSession,
    settings: ReplaySettings,
    *,
    now_ms: Callable[[], int],
    tell: Callable[[Batch], None] = lambda _batch: None,
    tell_shifted: Callable[[int], None] = lambda _ms: None,
) -> Replayed:
    """Send what is left to send; `tell` is told of each batch.

    `tell_shifted`: by how many milliseconds all that is left comes later than it was to come first.
    """
    check_set(spark, settings)
    begun = begun_of(spark, settings, now_ms)
    timing = None
    if settings.timing != "asap":
        shift_ms = _shift_ms(spark, settings, begun, now_ms())
        if shift_ms:
            begun = replace(begun, begin_ms=begun.begin_ms + shift_ms)
            keep_plan(settings, begun)
            tell_shifted(shift_ms)
        timing = _timing(settings, begun)
    reader = spark.readStream.format(NAME)
    # As they were stored: what was sent packed is sent packed again.
    is_packed = not read_bodies(spark.createDataFrame([], ddl("messages")), settings.expressions)
    stream = {
        **of_source(settings),
        "startingOffsets": "earliest",
        "endingOffsets": json.dumps(begun.ends),
        "bodyEncoding": "raw" if is_packed else "decode",
        "maxRowsPerTrigger": str(TRIGGER_ROWS),
        # One task a queue, so that its messages stay in order.
        "rowsPerPartition": str(TRIGGER_ROWS),
    }
    for name, value in stream.items():
        reader = reader.option(name, value)
    kept = kept_of(reader.load(), settings)
    bad_before = _bad_rows(spark, settings)
    counting = _Counting(tell)
    sent = to_send(kept, timing, settings.expressions, is_packed=is_packed)
    writer = counting.observed(sent, is_timed=timing is not None).writeStream.format(NAME)
    for name, value in of_sink(settings).items():
        writer = writer.option(name, value)
    checkpoint = f"{settings.state.rstrip('/')}/{CHECKPOINT}"
    writer = writer.option("checkpointLocation", checkpoint)
    spark.streams.addListener(counting)
    try:
        query = writer.trigger(availableNow=True).start()
        try:
            with told_of_values(settings.expressions):
                query.awaitTermination()
        except KeyboardInterrupt:
            # It would go on sending. Of what it has sent nothing more is told then.
            with suppress(Exception):  # The JVM may have been ended, too.
                query.stop()
            counting.is_over.set()
            raise
        finally:
            counting.is_over.wait(TOLD_S)
    finally:
        spark.streams.removeListener(counting)
    bad = _bad_rows(spark, settings) - bad_before
    return Replayed(plan=begun, sent=counting.rows - bad, bad=bad, late_ms=counting.late_ms)


def _timing(settings: ReplaySettings, begun: Plan) -> Timing:
    return Timing(
        first_stored_ms=begun.first_stored_ms,
        begin_ms=begun.begin_ms,
        speed=settings.speed if settings.timing == "scaled" else 1.0,
    )


def _shift_ms(spark: SparkSession, settings: ReplaySettings, begun: Plan, now_ms: int) -> int:
    """Return by how much what is left has to come later to keep its spacing; 0: it lies ahead.

    A run that goes on finds messages that were due while nobody sent them: they would all come at
    once.
    """
    from pyspark.sql import functions as F  # noqa: N812  # As all of Spark's users write it.

    low_ms = begun.first_stored_ms
    bounds = left_of(settings, begun)
    if "startingOffsets" in bounds:
        (left,) = (
            times_of(spark, settings, bounds)
            .agg(F.min(F.unix_millis("store_timestamp")).alias("low"))
            .collect()
        )
        if left.low is None:
            return 0  # All of it is sent.
        low_ms = left.low
    first_due_ms = due_ms(low_ms, _timing(settings, begun))
    return max(0, now_ms + LEAD_MS - first_due_ms) if first_due_ms < now_ms else 0


def run(settings: ReplaySettings, *, is_dry: bool) -> Replayed:
    """Replay, or only look."""
    # All that can be known before Spark is started for it.
    if not ArchiveStore(settings.archive).has_entries:
        raise BadOption(no_archive(settings.archive))
    options = parse_source(of_source(settings), is_stream=False)
    check_archived(ArchiveStore(settings.archive).archive(), options)
    parse_sink(of_sink(settings))
    check_names(settings.expressions, timing=settings.timing)
    check_folder(settings.state)
    kept_plan(settings)
    say = progress_line()
    say("starting Spark")
    with (
        nullcontext(Run(job="", run=""))
        if is_dry
        else recorded("replay", settings.state) as record,
        session("replay", settings.master) as spark,
    ):
        if told := told_of_topic(settings):
            say(told)
            end_line()
        if is_dry:
            return look(spark, settings)

        metrics = PipelineMetrics("replay", settings.cluster)
        serve(metrics, settings.metrics_port)
        into, clock = parse_sink(of_sink(settings)).topic, SystemClock()

        def tell(batch: Batch) -> None:
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

        def tell_shifted(by_ms: int) -> None:
            say(f"nobody sent what was due: all that is left comes {by_ms / 1000:,.0f} s later")
            end_line()

        with _noted(record.inputs, settings):
            replayed = send(
                spark, settings, now_ms=clock.wall_ms, tell=tell, tell_shifted=tell_shifted
            )
        record.rows = replayed.sent
        metrics.succeeded_at_ms = clock.wall_ms()
        if settings.metrics_file:
            metrics.write(settings.metrics_file)
        return replayed


@contextmanager
def _noted(inputs: Inputs, settings: ReplaySettings) -> Iterator[None]:
    """Note how far a stream gets in the block, also where it does not get to its end."""
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
    """Return how far a replay is with each queue, none of which it has where it has not begun."""
    # What is wrong with a checkpoint who goes on with it says.
    with suppress(OSError, ValueError, PipelineError):
        reached = reached_of(settings)
        return {} if reached is None else {**reached.at, **reached.passed}
    return {}


def told_of_topic(settings: ReplaySettings) -> str:
    """Return what is to be said of the topic that is sent to: it may be misspelt, or new.

    A dry run needs no cluster, and who may send need not be one who may look.
    """
    options = parse_sink(of_sink(settings))
    nobody = f"whether there is a topic {options.topic} nobody says"
    try:
        cluster = connect(options.connection).cluster(TopicSelection(pattern=EVERY_TOPIC))
    except PipelineError as error:
        return f"{nobody}: {error}"
    known = {queue.topic for queue in cluster.queues}
    if options.topic in known:
        return ""
    if cluster.unreachable:
        return f"{nobody} while {', '.join(sorted(cluster.unreachable))} is away"
    near = meant(options.topic, known) or "."
    return (
        f"there is no topic {options.topic}{near} The first message makes it, where the cluster"
        " makes topics by itself"
    )


@final
class _Counting(SilentListener):
    """Counts the rows that a query hands to the sink, from what Spark tells of its batches."""

    def __init__(self, tell: Callable[[Batch], None]) -> None:
        self._tell = tell
        self._run = ""
        self.rows = 0
        self.late_ms = 0  # by which at most they were sent after they were due
        self.is_over = threading.Event()  # nothing more is told of the query

    def observed(self, frame: DataFrame, *, is_timed: bool) -> DataFrame:
        """Return a frame whose rows are counted."""
        from pyspark.sql import functions as F  # noqa: N812  # As all of Spark's users write it.

        counted = [F.count("*").alias("rows")]
        if is_timed:
            at_ms = F.unix_millis("due_timestamp")
            counted += [F.min(at_ms).alias(_FIRST_DUE), F.max(at_ms).alias(_LAST_DUE)]
        return frame.observe(_SENT, *counted)

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802  # Spark's name.
        """Take the query: this is called within its start."""
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
            self._tell(
                Batch(number=progress.batchId, rows=counted.rows, took_ms=took_ms, sent=self.rows)
            )

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802  # Spark's name.
        """Let go who waits for the last count."""
        if str(event.runId) == self._run:
            self.is_over.set()


def late_of(*, began_ms: int, took_ms: int, first_due_ms: int, last_due_ms: int) -> int:
    """Return by how much at most messages of a batch were sent after they were due; 0: none.

    Its first one may have been due before it began, or its last one before it ended.
    """
    return max(0, began_ms - first_due_ms, began_ms + took_ms - last_due_ms)


def _bad_rows(spark: SparkSession, settings: ReplaySettings) -> int:
    """Return how many rows the table of those has that could not be sent."""
    path = of_sink(settings).get("deadLetterPath", "")
    if not path:
        return 0
    try:
        return int(spark.read.parquet(path).count())
    except AnalysisException:
        return 0  # It is made with its first row.
