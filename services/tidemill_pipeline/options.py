"""The options of a read and of a write, parsed into values.

Spark passes options as text with lower-case names. An unknown option fails, with the nearest known
name. `option_table` has all options.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, final

from tidemill.message.resource_names import DEAD_LETTER_TOPIC_PREFIX
from tidemill_pipeline.errors import BadOption
from tidemill_pipeline.option_table import (
    ALTERNATIVES,
    CONNECTION,
    DATASETS,
    OF_SOME,
    READ_MODES,
    SINK,
    SOURCE,
    STREAMED,
    Dataset,
    ReadMode,
)
from tidemill_pipeline.option_values import OptionReader, instant_ms

PARTITION_ROWS_MAX: Final = 10_000_000  # of one task; its files and its memory are bounded by it
PULL_BATCH_MAX: Final = 1_000_000  # messages of one call, which is answered page by page
RETRIES_MAX: Final = 1000  # of one call; with the longest pause it is hours


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """Addresses, retries and credentials. Secrets are file names, which each process reads."""

    endpoints: tuple[str, ...]
    namespace: str = ""
    max_retries: int = 5
    retry_backoff_ms: int = 200
    access_key: str = ""
    secret_key_file: str = ""
    token_file: str = ""
    is_tls: bool = False
    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""

    def as_options(self) -> dict[str, str]:
        """Return the options without the access key, since no part of a credential is stored."""
        every = {
            "endpoints": ",".join(self.endpoints),
            "namespace": self.namespace,
            "auth.secretKeyFile": self.secret_key_file,
            "auth.tokenFile": self.token_file,
            "tls.enabled": "true" if self.is_tls else "",
            "tls.caFile": self.ca_file,
            "tls.certificateFile": self.certificate_file,
            "tls.keyFile": self.key_file,
        }
        return {name: value for name, value in every.items() if value}


EVERY_TOPIC: Final = ".*"  # as a pattern: all topics except internal ones
EVERY_DEAD_LETTER: Final = f"{DEAD_LETTER_TOPIC_PREFIX}.*"
WILDCARD: Final = "*"  # in a name of a topic: any text
_ORDINARY: Final = "(?!%)"  # the begin of a pattern that excludes internal topics


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSelection:
    """Topics of a read: by name and by a regular expression."""

    names: tuple[str, ...] = ()
    pattern: str = ""

    def have(self, topic: str) -> bool:
        """Return whether the selection includes a topic.

        A pattern includes the cluster's internal topics (%...) only if it begins with %.
        """
        if topic in self.names:
            return True
        if topic.startswith("%") and not self.pattern.startswith("%"):
            return False
        return bool(self.pattern) and re.fullmatch(self.pattern, topic) is not None

    @classmethod
    def of(cls, names: Iterable[str]) -> TopicSelection:
        """Return the selection of names, which may have wildcards.

        A wildcard includes internal topics (%...) only if it begins with %.
        """
        given = list(names)
        # A pattern that includes internal topics begins with %.
        wildcards = sorted((name for name in given if WILDCARD in name), key=_is_ordinary)
        return cls(
            names=tuple(name for name in given if WILDCARD not in name),
            pattern="|".join(map(_expression, wildcards)),
        )

    @property
    def is_everything(self) -> bool:
        """Whether the selection includes all topics except internal ones."""
        every = {EVERY_TOPIC, _expression(WILDCARD)}
        return not every.isdisjoint([self.pattern, *self.pattern.split("|")])


def _is_ordinary(wildcard: str) -> bool:
    return not wildcard.startswith("%")


def _expression(wildcard: str) -> str:
    """Return a wildcard as a regular expression."""
    begin = _ORDINARY if wildcard.startswith(WILDCARD) else ""
    return begin + ".*".join(map(re.escape, wildcard.split(WILDCARD)))


EARLIEST: Final = -2  # of a start
LATEST: Final = -1  # of a start or an end

# Offsets by topic, broker group and queue. Other queues use the default of the read.
ByQueue = dict[str, dict[str, dict[int, int]]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBoundary:
    """Start or end of a read in every queue.

    One of: the same `everywhere`, offsets `by_queue`, the progress of a `group`, or an instant.
    """

    everywhere: int | None = None
    by_queue: ByQueue | None = None
    group: str = ""
    at_ms: int | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """The options of a read, parsed."""

    connection: ConnectionOptions
    dataset: Dataset
    topics: TopicSelection
    groups: tuple[str, ...]
    filter: str
    start: ReadBoundary
    end: ReadBoundary
    start_strategy: Literal["error", "latest"]
    reports_as: str  # a consumer group; empty: progress is not published
    rows_per_trigger_max: int | None
    bytes_per_trigger_max: int | None
    rows_per_trigger_min: int | None
    trigger_delay_ms_max: int
    partitions_min: int
    rows_per_partition: int
    fails_on_data_loss: bool
    new_queues: int
    fail_after_ms: int
    includes_body: bool
    decodes_body: bool
    pushes_down: bool
    read_mode: ReadMode
    archive_path: str
    pull_batch: int
    pull_timeout_ms: int
    rate_max: float | None
    quota_group: str  # Empty: no dispatch quota limits the read.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """The options of a write, parsed."""

    connection: ConnectionOptions
    topic: str
    batch_size: int
    inflight_max: int
    send_timeout_ms: int
    rate_max: float | None
    packs_bodies: bool
    creates_topics: bool
    has_dedup_keys: bool  # mode dedup
    dead_letter_path: str  # Empty: a bad row fails the task.


def parse_source(given: Mapping[str, str], *, is_stream: bool | None) -> SourceOptions:
    """Parse the options of a batch read or of a stream; None: either. Raises BadOption."""
    values = OptionReader(given, SOURCE, is_stream=is_stream)
    dataset = _dataset(values, is_stream=is_stream)
    rows_max, bytes_max = values.count("maxRowsPerTrigger"), values.count("maxBytesPerTrigger")
    rows_min = values.count("minRowsPerTrigger")
    if rows_max is not None and bytes_max is not None:
        values.reject("maxBytesPerTrigger", "limit a trigger by rows or by bytes, not by both")
    if dataset == "events" and (rows_max is not None or rows_min is not None):
        values.reject(
            "maxRowsPerTrigger" if rows_max is not None else "minRowsPerTrigger",
            "limit events by bytes of the log: maxBytesPerTrigger",
        )
    if rows_min is not None and rows_max is not None and rows_min > rows_max:
        values.reject("minRowsPerTrigger", f"it exceeds maxRowsPerTrigger = {rows_max}")
    reports_as = values.text("reportProgressAs")
    archive_path = values.text("archivePath")
    read_mode = values.choice("readMode", READ_MODES)
    if read_mode == "archive" and not archive_path:
        values.reject("readMode", "archivePath is required")
    if read_mode == "archive" and reports_as:
        values.reject("reportProgressAs", "readMode=archive does not connect to brokers")
    topics = _topics(values, dataset)
    start = _place(
        values, "startingOffsets", "startingTimestamp", LATEST if is_stream else EARLIEST
    )
    end = _place(values, "endingOffsets", "endingTimestamp", LATEST)
    if dataset == "events" and (start.by_queue is not None or start.group):
        values.reject("startingOffsets", "events start at earliest, latest or a timestamp")
    if dataset == "events" and end.by_queue is not None:
        values.reject("endingOffsets", "events end at latest or a timestamp")
    new_queues = values.choice("newQueues", ("earliest", "latest"))
    return SourceOptions(
        connection=_connection(values, is_needed=read_mode != "archive"),
        dataset=dataset,
        topics=topics,
        groups=values.names("groups"),
        filter=_filter(values),
        start=start,
        end=end,
        start_strategy=values.choice("startingTimestampStrategy", ("error", "latest")),
        reports_as=reports_as,
        rows_per_trigger_max=rows_max,
        bytes_per_trigger_max=bytes_max,
        rows_per_trigger_min=rows_min,
        trigger_delay_ms_max=values.duration_ms("maxTriggerDelay"),
        partitions_min=values.count("minPartitions") or 1,
        rows_per_partition=values.at_most("rowsPerPartition", PARTITION_ROWS_MAX),
        fails_on_data_loss=values.flag("failOnDataLoss"),
        new_queues=EARLIEST if new_queues == "earliest" else LATEST,
        fail_after_ms=values.at_most("failAfterMs", 2**53),
        includes_body=values.flag("includeBody"),
        decodes_body=values.choice("bodyEncoding", ("decode", "raw")) == "decode",
        pushes_down=values.flag("pushdown"),
        read_mode=read_mode,
        archive_path=archive_path,
        pull_batch=values.at_most("pullBatchSize", PULL_BATCH_MAX),
        pull_timeout_ms=values.at_most("pullTimeoutMs", 2**31),
        rate_max=_rate(values),
        quota_group=values.text("quotaGroup"),
    )


def parse_connection(given: Mapping[str, str]) -> ConnectionOptions:
    """Parse the result of `ConnectionOptions.as_options` and an access key. Raises BadOption."""
    return _connection(OptionReader(given, CONNECTION, is_stream=None))


def parse_sink(given: Mapping[str, str]) -> SinkOptions:
    """Parse the options of a write. Raises BadOption."""
    values = OptionReader(given, SINK, is_stream=None)
    mode = values.choice("mode", ("at-least-once", "dedup", "exactly-once"))
    if mode == "exactly-once":
        values.reject("mode", "exactly-once is not supported yet; use dedup or at-least-once")
    if mode == "dedup" and values.flag("createTopics"):
        values.reject("mode", "a topic of createTopics has no deduplication; create it before")
    on_error = values.choice("onError", ("fail", "dead-letter"))
    path = values.text("deadLetterPath")
    if (on_error == "dead-letter") != bool(path):
        values.reject("onError", "dead-letter and deadLetterPath belong together; set both")
    return SinkOptions(
        connection=_connection(values),
        topic=values.text("topic"),
        batch_size=values.at_most("batchSize", 128),
        inflight_max=values.at_most("maxInflight", 64),
        send_timeout_ms=values.at_most("sendTimeoutMs", 600_000),
        rate_max=_rate(values),
        packs_bodies=values.choice("compression", ("none", "gzip")) == "gzip",
        creates_topics=values.flag("createTopics"),
        has_dedup_keys=mode == "dedup",
        dead_letter_path=path,
    )


def _dataset(values: OptionReader, *, is_stream: bool | None) -> Dataset:
    """Return the dataset. Reject a stream or an option that the dataset does not support."""
    dataset = values.choice("dataset", DATASETS)
    if is_stream and dataset not in STREAMED:
        values.reject("dataset", f"{dataset} is read in batches, not as a stream")
    for name, datasets in OF_SOME.items():
        if dataset not in datasets and values.is_given(name):
            known = " and ".join(filter(None, (", ".join(datasets[:-1]), datasets[-1])))
            instead = ALTERNATIVES.get((name, dataset))
            values.reject(
                name, f"it is for {known}, not for {dataset}{f'; {instead}' if instead else ''}"
            )
    return dataset


# Signs of an SQL expression, which tags rarely contain.
_SQL: Final = re.compile(r"[<>=]|\bTAGS\b|\s(is|in|between|like|and|or|not)\s", re.IGNORECASE)


def _connection(values: OptionReader, *, is_needed: bool = True) -> ConnectionOptions:
    endpoints = values.names("endpoints")
    if not endpoints and is_needed:
        values.reject("endpoints", "required: host:port[,host:port]")
    for endpoint in endpoints:
        if not re.fullmatch(r"\S+:\d{1,5}", endpoint):
            values.reject("endpoints", f"{endpoint} is not host:port")
    access_key, secret_file = values.text("auth.accessKey"), values.text("auth.secretKeyFile")
    if bool(access_key) != bool(secret_file):
        values.reject(
            "auth.accessKey", "accessKey and auth.secretKeyFile belong together; set both"
        )
    return ConnectionOptions(
        endpoints=endpoints,
        namespace=values.text("namespace"),
        max_retries=_retries(values),
        retry_backoff_ms=values.at_most("retryBackoffMs", 60_000),
        access_key=access_key,
        secret_key_file=secret_file,
        token_file=values.text("auth.tokenFile"),
        is_tls=values.flag("tls.enabled"),
        ca_file=values.text("tls.caFile"),
        certificate_file=values.text("tls.certificateFile"),
        key_file=values.text("tls.keyFile"),
    )


def _filter(values: OptionReader) -> str:
    """Return the tags of a read as one expression; `*` for all messages."""
    tags = [tag for tag in map(str.strip, values.text("filter").split("||")) if tag]
    if not tags or "*" in tags:
        return "*"
    for tag in tags:
        if "|" in tag:
            values.reject("filter", "separate tags by two bars")
        if _SQL.search(tag):
            values.reject("filter", "SQL is not supported; use tags, as `a || b`")
    return " || ".join(tags)


def _rate(values: OptionReader) -> float | None:
    rate = values.text("maxRatePerTask")
    if rate and not (re.fullmatch(r"\d+(\.\d+)?", rate) and float(rate) > 0):
        values.reject("maxRatePerTask", "use a number of messages per second")
    return float(rate) if rate else None


def _retries(values: OptionReader) -> int:
    # The only number that may be 0.
    return 0 if values.text("maxRetries") == "0" else values.at_most("maxRetries", RETRIES_MAX)


def _topics(values: OptionReader, dataset: Dataset) -> TopicSelection:
    given = [name for name in ("topic", "topics", "topicPattern") if values.text(name)]
    if len(given) > 1:
        values.reject(given[1], f"only one option may choose topics, and {given[0]} is set")
    if dataset == "dlq":
        if given:
            values.reject(given[0], "the option groups chooses dead letters; without it, all")
        groups = values.names("groups")
        if groups:
            return TopicSelection(names=tuple(DEAD_LETTER_TOPIC_PREFIX + group for group in groups))
        return TopicSelection(pattern=EVERY_DEAD_LETTER)
    if not given and dataset == "messages":
        raise BadOption("no topics chosen; set one of topic, topics, topicPattern")
    pattern = values.text("topicPattern")
    try:
        re.compile(pattern)
    except re.error as error:
        values.reject("topicPattern", f"not a regular expression: {error}")
    if pattern:
        return TopicSelection(pattern=pattern)
    return TopicSelection.of(values.names("topic") or values.names("topics"))


def _place(values: OptionReader, offsets: str, timestamp: str, default: int) -> ReadBoundary:
    at = values.text(timestamp)
    if at:
        at_ms = instant_ms(at)
        if at_ms is None:
            values.reject(timestamp, "use an instant of ISO 8601 or milliseconds since 1970")
        return ReadBoundary(at_ms=at_ms)
    text = values.text(offsets)
    is_end = offsets == "endingOffsets"
    if text.startswith("group:") and not is_end:
        return ReadBoundary(group=text.removeprefix("group:"))
    if text.startswith("{"):
        return ReadBoundary(by_queue=_by_queue(values, offsets, text, is_end=is_end))
    words = {"": default, "latest": LATEST} | ({} if is_end else {"earliest": EARLIEST})
    if text.lower() not in words:
        known = [word for word in words if word] + ([] if is_end else ["group:NAME"])
        values.reject(offsets, f"use {', '.join(known)} or JSON")
    return ReadBoundary(everywhere=words[text.lower()])


def _by_queue(values: OptionReader, name: str, text: str, *, is_end: bool) -> ByQueue:
    """Parse `{"orders": {"broker-a": {"0": 23, "1": -2}}}`."""
    least = LATEST if is_end else EARLIEST
    try:
        return {
            topic: {
                broker: {int(queue): _offset(offset, least) for queue, offset in queues.items()}
                for broker, queues in brokers.items()
            }
            for topic, brokers in json.loads(text).items()
        }
    except (ValueError, AttributeError, TypeError) as error:
        why = f": {error}" if isinstance(error, ValueError) else ""
        form = '{"TOPIC": {"BROKER-GROUP": {"QUEUE": OFFSET}}}'
        values.reject(name, f"use offsets by topic, broker group and queue, {form}{why}")


def _offset(value: object, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{value} is not an offset")
    return value
