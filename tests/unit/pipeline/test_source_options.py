"""The options of the source: every wrong one fails with a sentence that helps."""

from __future__ import annotations

import pytest

from tidemill_pipeline.errors import BadOption
from tidemill_pipeline.option_table import spelt
from tidemill_pipeline.options import EARLIEST, LATEST, ReadBoundary, parse_sink, parse_source

GIVEN = {"endpoints": "a:1,b:2", "topic": "orders"}


def test_defaults_of_a_batch_and_of_a_stream() -> None:
    batch = parse_source(GIVEN, is_stream=False)
    stream = parse_source(GIVEN, is_stream=True)
    assert batch.connection.endpoints == ("a:1", "b:2")
    assert batch.topics.names == ("orders",)
    assert (batch.start, batch.end) == (
        ReadBoundary(everywhere=EARLIEST),
        ReadBoundary(everywhere=LATEST),
    )
    assert stream.start == ReadBoundary(everywhere=LATEST)
    assert batch.fails_on_data_loss
    assert batch.pull_batch == 16_384


@pytest.mark.parametrize(
    ("more", "is_stream", "sentence"),
    [
        ({"maxRowPerTrigger": "4"}, True, "did you mean maxRowsPerTrigger?"),
        ({"startingoffset": "latest"}, False, "did you mean startingOffsets?"),
        ({"maxRowsPerTrigger": "4"}, False, "is for streams only"),
        ({"endingTimestamp": "1790000000123"}, True, "is for batch reads only"),
        (
            {"dataset": "events", "endingOffsets": '{"orders": {"b": {"0": 2}}}'},
            True,
            "events end at latest or a timestamp",
        ),
        ({"maxRowsPerTrigger": "none"}, True, "a number of at least 1"),
        ({"maxRowsPerTrigger": "4", "maxBytesPerTrigger": "4"}, True, "not by both"),
        ({"topics": "a,b"}, False, "only one option may choose topics"),
        ({"dataset": "message"}, False, "did you mean messages?"),
        ({"dataset": "pending"}, True, "not as a stream"),
        ({"startingOffsets": "first"}, False, "latest, earliest, group:NAME or JSON"),
        ({"endingOffsets": "earliest"}, False, "use latest or JSON"),
        ({"endingOffsets": '{"orders": {"b": {"0": -2}}}'}, False, "-2 is not an offset"),
        ({"startingOffsets": '{"orders": 3}'}, False, "by topic, broker group and queue"),
        ({"startingTimestamp": "yesterday"}, False, "ISO 8601"),
        ({"readMode": "archive"}, False, "archivePath is required"),
        ({"auth.accessKey": "k"}, False, "belong together"),
        ({"endpoints": "nowhere"}, False, "nowhere is not host:port"),
        ({"failOnDataLoss": "maybe"}, False, "true or false"),
        ({"maxTriggerDelay": "soon"}, True, "a duration such as"),
        ({"topic": "", "topicPattern": "("}, False, "not a regular expression"),
        ({"filter": "a > 5"}, False, "SQL is not supported"),
        ({"filter": "TAGS is not null"}, True, "SQL is not supported"),
        ({"filter": "a | b"}, False, "two bars"),
        ({"maxRatePerTask": "fast"}, False, "a number of messages per second"),
        ({"maxRatePerTask": "0"}, True, "a number of messages per second"),
        (
            {"dataset": "events", "maxRatePerTask": "5"},
            True,
            "for messages and dlq, not for events",
        ),
        ({"groups": "g"}, False, "not for messages; dataset dlq has the dead letters of groups"),
        (
            {"dataset": "pending", "startingOffsets": "latest"},
            False,
            "for messages, events and dlq, not for pending; use startingTimestamp",
        ),
        (
            {"dataset": "groups", "failOnDataLoss": "false"},
            False,
            "not for groups; topics and groups deleted during a read",
        ),
    ],
)
def test_impossible_options_are_rejected(
    more: dict[str, str], is_stream: bool, sentence: str
) -> None:
    with pytest.raises(BadOption) as refused:
        parse_source({**GIVEN, **more}, is_stream=is_stream)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("name", "of_a_read", "of_a_write"),
    [
        (
            "failOnDataLos",
            "there is no option failOnDataLos; did you mean failOnDataLoss?",
            "there is no option failOnDataLos; did you mean failOnDataLoss, which is for reads?",
        ),
        (
            "batchSiz",
            "there is no option batchSiz; did you mean batchSize, which is for writes?",
            "there is no option batchSiz; did you mean batchSize?",
        ),
        ("batchsize", "option batchSize is for writes only", None),
        ("pullbatchsize", None, "option pullBatchSize is for reads only"),
        ("tls.enable", "did you mean tls.enabled?", "did you mean tls.enabled?"),
        ("x", "there is no option x; known are endpoints,", "no option x; known are endpoints,"),
    ],
)
def test_an_unknown_option_fails_with_the_nearest_one_of_reads_and_writes(
    name: str, of_a_read: str | None, of_a_write: str | None
) -> None:
    """A replay takes options of both, and what neither knows is told as of a write."""
    given = {**GIVEN, name: "1"}
    for sentence, parse in (
        (of_a_read, lambda: parse_source(given, is_stream=False)),
        (of_a_write, lambda: parse_sink(given)),
    ):
        if sentence is None:
            parse()
            continue
        with pytest.raises(BadOption) as refused:
            parse()
        assert sentence in str(refused.value)


# Of each dataset the options that mean something, of those that do not mean it everywhere.
MEANT = {
    "messages": {
        "filter",
        "startingOffsets",
        "endingOffsets",
        "startingTimestamp",
        "endingTimestamp",
        "startingTimestampStrategy",
        "minPartitions",
        "rowsPerPartition",
        "failOnDataLoss",
        "includeBody",
        "bodyEncoding",
        "pushdown",
        "readMode",
        "archivePath",
        "pullBatchSize",
        "maxRatePerTask",
        "quotaGroup",
        "pullTimeoutMs",
    },
    "events": {
        "startingOffsets",
        "endingOffsets",
        "startingTimestamp",
        "endingTimestamp",
        "failOnDataLoss",
    },
    "pending": {"startingTimestamp", "endingTimestamp", "includeBody", "bodyEncoding", "pushdown"},
    "inflight": {"groups"},
    "groups": {"groups"},
}
GIVEN_AS = {
    "groups": "g",
    "filter": "*",
    "startingOffsets": "latest",
    "endingOffsets": "latest",
    "startingTimestamp": "1",
    "endingTimestamp": "2",
    "startingTimestampStrategy": "latest",
    "minPartitions": "2",
    "rowsPerPartition": "5",
    "failOnDataLoss": "true",
    "includeBody": "true",
    "bodyEncoding": "raw",
    "pushdown": "false",
    "readMode": "auto",
    "archivePath": "/a",
    "pullBatchSize": "7",
    "maxRatePerTask": "5",
    "quotaGroup": "g",
    "pullTimeoutMs": "9",
}


@pytest.mark.parametrize("name", sorted(GIVEN_AS))
@pytest.mark.parametrize("dataset", sorted(MEANT))
def test_an_option_that_a_dataset_has_no_use_for_is_refused(dataset: str, name: str) -> None:
    given = {**GIVEN, "dataset": dataset, name: GIVEN_AS[name]}
    if name in MEANT[dataset]:
        parse_source(given, is_stream=False)
        return
    with pytest.raises(BadOption, match=rf"^option {name} = .*: it is for .*, not for {dataset}"):
        parse_source(given, is_stream=False)


def test_offsets_by_queue_and_instants() -> None:
    options = parse_source(
        {**GIVEN, "STARTINGOFFSETS": '{"orders": {"broker-a": {"0": 23, "1": -2}}}'},
        is_stream=False,
    )
    assert options.start.by_queue == {"orders": {"broker-a": {0: 23, 1: -2}}}
    of_time = parse_source(
        {**GIVEN, "startingTimestamp": "2026-11-22T00:00:00Z", "endingTimestamp": "1790000000123"},
        is_stream=False,
    )
    assert of_time.start.at_ms == 1_795_305_600_000
    assert of_time.end.at_ms == 1_790_000_000_123


@pytest.mark.parametrize(
    ("given", "tags"),
    [
        ("a||b ", "a || b"),
        ("a||", "a"),
        ("||", "*"),
        ("a || *", "*"),
        ("", "*"),
        ("new or", "new or"),
    ],
)
def test_tags_are_the_same_by_every_road(given: str, tags: str) -> None:
    assert parse_source({**GIVEN, "filter": given}, is_stream=False).filter == tags


def test_an_archive_is_read_without_a_cluster() -> None:
    given = {"topic": "orders", "readMode": "archive", "archivePath": "/a"}
    assert parse_source(given, is_stream=False).connection.endpoints == ()


def test_dead_letters_are_chosen_by_group() -> None:
    some = parse_source({"endpoints": "a:1", "dataset": "dlq", "groups": "g, h"}, is_stream=True)
    assert some.topics.names == ("%DLQ%g", "%DLQ%h")
    every = parse_source({"endpoints": "a:1", "dataset": "dlq"}, is_stream=True)
    assert every.topics.pattern == "%DLQ%.*"


def test_a_sink_rejects_unsupported_options() -> None:
    with pytest.raises(BadOption, match="not supported yet"):
        parse_sink({"endpoints": "a:1", "mode": "exactly-once"})
    with pytest.raises(BadOption, match="belong together"):
        parse_sink({"endpoints": "a:1", "onError": "dead-letter"})


def test_names_are_spelt_as_jobs_look_for_them() -> None:
    assert [spelt(name) for name in ("TOPICPATTERN", "endingtimestamp", "BatchSize")] == [
        "topicPattern",
        "endingTimestamp",
        "batchSize",
    ]
    assert spelt("nosuch") == "nosuch"
