"""What a replay is of, and what is left of it, which a run that goes on must not choose anew.

The plan lies beside the checkpoint of its stream, `plan.json`; how far it is says the checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, final

from tidemill_pipeline.data_source import NAME
from tidemill_pipeline.errors import BadOption
from tidemill_pipeline.offsets import Offsets, QueueName, SourceQueue
from tidemill_pipeline.option_table import SINK, SOURCE
from tidemill_pipeline.options import LATEST, parse_source
from tidemill_pipeline.source.queue_bounds import OffsetResolver
from tidemill_pipeline.transforms.replay import ORIGINAL_ID, between
from tidemill_pipeline.transforms.setting import Expressions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LEAD_MS: Final = 10_000  # between now and the first message that is timed, for the first batch
# Offsets as option endingOffsets has them: by topic, broker group with incarnation, and queue.
Ends = Mapping[str, Mapping[str, Mapping[str, int]]]
# Names of options are alike in any letters.
_SOURCE: Final = frozenset(option.name.lower() for option in SOURCE)
_SINK: Final = frozenset(option.name.lower() for option in SINK)
# Of the source: what a replay chooses itself. Which messages it is of say its own options.
_CHOSEN: Final = (
    "startingOffsets",
    "startingTimestamp",
    "startingTimestampStrategy",
    "endingOffsets",
    "endingTimestamp",
    "includeBody",
    "bodyEncoding",
    "dataset",
    "readMode",
    "archivePath",
    "maxRowsPerTrigger",
    "maxBytesPerTrigger",
    "rowsPerPartition",
    "pushdown",
)
CHECKPOINT: Final = "checkpoint"  # of the stream, below the state
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


def plan(spark: SparkSession, settings: ReplaySettings) -> Plan:
    """Look at what would be sent, and send nothing."""
    from pyspark.sql import functions as F  # noqa: N812  # As all of Spark's users write it.

    ends, found = _ends(settings), None
    while found is None:
        stored_ms = F.unix_millis("store_timestamp")
        (found,) = (
            times_of(spark, settings, {"endingOffsets": json.dumps(_as_option(ends))})
            .agg(
                F.count("*").alias("n"),
                F.min(stored_ms).alias("low"),
                F.max(stored_ms).alias("high"),
            )
            .collect()
        )
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


def left_of(settings: ReplaySettings, begun: Plan) -> dict[str, str]:
    """Return the bounds of what is not committed of a replay; of one that has not begun all."""
    bounds = {"endingOffsets": json.dumps(begun.ends)}
    reached = reached_of(settings)
    if reached is not None:
        starts = {**reached.at, **reached.passed}
        bounds["startingOffsets"] = json.dumps(_as_option(starts)) if starts else "earliest"
    return bounds


def times_of(spark: SparkSession, settings: ReplaySettings, bounds: Mapping[str, str]) -> DataFrame:
    """(topic, store_timestamp), one row a message of a replay between two offsets."""
    return read_archived(spark, settings, "topic string, store_timestamp timestamp", bounds)


def read_archived(
    spark: SparkSession, settings: ReplaySettings, columns: str, bounds: Mapping[str, str]
) -> DataFrame:
    """Return columns of the messages of a replay between two offsets."""
    reader = spark.read.format(NAME).schema(columns)
    for name, value in {**of_source(settings), **bounds}.items():
        reader = reader.option(name, value)
    return kept_of(reader.load(), settings)


def _ends(settings: ReplaySettings) -> dict[SourceQueue, int]:
    """Return where the queues end that are archived, or where options say that a read ends."""
    options = parse_source(of_source(settings), is_stream=False)
    places = OffsetResolver(options)
    return places.resolve(options.end, places.whole_view(), word=LATEST)


def _as_option(at: Mapping[SourceQueue, int]) -> Ends:
    ends: dict[str, dict[str, dict[str, int]]] = {}
    for queue, end in sorted(at.items()):
        # Not only the name, which would be of another queue where its topic is made anew.
        broker = f"{queue.broker}#{queue.incarnation}"
        ends.setdefault(queue.topic, {}).setdefault(broker, {})[str(queue.queue_id)] = end
    return ends


def kept_of(messages: DataFrame, settings: ReplaySettings) -> DataFrame:
    """Leave out what is not of the times, and, unless it is named, the topic that is sent to."""
    kept = between(messages, since_ms=settings.since_ms, until_ms=settings.until_ms)
    into = settings.sink.get("topic")
    is_named = "topics" in settings.given or "topic" in settings.given
    return kept if is_named or into is None else kept.where(kept["topic"] != into)


def reached_of(settings: ReplaySettings) -> Offsets | None:
    """Return what is committed of the stream; None: nothing. A batch that is not is left to send.

    The checkpoint is Spark's: `commits` and `offsets` have a file a batch, and the last line of an
    offset is the source's.
    """
    checkpoint = Path(settings.state) / CHECKPOINT
    numbers = [int(path.name) for path in (checkpoint / "commits").glob("[0-9]*")]
    if not numbers:
        return None
    lines = (checkpoint / "offsets" / str(max(numbers))).read_text("utf-8").splitlines()
    return Offsets.from_document(json.loads(lines[-1]))


def of_source(settings: ReplaySettings) -> dict[str, str]:
    """Return the options of the source. Raises BadOption for one that a replay chooses itself."""
    own = {name: value for name, value in settings.more.items() if name.lower() in _SOURCE}
    for name in _CHOSEN:
        if name.lower() in map(str.lower, own):
            raise BadOption(
                f"option {name}: a replay chooses it itself; which messages it is of is said by its"
                " topics, --since, --until and option filter"
            )
    return {**settings.given, **own, "readMode": "archive", "archivePath": settings.archive}


def of_sink(settings: ReplaySettings) -> dict[str, str]:
    """Return the options of the sink."""
    # With what nobody knows: it says so, and what was meant.
    own = {
        name: value
        for name, value in settings.more.items()
        if name.lower() in _SINK or name.lower() not in _SOURCE
    }
    return {**settings.sink, **own}


def begun_of(spark: SparkSession, settings: ReplaySettings, now_ms: Callable[[], int]) -> Plan:
    """Return the plan of a replay: the one that it was begun with, or a new one, which is kept."""
    begun = kept_plan(settings)
    if begun is None:
        made = plan(spark, settings)  # Takes its time, as all is looked at.
        begun = replace(made, begin_ms=now_ms() + LEAD_MS)
        keep_plan(settings, begun)
    return begun


def kept_plan(settings: ReplaySettings) -> Plan | None:
    """Return the plan that a replay was begun with; None of one that was not.

    Raises BadOption where the state is of another one, or none.
    """
    if "://" in settings.state:
        raise BadOption("--state is a folder of this machine")
    path = Path(settings.state) / _PLAN
    if not path.exists():
        return None
    asked = _asked(settings)
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


def keep_plan(settings: ReplaySettings, begun: Plan) -> None:
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
) -> dict[SourceQueue, int]:
    """Return the ends in a plan of an earlier program, which kept the names of queues alone."""
    alike: dict[QueueName, list[SourceQueue]] = {}
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
        "filter": parse_source(of_source(settings), is_stream=False).filter,
        "timing": settings.timing,
        "speed": settings.speed,
        "since_ms": settings.since_ms,
        "until_ms": settings.until_ms,
        "expressions": dict(settings.expressions),
    }
