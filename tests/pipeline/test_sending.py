"""One task of the sink against a cluster in memory, without Spark: what becomes of a bad row."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.support.processes.processes import standalone
from tests.support.worlds.fake_cluster import FakeCluster
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill_pipeline.client import ClusterClient
from tidemill_pipeline.errors import ClusterRejection, NoAnswer
from tidemill_pipeline.options import TopicSelection, parse_sink
from tidemill_pipeline.sink.bad_rows import TaskAttempt
from tidemill_pipeline.sink.messages import RowIds
from tidemill_pipeline.sink.sending import Sender, SendResult
from tidemill_pipeline.sink.writer import rows_of, send_rows

NOW_MS = 1_800_000_000_000
DEAD_LETTERS = {"onError": "dead-letter", "deadLetterPath": "/nowhere"}


def send(cluster: FakeCluster, rows: Iterable[Mapping[str, Any]], **given: str) -> SendResult:
    options = parse_sink({"endpoints": cluster.endpoint, "topic": "orders", **given})
    client = ClusterClient(options.connection)
    try:
        ids = RowIds("write", 0)
        return Sender(client, options, max_retries=2, ids=ids, now_ms=lambda: NOW_MS).send(rows)
    finally:
        client.close()


@pytest.fixture(autouse=True)
def topics(cluster: FakeCluster) -> None:
    cluster.create("orders")


def test_an_error_names_the_row_and_its_columns(cluster: FakeCluster) -> None:
    good: list[dict[str, Any]] = [{"body": b"%d" % i} for i in range(40)]
    bad = {"body": b"refuse me", "keys": ["o-7\n", "x" * 200], "tag": "eu", "message_id": None}
    rows = [*good, bad, *good]
    named = r'^row 40 of partition 0 \(keys \["o-7\\n", "x+\.\.\., tag "eu"\) cannot be sent: '
    with pytest.raises(
        ClusterRejection, match=f"{named}MESSAGE_BODY_TOO_LARGE: too large; onError=dead"
    ):
        send(cluster, rows)
    spoilt = {"body": b"spoil the call", "message_group": "g"}
    with pytest.raises(
        ClusterRejection, match=r'^row 2 of partition 0 \(message_group "g"\) cannot'
    ):
        send(cluster, [*good[:2], spoilt])


def test_a_row_is_numbered_in_its_task(cluster: FakeCluster) -> None:
    """Spark passes the rows of a task in several batches."""
    batches = [pa.record_batch({"body": [b"a", b"b"]}), pa.record_batch({"body": [b"c", None]})]
    options = parse_sink({"endpoints": cluster.endpoint, "topic": "orders"})
    with pytest.raises(ClusterRejection, match=r"^row 3 of partition 5 cannot be sent: it has no"):
        send_rows(options, iter(batches), TaskAttempt("write", 5, 0))


def test_an_unanswered_send_names_its_rows(cluster: FakeCluster) -> None:
    cluster.failing = {"SendMessage": 100}
    rows = [{"body": b"%d" % i} for i in range(3)]
    sentence = r"^a send failed 3 times: .*; rows 0 to 2 of partition 0 may not be stored$"
    with pytest.raises(NoAnswer, match=sentence):
        send(cluster, rows)


def test_a_null_property_and_a_null_key_are_not_dropped(cluster: FakeCluster) -> None:
    rows: list[dict[str, Any]] = [
        {"body": b"a", "properties": [("k", "v"), ("n", None)]},
        {"body": b"b", "keys": ["k", None]},
        {"body": b"c", "properties": None, "keys": None},
        {"body": b"d", "properties": [("k", "")], "keys": []},
    ]
    sent = send(cluster, rows, **DEAD_LETTERS)
    assert [message.body for message in cluster.sent] == [b"c", b"d"]
    assert [number for number, _ in sent.bad] == [0, 1]
    assert sent.bad[0][1].startswith("its property n is null; use map_filter(properties, (name, va")
    assert sent.bad[1][1] == "one of its keys is null; use array_compact(keys)"


def test_an_empty_message_group_does_not_lose_the_order_of_its_rows(cluster: FakeCluster) -> None:
    rows = [{"body": b"%d" % i, "message_group": group} for i, group in enumerate(("", None, "g"))]
    sent = send(cluster, rows, **DEAD_LETTERS)
    # A message without a group and one of a group go in separate sends, whose order is open.
    assert {message.body for message in cluster.sent} == {b"1", b"2"}
    assert sent.bad == [
        (0, "its message_group is empty, which would give up its order; use null for none")
    ]


def test_rows_of_missing_topics_are_bad_rows(cluster: FakeCluster) -> None:
    cluster.create("payments")
    names = ["orders", "oders", "payments", "oders", None]
    rows = [{"body": b"%d" % i, "topic": name} for i, name in enumerate(names)]
    sent = send(cluster, rows, topic="", **DEAD_LETTERS)
    assert sorted(message.topic.name for message in cluster.sent) == ["orders", "payments"]
    missing = (
        "there is no topic oders; did you mean orders? Create it with `tidemill topic create`, or"
        " set createTopics=true"
    )
    assert sent.bad == [(1, missing), (3, missing), (4, "it has no topic")]
    assert cluster.calls.count("GetQueues") == 2, "one for the topics, one for the suggestion"
    sent = send(cluster, rows[:4], topic="", createTopics="true")
    assert sent.rows == 4


def test_a_topic_is_not_missing_while_a_broker_group_is_down(cluster: FakeCluster) -> None:
    cluster.add("elsewhere", "b", 0, 1)
    cluster.brokers["b"].error = "it is away"
    assert send(cluster, [{"body": b"a", "topic": "orders"}], topic="").rows == 1
    with pytest.raises(NoAnswer, match="b: it is away"):
        send(cluster, [{"body": b"a", "topic": "elsewhere"}], topic="", maxRetries="1")


def test_a_row_that_spoils_its_send_goes_alone(cluster: FakeCluster) -> None:
    rows = [{"body": b"%d" % i} for i in range(70)]
    for i in (7, 40, 41):
        rows[i]["body"] = b"spoil the call"
    sent = send(cluster, rows, **DEAD_LETTERS)
    assert sent.rows == 67
    assert sorted(number for number, _ in sent.bad) == [7, 40, 41]
    assert {why for _, why in sent.bad} == {"ILLEGAL_MESSAGE_TAG: a tag has no |"}
    good = [b"%d" % i for i in range(70) if i not in {7, 40, 41}]
    assert sorted(message.body for message in cluster.sent) == sorted(good)
    with pytest.raises(ClusterRejection, match="a tag has no"):
        send(cluster, rows)


def test_a_rejected_row_does_not_affect_others_of_its_call(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"body": b"%d" % i} for i in range(8)]
    rows[3]["tag"] = "|"
    rows[6]["properties"] = {"large": "x" * 40_000}
    with standalone(tmp_path / "data") as broker:
        broker.put("topics/orders", queues=1)
        options = parse_sink({"endpoints": broker.grpc, "topic": "orders", **DEAD_LETTERS})
        client = ClusterClient(options.connection)
        try:
            ids = RowIds("write", 0)
            sender = Sender(client, options, max_retries=2, ids=ids, now_ms=lambda: NOW_MS)
            sent = sender.send(rows)
            (ends,) = client.cluster(TopicSelection(names=("orders",))).queues.values()
        finally:
            client.close()
    assert sent.rows == ends.max_offset == 6
    assert sorted(number for number, _ in sent.bad) == [3, 6]
    assert len({why for _, why in sent.bad}) == 2


@pytest.mark.parametrize(
    "due",
    [
        {"delay_ms": 2**62},
        {"delay_ms": -(2**62)},
        {"due_timestamp": -62_135_596_800_001},
        {"due_timestamp": 253_402_300_800_000},
    ],
)
def test_a_due_time_that_no_message_can_have_is_of_a_bad_row(
    cluster: FakeCluster, due: dict[str, int]
) -> None:
    rows: list[dict[str, Any]] = [{"body": b"a"}, {"body": b"b", **due}, {"body": b"c"}]
    sent = send(cluster, rows, **DEAD_LETTERS)
    assert (sent.rows, sent.bad) == (2, [(1, "its due time is outside the years 1970 to 9999")])


def test_the_last_instant_that_there_is_can_be_sent(cluster: FakeCluster) -> None:
    assert send(cluster, [{"body": b"a", "due_timestamp": 253_402_300_799_999}]).rows == 1


def ids_of(rows: list[bytes], *, write: str = "w", partition: int = 0) -> list[str]:
    ids = RowIds(write, partition)
    return [ids.of(v2.Message(body=body)) for body in rows]


def test_a_string_that_is_none_is_of_a_bad_row_and_a_body_is_bytes(cluster: FakeCluster) -> None:
    """As `cast(value as string)` makes it, which checks nothing."""
    no_text = pa.array([b"\xff", b"fine", b"fine"]).cast(pa.string(), safe=False)
    texts = pa.array(["a", "b", "c"])
    keys = pa.ListArray.from_arrays([0, 1, 2, 3], no_text)
    for name, column in (("tag", no_text), ("keys", keys), ("message_group", no_text)):
        batch = pa.RecordBatch.from_pydict({"body": texts, name: column})
        sent = send(cluster, rows_of(batch), **DEAD_LETTERS)
        assert (sent.rows, sent.bad) == (2, [(0, f"its {name} is not valid UTF-8")])
    cluster.sent.clear()
    batch = pa.RecordBatch.from_pydict({"body": no_text, "tag": texts})
    assert send(cluster, rows_of(batch)).bad == []
    assert [message.body for message in cluster.sent] == [b"\xff", b"fine", b"fine"]


def test_a_row_has_the_same_id_again_and_no_other_row_has_it() -> None:
    rows = [b"a", b"b", b"a"]
    first = ids_of(rows)
    assert first == ids_of(rows)
    assert len(set(first)) == 3
    others = [ids_of(rows, write="v"), ids_of(rows, partition=1), ids_of([b"b", b"a", b"c"])]
    assert set(first).isdisjoint(each for ids in others for each in ids)


def test_rows_that_differ_in_anything_have_other_ids(cluster: FakeCluster) -> None:
    """Rows may come in another order when a task is done again."""
    rows: list[dict[str, Any]] = [
        {},
        {"tag": "a"},
        {"keys": ["a"]},
        {"properties": {"a": "b"}},
        {"message_group": "a"},
        {"delay_ms": 0},
        {"delay_ms": 60_000},
        {"due_timestamp": 9},
    ]
    for row in rows:
        send(cluster, [{"body": b"a", **row}])
    assert len({message.system_properties.message_id for message in cluster.sent}) == len(rows)


def test_bodies_are_packed_once_and_the_same_each_time(cluster: FakeCluster) -> None:
    packed = gzip.compress(b"b", mtime=0)
    rows: list[dict[str, Any]] = [{"body": b"a" * 1_000}, {"body": packed, "body_encoding": "GZIP"}]
    for _ in range(2):
        send(cluster, rows, compression="gzip")
    first, second, *again = cluster.sent
    assert [gzip.decompress(first.body), second.body] == [b"a" * 1_000, packed]
    assert {m.system_properties.body_encoding for m in cluster.sent} == {v2.GZIP}
    assert [m.system_properties.message_id for m in again] == [
        first.system_properties.message_id,
        second.system_properties.message_id,
    ]


def test_a_row_with_an_unsupported_column_is_a_bad_row(cluster: FakeCluster) -> None:
    rows: list[dict[str, Any]] = [{"body": b"a", "dedup_key": "k"}, {"body": b"c"}]
    sent = send(cluster, rows, **DEAD_LETTERS)
    assert sent.rows == 1
    assert [why for _, why in sent.bad] == ["it has a dedup_key, which needs mode=dedup"]


def test_mode_dedup_gives_each_row_a_key_that_a_repeated_task_has_too(cluster: FakeCluster) -> None:
    rows: list[dict[str, Any]] = [
        {"body": b"a", "dedup_key": "given"},
        {"body": b"b"},
        {"body": b"c", "properties": {"dedup-key": "property"}},
        {"body": b"d", "dedup_key": "one", "properties": {"dedup-key": "other"}},
    ]
    for _ in range(2):
        sent = send(cluster, rows, mode="dedup", **DEAD_LETTERS)
        assert [why for _, why in sent.bad] == ["its dedup_key and its property dedup-key differ"]
    keys = [message.user_properties["dedup-key"] for message in cluster.sent]
    ids = [message.system_properties.message_id for message in cluster.sent]
    assert keys == ["given", ids[1], "property"] * 2
    assert ids[:3] == ids[3:]


def test_a_priority_is_sent_with_and_without_a_delay(cluster: FakeCluster) -> None:
    rows: list[dict[str, Any]] = [
        {"body": b"a", "priority": 3},
        {"body": b"b", "priority": 0},
        {"body": b"c", "priority": 3, "delay_ms": 1_000},
        {"body": b"d", "priority": None},
        {"body": b"e", "priority": -1},
        {"body": b"f", "priority": 1, "message_group": "g"},
    ]
    sent = send(cluster, rows, **DEAD_LETTERS)
    ordered = sorted(cluster.sent, key=lambda message: message.body)
    systems = [message.system_properties for message in ordered]
    assert [(one.message_type, one.priority) for one in systems] == [
        (v2.PRIORITY, 3),
        (v2.PRIORITY, 0),
        (v2.DELAY, 3),
        (v2.NORMAL, 0),
    ]
    assert [one.HasField("priority") for one in systems] == [True, True, True, False]
    assert [why for _, why in sent.bad] == [
        "its priority is -1; it must be 0 or higher",
        "it has a priority and a message group; only one of them is allowed",
    ]


def test_a_packed_body_is_sent_with_its_encoding(cluster: FakeCluster) -> None:
    rows = [{"body": b"a", "body_encoding": name} for name in ("GZIP", "gzip", None, "ZSTD")]
    sent = send(cluster, rows, **DEAD_LETTERS)
    assert (sent.rows, sent.bad) == (
        3,
        [(3, "its body_encoding is ZSTD; encodings are IDENTITY and GZIP")],
    )
    encodings = [message.system_properties.body_encoding for message in cluster.sent]
    assert encodings == [v2.GZIP, v2.GZIP, v2.IDENTITY]


@pytest.mark.parametrize(("rate", "most"), [("0.5", 1), ("4", 4), ("1000", 32)])
def test_no_send_is_of_more_than_a_second_s_worth(
    cluster: FakeCluster, rate: str, most: int
) -> None:
    options = parse_sink({"endpoints": cluster.endpoint, "topic": "orders", "maxRatePerTask": rate})
    client, sizes, now_s = ClusterClient(options.connection), [], 0.0

    def sleep_s(for_s: float) -> None:
        nonlocal now_s
        sizes.append(len(cluster.sent))
        now_s += for_s

    try:
        sender = Sender(
            client,
            options,
            max_retries=2,
            ids=RowIds("write", 0),
            now_ms=lambda: NOW_MS,
            sleep_s=sleep_s,
            monotonic_s=lambda: now_s,
        )
        sent = sender.send({"body": b"x"} for _ in range(64))
    finally:
        client.close()
    assert sent.rows == 64
    assert len(sizes) == 64 // most
    assert now_s == pytest.approx(64 / float(rate))
