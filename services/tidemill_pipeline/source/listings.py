"""Datasets `inflight` and `groups`: deliveries in flight and progress; common code of listings.

A listing is a batch read of one moment. One task reads one broker group. It omits topics and groups
that were deleted since the plan, with a warning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from tidemill_pipeline.client import ClusterClient, connect, ordinary_topics
from tidemill_pipeline.cluster_state import ClusterState, OmittedItems
from tidemill_pipeline.errors import BadOption, suggestion
from tidemill_pipeline.options import SourceOptions, TopicSelection
from tidemill_pipeline.pulling import BATCH_BYTES, log
from tidemill_pipeline.rows import in_flight_batch, progress_batch
from tidemill_pipeline.schema import arrow_schema
from tidemill_pipeline.source.topics import check_topics

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

BATCH_ROWS: Final = 4_096  # of an Arrow batch; most rows have no body


class BrokerPart(InputPartition):
    """One task: a broker group with the chosen topics and consumer groups."""

    def __init__(
        self, broker: str, topics: tuple[str, ...] = (), groups: tuple[str, ...] = ()
    ) -> None:
        super().__init__(broker)
        self.broker = broker
        self.topics = topics  # empty: all
        self.groups = groups  # empty: all


class ListingReader(DataSourceReader):
    """A batch read of one of the listings."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self.options = options
        self.schema = arrow_schema(schema)

    def partitions(self) -> Sequence[InputPartition]:
        """Return a task for each broker group with requested items. Raises BadOption.

        A broker group rejects a request for topics and groups that it does not have.
        """
        return self.parts()

    def parts(self) -> list[BrokerPart]:
        """Return the tasks."""
        client = connect(self.options.connection)
        cluster = client.whole_cluster(self.options.topics, with_groups=bool(self.options.groups))
        groups = self._groups_by_broker(cluster)
        if self.options.topics == TopicSelection():
            topics: Mapping[str, tuple[str, ...]] = dict.fromkeys(cluster.logs, ())
        else:
            check_topics(
                self.options,
                {queue.topic for queue in cluster.queues},
                everything=lambda: ordinary_topics(client),
                waits=False,
            )
            topics = topics_by_broker(cluster)
        return [
            BrokerPart(broker, topics[broker], groups.get(broker, ()))
            for broker in sorted(topics)
            if not self.options.groups or broker in groups
        ]

    def _groups_by_broker(self, cluster: ClusterState) -> dict[str, tuple[str, ...]]:
        """Return the requested groups by broker group. Raises BadOption for missing groups.

        A group that its first client created exists only at some broker groups.
        """
        everything = frozenset[str]().union(*cluster.groups.values())
        missing = [group for group in self.options.groups if group not in everything]
        if missing:
            near = suggestion(missing[0], everything)
            raise BadOption(f"there is no consumer group {', '.join(missing)}{near}")
        requested = sorted(set(self.options.groups))
        by_broker = {
            broker: tuple(group for group in requested if group in existing)
            for broker, existing in cluster.groups.items()
        }
        return {broker: groups for broker, groups in by_broker.items() if groups}

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a task."""
        if not isinstance(partition, BrokerPart):
            return
        left = OmittedItems()
        for items in _grouped(self._items(connect(self.options.connection), partition, left)):
            yield from self._batches(items, partition.broker)
        _warn_omitted(partition.broker, left)

    def _items(self, client: ClusterClient, part: BrokerPart, left: OmittedItems) -> Iterator[Any]:
        is_progress = self.options.dataset == "groups"
        ask = client.progress if is_progress else client.in_flight
        items = ask(part.broker, part.groups, left=left)
        return (each for each in items if not part.topics or each.topic in part.topics)

    def _batches(self, items: Sequence[Any], broker: str) -> Iterator[pa.RecordBatch]:
        make = progress_batch if self.options.dataset == "groups" else in_flight_batch
        yield make(items, self.schema, broker)


def topics_by_broker(cluster: ClusterState) -> dict[str, tuple[str, ...]]:
    """Return the requested topics by broker group."""
    topics: dict[str, set[str]] = {}
    for queue in cluster.queues:
        topics.setdefault(queue.broker, set()).add(queue.topic)
    return {broker: tuple(sorted(names)) for broker, names in topics.items()}


def _warn_omitted(broker: str, left: OmittedItems) -> None:
    for name in sorted(left.missing):
        log.warning("%s: %s was deleted since the read began: it is omitted", broker, name)
    if left.damaged_count:
        log.warning(
            "%s: %d delayed messages are omitted: their entries in the timer table are damaged."
            " Restart the broker: it rebuilds the table from its log",
            broker,
            left.damaged_count,
        )


def _grouped(items: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield items in lists of the size of a batch."""
    group: list[Any] = []
    size = 0
    for item in items:
        group.append(item)
        size += item.ByteSize()
        if len(group) >= BATCH_ROWS or size >= BATCH_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
