"""Reads of lifecycle events for J2 and J3, and the begin of their complete time range."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from tidemill.common.clock import SystemClock
from tidemill_pipeline.client import ClusterClient, connect
from tidemill_pipeline.cluster_state import BrokerLog
from tidemill_pipeline.data_source import NAME
from tidemill_pipeline.errors import BadOption, suggestion
from tidemill_pipeline.jobs.running import Say, end_line
from tidemill_pipeline.options import EVERY_TOPIC, TopicSelection, parse_source
from tidemill_pipeline.rows import UNREADABLE
from tidemill_pipeline.source.topics import OWN
from tidemill_pipeline.transforms.audit import REMOVED

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

UNREADABLE_SHOWN_MAX: Final = 20  # sentences on the terminal; the table contains all


def check_options(given: Mapping[str, str]) -> None:
    """Raise BadOption for options that a read of events rejects, before Spark starts."""
    parse_source({**given, "dataset": "events"}, is_stream=False)


def read_events(spark: SparkSession, given: Mapping[str, str]) -> DataFrame:
    """Return all events, cached because several tables use them.

    Unreadable parts are rows of kind UNREADABLE, unless the options make the read fail.
    """
    return _events(spark, given).persist()


def _events(spark: SparkSession, given: Mapping[str, str]) -> DataFrame:
    reader = spark.read.format(NAME)
    for name, value in {"failOnDataLoss": "false", **given, "dataset": "events"}.items():
        reader = reader.option(name, value)
    return reader.load()


def missing_topics(given: Mapping[str, str]) -> str:
    """Return a sentence on named topics that do not exist; "" if all exist. Raises NoAnswer.

    The events may still contain a deleted topic.
    """
    options = parse_source({**given, "dataset": "events"}, is_stream=False)
    names = [name for name in options.topics.names if not name.startswith(OWN)]
    if not names:
        return ""
    cluster = connect(options.connection).cluster(TopicSelection(pattern=EVERY_TOPIC))
    known = {queue.topic for queue in cluster.queues}
    missing = sorted(set(names) - known)
    # An unreachable broker group may have them.
    if not missing or cluster.unreachable:
        return ""
    return f"there is no topic {', '.join(missing)}{suggestion(missing[0], known) or '.'}"


def report_missing(say: Say, given: Mapping[str, str]) -> str:
    """Report named topics that do not exist before a job reads; return that sentence."""
    missing = missing_topics(given)
    if missing:
        say(f"{missing} Events of a deleted topic are read")
        end_line()
    return missing


def check_any(events: DataFrame, given: Mapping[str, str], *, missing: str = "") -> None:
    """Raise BadOption if topics were named and the events contain none of them.

    `missing`: the result of `missing_topics`.
    """
    topics = given.get("topics") or given.get("topic")
    if topics and events.where(~events["event"].isin(UNREADABLE, REMOVED)).isEmpty():
        raise BadOption(
            f"no events of topic {topics}: {missing or 'no message was ever sent to it'}"
        )


def complete_from_ms(given: Mapping[str, str]) -> int:
    """Return when the events of all broker groups begin to be complete; 0: always complete."""
    options = parse_source({**given, "dataset": "events"}, is_stream=False)
    client = connect(options.connection)
    begins_at_ms = options.start.at_ms or 0
    for each in client.whole_cluster(TopicSelection()).logs.values():
        # Retention has deleted its beginning.
        if each.log_min:
            begins_at_ms = max(begins_at_ms, _first_event_ms(client, each))
    return begins_at_ms


def removed_at_ms(spark: SparkSession, events: DataFrame, given: Mapping[str, str]) -> int:
    """Return when the last broker group was removed; 0 if the logs record no removal.

    Sends before that time may have been recorded in the removed log. If retention has deleted the
    record of the removal, the log of the home begins later than the removal.
    """
    from pyspark.sql import functions as F  # noqa: N812  # The usual name among users of Spark.

    if given.get("endingTimestamp"):
        # The removal may be later than that.
        events = _events(spark, {**given, "endingTimestamp": ""})
    (found,) = (
        events.where(F.col("event") == REMOVED)
        .agg(F.max(F.unix_millis("event_ts")).alias("at_ms"))
        .collect()
    )
    return int(found.at_ms or 0)


def _first_event_ms(client: ClusterClient, of: BrokerLog) -> int:
    pages = client.events(of.broker, start=of.log_min, until=of.log_end, log_id=of.log_id)
    # Without any event the log records nothing before now.
    return next((event.at_ms for page in pages for event in page.events), SystemClock().wall_ms())


def unreadable_in(events: DataFrame) -> list[str]:
    """Return sentences on the first unreadable parts of logs."""
    parts = events.where(events["event"] == UNREADABLE).select("broker", "log_position", "detail")
    rows = parts.orderBy("broker", "log_position").limit(UNREADABLE_SHOWN_MAX).collect()
    return [row.detail for row in rows]
