"""How far groups are, by the word of their broker groups: what an audit goes by (ADR 0055)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from tidemill.common.clock import SystemClock
from tidemill_pipeline.client import ClusterClient, connect
from tidemill_pipeline.errors import ClusterRejection, NoAnswer
from tidemill_pipeline.jobs.sends import asks_for_topics
from tidemill_pipeline.offsets import Incarnation
from tidemill_pipeline.options import TopicSelection, parse_source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb

# All topics; those of dead letters, which are the cluster's own, have to be meant.
_WHOLE: Final = (TopicSelection(pattern=".*"), TopicSelection(pattern="%DLQ%.*"))
# The columns of `owed.PROGRESS`.
_PROGRESS: Final = pa.schema(
    [
        ("broker", pa.string()),
        ("topic", pa.string()),
        ("topic_id", pa.int64()),
        ("queue_id", pa.int32()),
        ("consumer_group", pa.string()),
        ("is_retry", pa.bool_()),
        ("pop_offset", pa.int64()),
        ("commit_offset", pa.int64()),
        ("in_flight_count", pa.int64()),
        ("told_at", pa.timestamp("us", tz="UTC")),
    ]
)

_Found = tuple[str, "pb.Progress"]  # broker group, and what it said of a queue


def read_progress(spark: SparkSession, given: Mapping[str, str]) -> DataFrame | None:
    """Return how far groups are as `owed.PROGRESS`; None where that says nothing of the events.

    To be called before events are read, which then tell all that groups have passed by now. Of a
    broker group that gives no answer there is nothing.
    """
    options = parse_source({**given, "dataset": "events"}, is_stream=False)
    if options.end.at_ms is not None:
        return None
    client = connect(options.connection)
    topics = (options.topics,) if asks_for_topics(given) else _WHOLE
    told_at = datetime.fromtimestamp(SystemClock().wall_ms() / 1000, UTC)
    before = _incarnations(client, topics)
    found = list(_asked(client, sorted({broker for broker, _ in before})))
    after = _incarnations(client, topics)
    # A topic that was made again meanwhile: nobody knows which one was meant.
    same = {key: id_ for key, id_ in before.items() if after.get(key) == id_}
    rows = [
        {
            "broker": broker,
            "topic": one.topic,
            "topic_id": same[broker, one.topic].topic_id,
            "queue_id": one.queue_id,
            "consumer_group": one.consumer_group,
            "is_retry": one.is_retry,
            "pop_offset": one.pop_offset,
            "commit_offset": one.commit_offset,
            "in_flight_count": one.in_flight_count,
            "told_at": told_at,
        }
        for broker, one in found
        # Who pulls pops nothing.
        if (broker, one.topic) in same and one.pop_offset >= 0
    ]
    return spark.createDataFrame(pa.Table.from_pylist(rows, _PROGRESS))


def _incarnations(
    client: ClusterClient, topics: tuple[TopicSelection, ...]
) -> dict[tuple[str, str], Incarnation]:
    """Return which topic each broker group has under a name."""
    return {
        (queue.broker, queue.topic): queue.incarnation
        for each in topics
        for queue in client.cluster(each).queues
    }


def _asked(client: ClusterClient, brokers: list[str]) -> Iterator[_Found]:
    for broker in brokers:
        try:
            found = client.progress(broker, ())
        except (ClusterRejection, NoAnswer):
            continue  # It went away since, or tells only others.
        for one in found:
            yield broker, one
