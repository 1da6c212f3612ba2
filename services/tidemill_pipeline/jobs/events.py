"""Lifecycle events as J2 and J3 read them: all that are there, and since when that is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from tidemill.common.clock import SystemClock
from tidemill_pipeline.client import ClusterClient, connect
from tidemill_pipeline.cluster_state import BrokerLog
from tidemill_pipeline.data_source import NAME
from tidemill_pipeline.errors import BadOption
from tidemill_pipeline.jobs.running import Say, end_line
from tidemill_pipeline.options import TopicSelection, parse_source
from tidemill_pipeline.rows import UNREADABLE
from tidemill_pipeline.source.topics import EVERY_TOPIC, OWN, meant
from tidemill_pipeline.transforms.audit import REMOVED

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

UNREADABLE_SHOWN_MAX: Final = 20  # sentences on the terminal; the table has all


def check_options(given: Mapping[str, str]) -> None:
    """Raise BadOption for what a read of events would refuse, before Spark is started for it."""
    parse_source({**given, "dataset": "events"}, is_stream=False)


def read_events(spark: SparkSession, given: Mapping[str, str]) -> DataFrame:
    """Return all events that are there, kept for the several tables that are made of them.

    What cannot be read is among them, as UNREADABLE, and ends nothing unless that is asked for.
    """
    return _events(spark, given).persist()


def _events(spark: SparkSession, given: Mapping[str, str]) -> DataFrame:
    reader = spark.read.format(NAME)
    for name, value in {"failOnDataLoss": "false", **given, "dataset": "events"}.items():
        reader = reader.option(name, value)
    return reader.load()


def missing_topics(given: Mapping[str, str]) -> str:
    """Return a sentence on topics that are asked for by name, and are nowhere now; "" of none.

    They may have been deleted, and then events tell of them. Raises NoAnswer.
    """
    options = parse_source({**given, "dataset": "events"}, is_stream=False)
    names = [name for name in options.topics.names if not name.startswith(OWN)]
    if not names:
        return ""
    cluster = connect(options.connection).cluster(TopicSelection(pattern=EVERY_TOPIC))
    known = {queue.topic for queue in cluster.queues}
    missing = sorted(set(names) - known)
    # Whoever is away may have them.
    if not missing or cluster.unreachable:
        return ""
    return f"there is no topic {', '.join(missing)}{meant(missing[0], known) or '.'}"


def tell_missing(say: Say, given: Mapping[str, str]) -> str:
    """Tell of topics that are nowhere now before a job reads for them; return that sentence."""
    missing = missing_topics(given)
    if missing:
        say(f"{missing} What events tell of one that was deleted is read")
        end_line()
    return missing


def check_any(events: DataFrame, given: Mapping[str, str], *, missing: str = "") -> None:
    """Raise BadOption where topics were asked for by name, and no event tells of any of them.

    `missing`: what `missing_topics` has said.
    """
    topics = given.get("topics") or given.get("topic")
    if topics and events.where(~events["event"].isin(UNREADABLE, REMOVED)).isEmpty():
        raise BadOption(
            f"no event tells of topic {topics}: {missing or 'nothing ever happened to it'}"
        )


def told_from_ms(given: Mapping[str, str]) -> int:
    """Return from when on events of all broker groups are there; 0: from their first ones on."""
    options = parse_source({**given, "dataset": "events"}, is_stream=False)
    client = connect(options.connection)
    begins_at_ms = options.start.at_ms or 0
    for each in client.whole_cluster(TopicSelection()).logs.values():
        # Retention has taken its beginning.
        if each.log_min:
            begins_at_ms = max(begins_at_ms, _first_event_ms(client, each))
    return begins_at_ms


def removed_at_ms(spark: SparkSession, events: DataFrame, given: Mapping[str, str]) -> int:
    """Return when the last broker group was removed; 0: as far as the logs tell, none ever was.

    What was sent to it before its log told of. Where retention has taken the record of that from
    the home's log, that log begins later.
    """
    from pyspark.sql import functions as F  # noqa: N812  # As all of Spark's users write it.

    if given.get("endingTimestamp"):
        # It may have been removed later than that.
        events = _events(spark, {**given, "endingTimestamp": ""})
    (found,) = (
        events.where(F.col("event") == REMOVED)
        .agg(F.max(F.unix_millis("event_ts")).alias("at_ms"))
        .collect()
    )
    return int(found.at_ms or 0)


def _first_event_ms(client: ClusterClient, of: BrokerLog) -> int:
    pages = client.events(of.broker, start=of.log_min, until=of.log_end, log_id=of.log_id)
    # Where there is none, nothing is told of any time before now.
    return next((event.at_ms for page in pages for event in page.events), SystemClock().wall_ms())


def unreadable_in(events: DataFrame) -> list[str]:
    """Return the first sentences on what of the logs cannot be read."""
    parts = events.where(events["event"] == UNREADABLE).select("broker", "log_position", "detail")
    rows = parts.orderBy("broker", "log_position").limit(UNREADABLE_SHOWN_MAX).collect()
    return [row.detail for row in rows]
