"""J7: an archive, or a part of it, into a topic again: at once, as it was spaced, or faster.

A stream over the archive with a checkpoint, so a run that is stopped goes on where it was; what was
in flight then may come twice, and is known by the property `tidemill-original-id`. Spark does not
wait for anything: messages that come later are delayed messages.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, final

from pyspark.errors import AnalysisException

from tidemill.common.clock import SystemClock
from tidemill.pipeline.archive.store import ArchiveStore
from tidemill.pipeline.client import connect
from tidemill.pipeline.data_source import NAME
from tidemill.pipeline.errors import BadOption, PipelineError
from tidemill.pipeline.jobs.inputs import Inputs
from tidemill.pipeline.jobs.running import (
    Run,
    end_line,
    progress_line,
    recorded,
    say_batch,
    session,
)
from tidemill.pipeline.listener import Quiet
from tidemill.pipeline.metrics import PipelineMetrics, serve
from tidemill.pipeline.offsets import Offsets, Queue, QueueName
from tidemill.pipeline.options import (
    LATEST,
    SINK,
    SOURCE,
    Topics,
    instant_ms,
    parse_sink,
    parse_source,
)
from tidemill.pipeline.schema import ddl
from tidemill.pipeline.source.places import Places
from tidemill.pipeline.source.topics import EVERY_TOPIC, meant
from tidemill.pipeline.transforms.replay import ORIGINAL_ID, Timing, between, due_ms, to_send
from tidemill.pipeline.transforms.setting import (
    Effect,
    Expressions,
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
LEAD_MS: Final = 10_000  # between now and the first message that is timed, for the first batch
# Offsets as option endingOffsets has them: by topic, broker group with incarnation, and queue.
Ends = Mapping[str, Mapping[str, Mapping[str, int]]]
# Names of options are alike in any letters.
_SOURCE: Final = frozenset(option.name.lower() for option in SOURCE)
_SINK: Final = frozenset(option.name.lower() for option in SINK)
# Of the source: what a replay chooses itself. Which messages it is of say its own options.
_CHOSEN: Final = (
    "startingOffsets", "startingTimestamp", "startingTimestampStrategy", "endingOffsets",
    "endingTimestamp", "includeBody", "bodyEncoding", "dataset", "readMode", "archivePath",
    "maxRowsPerTrigger", "maxBytesPerTrigger", "rowsPerPartition", "pushdown",
)  # fmt: skip
_SENT: Final = "tidemill-sent"  # what the count of a batch is called
_FIRST_DUE: Final = "first_due_ms"  # and what is beside it, of a timing
_LAST_DUE: Final = "last_due_ms"
_CHECKPOINT: Final = "checkpoint"  # of the stream, below the state
_PLAN: Final = "plan.json"  # beside the checkpoint: what a run that goes on must not choose anew


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """What a replay takes."""

    archive: str
    given: Mapping[str, str]  # options of the source, which topics among them
    sink: Mapping[str, str]  # options of the sink
    more: Mapping[str, str] = field(default_factory=dict)  # of whichever of the two knows them
    state: str  # folder of the checkpoint; another one is another replay
    timing: Literal["asap", "original", "scaled"] = "asap"
    speed: float = 1.0
    since_ms: int | None = None
    until_ms: int | None = None
    expressions: Expressions = field(default_factory=dict)  # by column: what is sent of it
    master: str | None = None
    metrics_port: int = 0
    metrics_file: str = ""
    cluster: str = ""  # label of the metrics


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What would be sent."""

    rows: int
    first_stored_ms: int
    last_stored_ms: int
    # Where the archive ends: what is archived while a replay goes on is not of it, and might be
    # what it has sent.
    ends: Ends
    begin_ms: int = 0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The plan, and what of it this run has sent."""

    plan: Plan
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


def plan(spark: SparkSession, settings: ReplaySettings) -> Plan:
    """Look at what would be sent, and send nothing."""
    from pyspark.sql import functions as F  # noqa: N812  # As all of Spark's users write it.

    ends, found = _ends(settings), None
    while found is None:
        stored_ms = F.unix_millis("store_timestamp")
        (found,) = (
            _times(spark, settings, {"endingOffsets": json.dumps(_as_option(ends))})
            .agg(
                F.count("*").alias("n"), F.min(stored_ms).alias("low"),
                F.max(stored_ms).alias("high"),
            )
            .collect()
        )  # fmt: skip
        now = _ends(settings)
        if now.keys() != ends.keys():
            ends, found = now, None  # Of a queue that came meanwhile all was counted.
    if not found.n:
        raise BadOption(
            f"there is nothing to replay: {settings.archive} has no message of these topics and"
            " times"
        )
    return Plan(
        rows=found.n, first_stored_ms=found.low, last_stored_ms=found.high, ends=_as_option(ends)
    )


def look(spark: SparkSession, settings: ReplaySettings) -> Replayed:
    """Look at what would be sent, and at what is set of it, and send nothing."""
    check_set(spark, settings)
    looked = plan(spark, settings)
    bounds = {"endingOffsets": json.dumps(looked.ends), "bodyEncoding": "decode"}
    with told_of_values(settings.expressions):
        found = effects(_read(spark, settings, ddl("messages"), bounds), settings.expressions)
    return Replayed(plan=looked, effects=found)


def check_set(spark: SparkSession, settings: ReplaySettings) -> None:
    """Raise BadOption for expressions that cannot be what is sent of their columns."""
    check_names(settings.expressions, timing=settings.timing)
    if settings.expressions:
        check_expressions(spark.createDataFrame([], ddl("messages")), settings.expressions)


def _times(spark: SparkSession, settings: ReplaySettings, bounds: Mapping[str, str]) -> DataFrame:
    """(topic, store_timestamp), one row a message of a replay between two offsets."""
    return _read(spark, settings, "topic string, store_timestamp timestamp", bounds)


def _read(
    spark: SparkSession, settings: ReplaySettings, columns: str, bounds: Mapping[str, str]
) -> DataFrame:
    reader = spark.read.format(NAME).schema(columns)
    for name, value in {**_of_source(settings), **bounds}.items():
        reader = reader.option(name, value)
    return _kept(reader.load(), settings)


def _ends(settings: ReplaySettings) -> dict[Queue, int]:
    """Return where the queues end that are archived, or where options say that a read ends."""
    options = parse_source(_of_source(settings), is_stream=False)
    places = Places(options)
    return places.resolve(options.end, places.whole_view(), word=LATEST)


def _as_option(at: Mapping[Queue, int]) -> Ends:
    ends: dict[str, dict[str, dict[str, int]]] = {}
    for queue, end in sorted(at.items()):
        # Not only the name, which would be of another queue where its topic is made anew.
        broker = f"{queue.broker}#{queue.incarnation}"
        ends.setdefault(queue.topic, {}).setdefault(broker, {})[str(queue.queue_id)] = end
    return ends


def _kept(messages: DataFrame, settings: ReplaySettings) -> DataFrame:
    """Leave out what is not of the times, and, unless it is named, the topic that is sent to."""
    kept = between(messages, since_ms=settings.since_ms, until_ms=settings.until_ms)
    into = settings.sink.get("topic")
    is_named = "topics" in settings.given or "topic" in settings.given
    return kept if is_named or into is None else kept.where(kept["topic"] != into)


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
    begun = _begun(spark, settings, now_ms())
    timing = None
    if settings.timing != "asap":
        shift_ms = _shift_ms(spark, settings, begun, now_ms())
        if shift_ms:
            begun = replace(begun, begin_ms=begun.begin_ms + shift_ms)
            _keep(settings, begun)
            tell_shifted(shift_ms)
        timing = _timing(settings, begun)
    reader = spark.readStream.format(NAME)
    # As they were stored: what was sent packed is sent packed again.
    is_packed = not read_bodies(spark.createDataFrame([], ddl("messages")), settings.expressions)
    stream = {
        **_of_source(settings),
        "startingOffsets": "earliest",
        "endingOffsets": json.dumps(begun.ends),
        "bodyEncoding": "raw" if is_packed else "decode",
        "maxRowsPerTrigger": str(TRIGGER_ROWS),
        # One task a queue, so that its messages stay in order.
        "rowsPerPartition": str(TRIGGER_ROWS),
    }
    for name, value in stream.items():
        reader = reader.option(name, value)
    kept = _kept(reader.load(), settings)
    bad_before = _bad_rows(spark, settings)
    counting = _Counting(tell)
    sent = to_send(kept, timing, settings.expressions, is_packed=is_packed)
    writer = counting.observed(sent, is_timed=timing is not None).writeStream.format(NAME)
    for name, value in _of_sink(settings).items():
        writer = writer.option(name, value)
    checkpoint = f"{settings.state.rstrip('/')}/{_CHECKPOINT}"
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

    reached = _reached(settings)
    bounds = {"endingOffsets": json.dumps(begun.ends)}
    if reached is None:
        low_ms = begun.first_stored_ms
    else:
        starts = {**reached.at, **reached.passed}
        bounds["startingOffsets"] = json.dumps(_as_option(starts)) if starts else "earliest"
        (left,) = (
            _times(spark, settings, bounds)
            .agg(F.min(F.unix_millis("store_timestamp")).alias("low"))
            .collect()
        )
        if left.low is None:
            return 0  # All of it is sent.
        low_ms = left.low
    first_due_ms = due_ms(low_ms, _timing(settings, begun))
    return max(0, now_ms + LEAD_MS - first_due_ms) if first_due_ms < now_ms else 0


def _reached(settings: ReplaySettings) -> Offsets | None:
    """Return what is committed of the stream; None: nothing. A batch that is not is left to send.

    The checkpoint is Spark's: `commits` and `offsets` have a file a batch, and the last line of an
    offset is the source's.
    """
    checkpoint = Path(settings.state) / _CHECKPOINT
    numbers = [int(path.name) for path in (checkpoint / "commits").glob("[0-9]*")]
    if not numbers:
        return None
    lines = (checkpoint / "offsets" / str(max(numbers))).read_text("utf-8").splitlines()
    return Offsets.from_document(json.loads(lines[-1]))


def run(settings: ReplaySettings, *, is_dry: bool) -> Replayed:
    """Replay, or only look."""
    if not ArchiveStore(settings.archive).is_there:
        raise BadOption(f"there is no archive at {settings.archive}")
    parse_source(_of_source(settings), is_stream=False)  # Before Spark is started for it.
    parse_sink(_of_sink(settings))
    check_names(settings.expressions, timing=settings.timing)
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
        into, clock = parse_sink(_of_sink(settings)).topic, SystemClock()

        def tell(batch: Batch) -> None:
            metrics.rows[into] = record.rows = batch.sent
            metrics.batches_ms.observe(metrics.work, batch.took_ms)
            say_batch(
                say, f"sent {batch.sent:,} messages",
                job=metrics.work, batch=batch.number, rows=batch.rows, took_ms=batch.took_ms,
            )  # fmt: skip

        def tell_shifted(by_ms: int) -> None:
            say(f"nobody sent what was due: all that is left comes {by_ms / 1000:,.0f} s later")
            end_line()

        with _noted(record.inputs, settings):
            replayed = send(
                spark, settings, now_ms=clock.wall_ms, tell=tell, tell_shifted=tell_shifted
            )
        metrics.rows[into] = record.rows = replayed.sent
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


def _places(settings: ReplaySettings) -> dict[Queue, int]:
    """Return how far a replay is with each queue, none of which it has where it has not begun."""
    # What is wrong with a checkpoint who goes on with it says.
    with suppress(OSError, ValueError, PipelineError):
        reached = _reached(settings)
        return {} if reached is None else {**reached.at, **reached.passed}
    return {}


def told_of_topic(settings: ReplaySettings) -> str:
    """Return what is to be said of the topic that is sent to: it may be misspelt, or new.

    A dry run needs no cluster, and who may send need not be one who may look.
    """
    options = parse_sink(_of_sink(settings))
    nobody = f"whether there is a topic {options.topic} nobody says"
    try:
        cluster = connect(options.connection).cluster(Topics(pattern=EVERY_TOPIC))
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
class _Counting(Quiet):
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
                    began_ms=instant_ms(progress.timestamp) or 0, took_ms=took_ms,
                    first_due_ms=counted[_FIRST_DUE], last_due_ms=counted[_LAST_DUE],
                )  # fmt: skip
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
    path = _of_sink(settings).get("deadLetterPath", "")
    if not path:
        return 0
    try:
        return int(spark.read.parquet(path).count())
    except AnalysisException:
        return 0  # It is made with its first row.


def _of_source(settings: ReplaySettings) -> dict[str, str]:
    own = {name: value for name, value in settings.more.items() if name.lower() in _SOURCE}
    for name in _CHOSEN:
        if name.lower() in map(str.lower, own):
            raise BadOption(
                f"option {name}: a replay chooses it itself; which messages it is of is said by its"
                " topics, --since, --until and option filter"
            )
    return {**settings.given, **own, "readMode": "archive", "archivePath": settings.archive}


def _of_sink(settings: ReplaySettings) -> dict[str, str]:
    # With what nobody knows: it says so, and what was meant.
    own = {
        name: value
        for name, value in settings.more.items()
        if name.lower() in _SINK or name.lower() not in _SOURCE
    }
    return {**settings.sink, **own}


def _begun(spark: SparkSession, settings: ReplaySettings, now_ms: int) -> Plan:
    """Return the plan of a replay: the one that it was begun with, or a new one, which is kept."""
    if "://" in settings.state:
        raise BadOption("--state is a folder of this machine")
    path = Path(settings.state) / _PLAN
    asked = _asked(settings)
    if path.exists():
        try:
            kept: dict[str, Any] = json.loads(path.read_text())
            # A program of before set nothing, and kept no filter: who goes on gives that of then.
            asked_then = {"filter": asked["filter"], "expressions": {}, **kept["asked"]}
            ends = kept["plan"]["ends"]
            begun = Plan(**kept["plan"])
        except (ValueError, KeyError, TypeError) as error:
            raise BadOption(
                f"{path} is not whole, so what is left to send cannot be told. Give another"
                f" --state; what was sent already comes again then, with the same {ORIGINAL_ID}"
            ) from error
        if asked_then != asked:
            raise BadOption(
                f"{settings.state} is of another replay; give the same options as then, or another"
                " --state"
            )
        if isinstance(ends, list):
            return replace(begun, ends=_as_option(_ends_of_names(settings, ends)))
        return begun
    looked = plan(spark, settings)
    begun = replace(looked, begin_ms=now_ms + LEAD_MS)
    _keep(settings, begun)
    return begun


def _keep(settings: ReplaySettings, begun: Plan) -> None:
    """Write down what a run that goes on must not choose anew."""
    path = Path(settings.state) / _PLAN
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    with draft.open("w") as file:
        json.dump({"asked": _asked(settings), "plan": asdict(begun)}, file)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _ends_of_names(
    settings: ReplaySettings, ends: Sequence[tuple[str, str, int, int]]
) -> dict[Queue, int]:
    """Return the ends in a plan of an earlier program, which kept the names of queues alone."""
    alike: dict[QueueName, list[Queue]] = {}
    for queue in _ends(settings):
        alike.setdefault(queue.name, []).append(queue)
    found = {}
    for topic, broker, queue_id, end in ends:
        name = QueueName(topic, broker, queue_id)
        own = alike.get(name, [])
        if len(own) != 1:
            raise BadOption(
                f"{settings.state} is of an earlier program, which kept the names of queues, and"
                f" the archive has {len(own)} of the name {name}: what is left to send cannot be"
                " told. Give another --state; what was sent already comes again then, with the same"
                f" {ORIGINAL_ID}"
            )
        found[own[0]] = end
    return found


def _asked(settings: ReplaySettings) -> dict[str, Any]:
    more = {name.lower(): value for name, value in settings.more.items()}
    return {
        "archive": settings.archive,
        "topics": {name: settings.given.get(name, "") for name in ("topics", "topicPattern")},
        "into": settings.sink.get("topic", ""),
        "namespace": more.get("namespace", ""),
        "filter": parse_source(_of_source(settings), is_stream=False).filter,
        "timing": settings.timing,
        "speed": settings.speed,
        "since_ms": settings.since_ms,
        "until_ms": settings.until_ms,
        "expressions": dict(settings.expressions),
    }
