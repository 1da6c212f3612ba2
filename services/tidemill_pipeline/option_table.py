"""The options of the source and of the sink: name, default and meaning of each.

The reference page for users is generated from these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, final

Dataset = Literal["messages", "events", "dlq", "pending", "inflight", "groups"]
DATASETS: Final[tuple[Dataset, ...]] = (
    "messages",
    "events",
    "dlq",
    "pending",
    "inflight",
    "groups",
)
ReadMode = Literal["auto", "archive", "broker"]
READ_MODES: Final[tuple[ReadMode, ...]] = ("auto", "archive", "broker")
STREAMED: Final[tuple[Dataset, ...]] = ("messages", "events", "dlq")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option: its documented name, its default as text, and the reads that it applies to."""

    name: str
    default: str
    meaning: str
    batch: bool = True
    stream: bool = True


def _batch(name: str, default: str, meaning: str) -> Option:
    return Option(name=name, default=default, meaning=meaning, stream=False)


def _stream(name: str, default: str, meaning: str) -> Option:
    return Option(name=name, default=default, meaning=meaning, batch=False)


def _both(name: str, default: str, meaning: str) -> Option:
    return Option(name=name, default=default, meaning=meaning)


CONNECTION: Final = (
    _both(
        "endpoints",
        "",
        "Addresses of proxies, `host:port[,host:port]`. Required, except for `readMode=archive`.",
    ),
    _both("namespace", "", "Namespace of the topics and groups."),
    _both("maxRetries", "5", "Retries of a call that failed or that found a broker unreachable."),
    _both("retryBackoffMs", "200", "Pause before the first retry. It doubles, up to 5 s."),
    _both("auth.accessKey", "", "Access key of the caller."),
    _both("auth.secretKeyFile", "", "File with the secret key. The key itself is never stored."),
    _both("auth.tokenFile", "", "File with a session token."),
    _both("tls.enabled", "false", "Use TLS for connections to proxies."),
    _both("tls.caFile", "", "Trusted authorities, PEM. Default: those that gRPC trusts."),
    _both("tls.certificateFile", "", "Client certificate, PEM."),
    _both("tls.keyFile", "", "Private key of the client certificate, PEM."),
)

SOURCE: Final = (
    *CONNECTION,
    _both("topic", "", "One topic. A read of an unknown topic fails at its start."),
    _both(
        "topics",
        "",
        "Several topics, separated by commas. A `*` in a name is any text: `%DLQ%*` are all dead"
        " letters, `*` all other topics.",
    ),
    _both("topicPattern", "", "Topics whose whole name matches. Each trigger matches again."),
    _both("dataset", "messages", "`messages`, `events`, `dlq`, `pending`, `inflight`, `groups`."),
    _both(
        "groups",
        "",
        "Consumer groups, separated by commas. Default: all. For `inflight` and `groups` each must"
        " exist.",
    ),
    _both("filter", "*", "Tags, as `a || b`. SQL is not supported."),
    _both(
        "startingOffsets",
        "",
        "`earliest`, `latest`, `group:NAME`, or JSON by topic, broker group and queue. In JSON, -2"
        " is the earliest offset and -1 the latest. Default: `earliest` for a batch, `latest` for a"
        " stream. An offset after the end of its queue is an error.",
    ),
    _both(
        "endingOffsets",
        "latest",
        "As `startingOffsets`, but without -2 and groups. With JSON, a batch reads queues that the"
        " JSON omits to their end. A stream does not read these queues. It reads the others up to"
        " their offset, waits for offsets that do not exist yet, and does not stop.",
    ),
    _both(
        "startingTimestamp",
        "",
        "Earliest store time, for `pending` earliest due time: ISO 8601 (UTC without a zone) or ms."
        " Replaces `startingOffsets`.",
    ),
    _stream(
        "reportProgressAs",
        "",
        "Consumer group that shows the query's progress as its pull offsets, for"
        " `tidemill group show`.",
    ),
    _batch("endingTimestamp", "", "End of the time range, exclusive. As `startingTimestamp`."),
    _both(
        "startingTimestampStrategy",
        "error",
        "If no queue has a message of `startingTimestamp` or later: `error`, or `latest` to start"
        " at the end.",
    ),
    _stream(
        "maxRowsPerTrigger", "", "Rows per trigger, shared by queues in proportion to backlog."
    ),
    _stream("maxBytesPerTrigger", "", "Bytes per trigger, by the average size of messages."),
    _stream(
        "minRowsPerTrigger", "", "Rows that a batch waits for. Has no effect with `availableNow`."
    ),
    _stream("maxTriggerDelay", "15m", "Longest time that a batch waits for `minRowsPerTrigger`."),
    _both("minPartitions", "", "Approximate number of tasks into which large ranges are split."),
    _both("rowsPerPartition", "500000", "Rows that one task reads at most."),
    _both("failOnDataLoss", "true", "Fail the query if a range or a queue is lost."),
    _stream("newQueues", "earliest", "Start of queues that appear later: `earliest` or `latest`."),
    _stream("failAfterMs", "600000", "Fail after a broker group is unreachable for this long, ms."),
    _both(
        "includeBody",
        "true",
        "Read bodies. With `false`, `body_crc32` is omitted too, and for `pending` all columns of"
        " the message.",
    ),
    _both(
        "bodyEncoding",
        "decode",
        "`decode`: unpack gzip bodies, up to 256 MiB each. A larger body and one that is not valid"
        " gzip stay as stored. `raw`: bodies as stored.",
    ),
    _batch(
        "pushdown",
        "false",
        "Pass predicates to the source. Each `.load()` then serves one action with one predicate."
        " A frame that is used twice or has a view may lack rows; see pipeline-spark.md.",
    ),
    _both(
        "readMode",
        "auto",
        "`auto`, `archive` or `broker`. Without archivePath, `auto` is `broker`.",
    ),
    _both("archivePath", "", "Path or URL of the archive."),
    _both("pullBatchSize", "16384", "Messages per call. The reply comes in pages of 128 KiB."),
    _both("maxRatePerTask", "", "Messages per second that a task reads from brokers, evenly."),
    _both(
        "quotaGroup",
        "",
        "Consumer group whose dispatch quotas limit the reads from brokers. It must exist, and the"
        " caller needs Sub on it. Over a limit, the read waits.",
    ),
    _both("pullTimeoutMs", "30000", "Timeout of one call, ms. The next call continues the read."),
)

SINK: Final = (
    *CONNECTION,
    _both("topic", "", "Topic of all rows. Default: the column `topic`."),
    _both(
        "createTopics",
        "false",
        "`true`: send to missing topics, too. The first message creates a topic, if the cluster"
        " creates topics on first use. `false`: a missing topic is an error.",
    ),
    _both(
        "mode",
        "at-least-once",
        "`at-least-once`, or `dedup`: each message has a dedup key, and its topic must have"
        " deduplication by the property `dedup-key`. The key is the column `dedup_key`, else the id"
        " of the message. `exactly-once` is not supported yet.",
    ),
    _both("batchSize", "32", "Messages per send."),
    _both("maxInflight", "4", "Sends in flight per task."),
    _both("sendTimeoutMs", "3000", "Timeout of one send, ms."),
    _both("maxRatePerTask", "", "Messages per second and task."),
    _both("compression", "none", "`none`, or `gzip` to pack bodies. Readers unpack them."),
    _both("onError", "fail", "`fail`, or `dead-letter` to write bad rows to deadLetterPath."),
    _both(
        "deadLetterPath",
        "",
        "Folder of the table of bad rows, Parquet: all columns, row number, reason.",
    ),
)


SPELLINGS: Final = {option.name.lower(): option.name for option in (*SINK, *SOURCE)}


def spelt(name: str) -> str:
    """Return an option's documented spelling. Users may write it in any case."""
    return SPELLINGS.get(name.lower(), name)


# Options that only some datasets use, with these datasets.
_STORED: Final[tuple[Dataset, ...]] = ("messages", "dlq")
_WITH_BODIES: Final[tuple[Dataset, ...]] = (*_STORED, "pending")
OF_SOME: Final[Mapping[str, tuple[Dataset, ...]]] = {
    "groups": ("dlq", "inflight", "groups"),
    **dict.fromkeys(
        (
            "filter",
            "startingTimestampStrategy",
            "reportProgressAs",
            "minPartitions",
            "rowsPerPartition",
            "newQueues",
            "readMode",
            "archivePath",
            "pullBatchSize",
            "maxRatePerTask",
            "quotaGroup",
            "pullTimeoutMs",
        ),
        _STORED,
    ),
    **dict.fromkeys(("startingOffsets", "endingOffsets", "failOnDataLoss"), STREAMED),
    **dict.fromkeys(("startingTimestamp", "endingTimestamp"), (*STREAMED, "pending")),
    **dict.fromkeys(("includeBody", "bodyEncoding", "pushdown"), _WITH_BODIES),
}
# Advice for an option that a dataset does not use.
ALTERNATIVES: Final[Mapping[tuple[str, Dataset], str]] = {
    ("groups", "messages"): "dataset dlq has the dead letters of groups",
    ("startingOffsets", "pending"): "use startingTimestamp for the due time",
    ("endingOffsets", "pending"): "use endingTimestamp for the due time",
    ("startingTimestampStrategy", "events"): "a read starts at the first event of that time",
    **{
        ("failOnDataLoss", each): "topics and groups deleted during a read only cause a warning"
        for each in ("pending", "inflight", "groups")
    },
}
