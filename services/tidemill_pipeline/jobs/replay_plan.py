"""The plan of a replay, which a resumed run reads again.

The plan is `plan.json` next to the checkpoint of the stream. The checkpoint has the progress.
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

LEAD_MS: Final = 10_000  # from now to the first timed message: time for the first batch
# Offsets in the format of option endingOffsets: topic, broker group with incarnation, queue.
Ends = Mapping[str, Mapping[str, Mapping[str, int]]]
# Option names are not case-sensitive.
_SOURCE: Final = frozenset(option.name.lower() for option in SOURCE)
_SINK: Final = frozenset(option.name.lower() for option in SINK)
# Source options that a replay sets itself.
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
CHECKPOINT: Final = "checkpoint"  # the stream's folder below the state folder
_PLAN: Final = "plan.json"  # next to the checkpoint


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """Options of a replay."""

    archive: str
    given: Mapping[str, str]  # options of the source, with its topics
    sink: Mapping[str, str]  # options of the sink
    more: Mapping[str, str] = field(default_factory=dict)  # options of the source or the sink
    state: str  # folder of plan and checkpoint; another folder starts another replay
    timing: Literal["asap", "original", "scaled"] = "asap"
    speed: float = 1.0
    since_ms: int | None = None
    until_ms: int | None = None
    expressions: Expressions = field(default_factory=dict)  # SQL by column
    master: str | None = None
    metrics_port: int = 0
    metrics_file: str = ""
    cluster: str = ""  # metrics label


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """Messages that a replay sends."""

    rows: int
    first_stored_ms: int
    last_stored_ms: int
    # The ends of the archive. Messages that are archived during a replay are excluded: they may be
    # the replay's own.
    ends: Ends
    begin_ms: int = 0


def plan(spark: SparkSession, settings: ReplaySettings) -> ReplayPlan:
    """Return a new plan, without sending."""
    from pyspark.sql import functions as F  # noqa: N812  # The usual name among users of Spark.

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
            ends, found = now, None  # A new queue appeared; count again.
    if not found.n:
        raise BadOption(
            f"nothing to replay: {settings.archive} has no message of these topics and times"
        )
    return ReplayPlan(
        rows=found.n, first_stored_ms=found.low, last_stored_ms=found.high, ends=_as_option(ends)
    )


def remaining_bounds(settings: ReplaySettings, begun: ReplayPlan) -> dict[str, str]:
    """Return read options for the messages of a replay that are not committed."""
    bounds = {"endingOffsets": json.dumps(begun.ends)}
    reached = committed_offsets(settings)
    if reached is not None:
        starts = {**reached.at, **reached.passed}
        bounds["startingOffsets"] = json.dumps(_as_option(starts)) if starts else "earliest"
    return bounds


def times_of(spark: SparkSession, settings: ReplaySettings, bounds: Mapping[str, str]) -> DataFrame:
    """Return (topic, store_timestamp), one row per message of a replay within the bounds."""
    return read_archived(spark, settings, "topic string, store_timestamp timestamp", bounds)


def read_archived(
    spark: SparkSession, settings: ReplaySettings, columns: str, bounds: Mapping[str, str]
) -> DataFrame:
    """Return columns of the messages of a replay within the bounds."""
    reader = spark.read.format(NAME).schema(columns)
    for name, value in {**source_options(settings), **bounds}.items():
        reader = reader.option(name, value)
    return selected_messages(reader.load(), settings)


def _ends(settings: ReplaySettings) -> dict[SourceQueue, int]:
    """Return the ends of the archived queues, or the ends that the options set."""
    options = parse_source(source_options(settings), is_stream=False)
    places = OffsetResolver(options)
    return places.resolve(options.end, places.whole_view(), word=LATEST)


def _as_option(at: Mapping[SourceQueue, int]) -> Ends:
    ends: dict[str, dict[str, dict[str, int]]] = {}
    for queue, end in sorted(at.items()):
        # With the incarnation: a topic that is created again has other queues of the same name.
        broker = f"{queue.broker}#{queue.incarnation}"
        ends.setdefault(queue.topic, {}).setdefault(broker, {})[str(queue.queue_id)] = end
    return ends


def selected_messages(messages: DataFrame, settings: ReplaySettings) -> DataFrame:
    """Keep messages of the time range; drop the target topic unless topics are named."""
    selected = between(messages, since_ms=settings.since_ms, until_ms=settings.until_ms)
    into = settings.sink.get("topic")
    is_named = "topics" in settings.given or "topic" in settings.given
    return selected if is_named or into is None else selected.where(selected["topic"] != into)


def committed_offsets(settings: ReplaySettings) -> Offsets | None:
    """Return the committed offsets of the stream; None before the first commit.

    Spark's checkpoint has one file per batch in `commits` and in `offsets`. The last line of an
    offset file belongs to the source.
    """
    checkpoint = Path(settings.state) / CHECKPOINT
    numbers = [int(path.name) for path in (checkpoint / "commits").glob("[0-9]*")]
    if not numbers:
        return None
    lines = (checkpoint / "offsets" / str(max(numbers))).read_text("utf-8").splitlines()
    return Offsets.from_document(json.loads(lines[-1]))


def source_options(settings: ReplaySettings) -> dict[str, str]:
    """Return the options of the source. Raises BadOption for one that a replay sets itself."""
    own = {name: value for name, value in settings.more.items() if name.lower() in _SOURCE}
    for name in _CHOSEN:
        if name.lower() in map(str.lower, own):
            raise BadOption(
                f"option {name}: a replay sets this option itself; select messages with topics,"
                " --since, --until and option filter"
            )
    return {**settings.given, **own, "readMode": "archive", "archivePath": settings.archive}


def sink_options(settings: ReplaySettings) -> dict[str, str]:
    """Return the options of the sink."""
    # With unknown options: the sink rejects them and suggests similar names.
    own = {
        name: value
        for name, value in settings.more.items()
        if name.lower() in _SINK or name.lower() not in _SOURCE
    }
    return {**settings.sink, **own}


def load_or_create_plan(
    spark: SparkSession, settings: ReplaySettings, now_ms: Callable[[], int]
) -> ReplayPlan:
    """Return the stored plan of a replay, or store and return a new one."""
    begun = load_plan(settings)
    if begun is None:
        made = plan(spark, settings)  # Slow: it reads all messages.
        begun = replace(made, begin_ms=now_ms() + LEAD_MS)
        store_plan(settings, begun)
    return begun


def load_plan(settings: ReplaySettings) -> ReplayPlan | None:
    """Return the stored plan of a replay; None before its first run.

    Raises BadOption if the plan is damaged or belongs to another replay.
    """
    if "://" in settings.state:
        raise BadOption(f"--state {settings.state}: it must be a local folder")
    path = Path(settings.state) / _PLAN
    if not path.exists():
        return None
    asked = _asked(settings)
    try:
        stored: dict[str, Any] = json.loads(path.read_text())
        # Plans of earlier versions have no filter and no expressions.
        asked_then = {"filter": asked["filter"], "expressions": {}, **stored["asked"]}
        ends = stored["plan"]["ends"]
        begun = ReplayPlan(**stored["plan"])
    except (ValueError, KeyError, TypeError) as error:
        raise BadOption(
            f"{path} is damaged, so the remaining messages are unknown. Give another --state;"
            f" messages that were already sent are then sent again with the same {ORIGINAL_ID}"
        ) from error
    if asked_then != asked:
        raise BadOption(
            f"{settings.state} belongs to another replay; give the options of that replay, or"
            " another --state"
        )
    if isinstance(ends, list):
        return replace(begun, ends=_as_option(_ends_of_names(settings, ends)))
    return begun


def store_plan(settings: ReplaySettings, begun: ReplayPlan) -> None:
    """Store the plan for resumed runs."""
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
    """Return the ends in a plan of an earlier version, which has queue names only."""
    alike: dict[QueueName, list[SourceQueue]] = {}
    for queue in _ends(settings):
        alike.setdefault(queue.name, []).append(queue)
    found = {}
    for topic, broker, queue_id, end in ends:
        name = QueueName(topic, broker, queue_id)
        own = alike.get(name, [])
        if len(own) != 1:
            raise BadOption(
                f"{settings.state} was written by an earlier version, and the archive has"
                f" {len(own)} queues with the name {name}, so the remaining messages are unknown."
                " Give another --state; messages that were already sent are then sent again with"
                f" the same {ORIGINAL_ID}"
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
        "filter": parse_source(source_options(settings), is_stream=False).filter,
        "timing": settings.timing,
        "speed": settings.speed,
        "since_ms": settings.since_ms,
        "until_ms": settings.until_ms,
        "expressions": dict(settings.expressions),
    }
