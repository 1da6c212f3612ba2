"""Progress of consumer groups, as broker groups report it to an audit (ADR 0055)."""

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
from tidemill_pipeline.options import EVERY_DEAD_LETTER, EVERY_TOPIC, TopicSelection, parse_source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb

# All topics; dead-letter topics are internal and must be named.
_WHOLE: Final = (TopicSelection(pattern=EVERY_TOPIC), TopicSelection(pattern=EVERY_DEAD_LETTER))
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

_QueueProgress = tuple[str, "pb.Progress"]  # broker group, and its report on one queue


def read_progress(spark: SparkSession, given: Mapping[str, str]) -> DataFrame | None:
    """Return the progress of groups as `owed.PROGRESS`; None if it does not match the events.

    Call it before reading events: the events then contain every delivery before this progress. A
    broker group that does not answer is missing.
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
    # If a topic was created again meanwhile, its incarnation is unknown.
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
        # A pull consumer never pops.
        if (broker, one.topic) in same and one.pop_offset >= 0
    ]
    return spark.createDataFrame(pa.Table.from_pylist(rows, _PROGRESS))


def _incarnations(
    client: ClusterClient, topics: tuple[TopicSelection, ...]
) -> dict[tuple[str, str], Incarnation]:
    """Return the incarnation of each topic by broker group and name."""
    return {
        (queue.broker, queue.topic): queue.incarnation
        for each in topics
        for queue in client.cluster(each).queues
    }


def _asked(client: ClusterClient, brokers: list[str]) -> Iterator[_QueueProgress]:
    for broker in brokers:
        try:
            found = client.progress(broker, ())
        except (ClusterRejection, NoAnswer):
            continue  # It is unreachable now, or rejects this caller.
        for one in found:
            yield broker, one
