"""Packed bodies: how many of them come at once, by every road."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest
from pyspark.sql.datasource import DataSourceReader
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from tests.support.worlds.archiving import ArchiveWorld
from tests.support.worlds.fake_cluster import FakeCluster
from tidemill.message.encoding import encode_stored
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill_pipeline import bodies
from tidemill_pipeline.data_source import RocketMQDataSource

COLUMNS = StructType([StructField("message_id", StringType()), StructField("body", BinaryType())])
BODY_BYTES = 100_000
COUNT = 10


@pytest.fixture
def filled(
    cluster: FakeCluster, archive: ArchiveWorld, monkeypatch: pytest.MonkeyPatch
) -> FakeCluster:
    """Ten messages of 100 KB that take 100 bytes each, stored, archived, and waiting."""
    monkeypatch.setattr(bodies, "PART_BYTES", 250_000)
    for n in range(COUNT):
        message = v2.Message(
            topic=v2.Resource(name="orders"), body=gzip.compress(bytes(BODY_BYTES))
        )
        message.system_properties.message_id = f"m{n}"
        message.system_properties.body_encoding = v2.GZIP
        cluster.put(message, "a")
        cluster.brokers["a"].pending.append(
            pb.Pending(
                topic="orders",
                timer_id=n,
                message_id=f"m{n}",
                message=encode_stored(message, message_type=v2.DELAY, now_ms=0),
            )
        )
    archive.append()
    return cluster


def batches(reader: DataSourceReader) -> Iterator[pa.RecordBatch]:
    for part in reader.partitions():
        for batch in reader.read(part):
            assert isinstance(batch, pa.RecordBatch)
            yield batch


By = Callable[[FakeCluster, ArchiveWorld], dict[str, str]]


@pytest.mark.parametrize(
    "by",
    [
        lambda cluster, _: {"endpoints": cluster.endpoint},
        lambda cluster, _: {"endpoints": cluster.endpoint, "dataset": "pending"},
        lambda _, archive: {"archivePath": archive.path, "readMode": "archive"},
    ],
    ids=["messages", "pending", "archive"],
)
def test_a_batch_is_limited_by_its_unpacked_bytes(
    filled: FakeCluster, archive: ArchiveWorld, by: By
) -> None:
    source = RocketMQDataSource({"topic": "orders", **by(filled, archive)})
    found = list(batches(source.reader(COLUMNS)))
    assert [batch.num_rows for batch in found] == [3, 3, 3, 1]
    rows = [row for batch in found for row in batch.to_pylist()]
    assert [row["message_id"] for row in rows] == [f"m{n}" for n in range(COUNT)]
    assert all(row["body"] == bytes(BODY_BYTES) for row in rows)
    # As they are stored they have room in one.
    raw = RocketMQDataSource({"topic": "orders", "bodyEncoding": "raw", **by(filled, archive)})
    assert [batch.num_rows for batch in batches(raw.reader(COLUMNS))] == [COUNT]
