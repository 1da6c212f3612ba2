"""The options of the source and of the sink: one row each, and what they are parsed into.

Spark hands options as text with names in lower case. Unknown ones fail, with the nearest name that
is known to a read or a write. The page for users is generated from these tables.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, NoReturn, TypeVar, final

from tidemill_pipeline.errors import BadOption

_Choice = TypeVar("_Choice", bound=str)

PARTITION_ROWS_MAX: Final = 10_000_000  # of one task; its files and its memory are bounded by it
PULL_BATCH_MAX: Final = 1_000_000  # messages of one call, which is answered page by page
RETRIES_MAX: Final = 1000  # of one call; with the longest pause it is hours
_EPOCH: Final = datetime.fromtimestamp(0, UTC)

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
    """One option: its name as documented, its default as text, and where it means something."""

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
        "Addresses of proxies, `host:port[,host:port]`; required, but for `readMode=archive`.",
    ),
    _both("namespace", "", "Namespace of the topics and groups."),
    _both(
        "maxRetries", "5", "How often a call is made again that failed, or where a broker is away."
    ),
    _both("retryBackoffMs", "200", "Pause before the first time; it doubles, up to 5 s."),
    _both("auth.accessKey", "", "Access key of who calls."),
    _both("auth.secretKeyFile", "", "File with the secret key; its text is never kept."),
    _both("auth.tokenFile", "", "File with a session token."),
    _both("tls.enabled", "false", "Whether proxies are spoken to by TLS."),
    _both("tls.caFile", "", "Authorities, PEM; without it those that gRPC trusts."),
    _both("tls.certificateFile", "", "What is shown to the proxy, PEM."),
    _both("tls.keyFile", "", "Private key of that certificate, PEM."),
)

SOURCE: Final = (
    *CONNECTION,
    _both("topic", "", "One topic; one that is nowhere is refused when a read begins."),
    _both("topics", "", "Several topics, by commas."),
    _both("topicPattern", "", "Topics whose whole name matches; looked at again at every trigger."),
    _both("dataset", "messages", "`messages`, `events`, `dlq`, `pending`, `inflight`, `groups`."),
    _both(
        "groups",
        "",
        "Consumer groups, by commas; without it all. Of `inflight` and `groups` they have to be"
        " there.",
    ),
    _both("filter", "*", "Tags, as `a || b`; no SQL."),
    _both(
        "startingOffsets",
        "",
        "`earliest`, `latest`, `group:NAME`, or JSON by topic, broker group and queue; there -2 is"
        " the earliest and -1 the latest. Batch: `earliest`, stream: `latest`. An offset behind the"
        " end of its queue is refused.",
    ),
    _both(
        "endingOffsets",
        "latest",
        "As above, without -2 and without groups. With JSON a batch reads queues that are not in it"
        " to their end; a stream nothing of them, of the others nothing behind the offset, which"
        " may be one that is not there yet, and it waits on.",
    ),
    _both(
        "startingTimestamp",
        "",
        "ISO 8601, without a zone UTC, or ms: when messages were stored, and of `pending` when they"
        " are due; wins over offsets.",
    ),
    _stream(
        "reportProgressAs",
        "",
        "Consumer group as whose pull offsets the query's progress is published, for"
        " `tidemill group progress`.",
    ),
    _batch("endingTimestamp", "", "As above; what was stored, or is due, then or later is not."),
    _both(
        "startingTimestampStrategy",
        "error",
        "What is done where no queue has a message of `startingTimestamp` or later: `error`, or"
        " `latest`, from the end.",
    ),
    _stream("maxRowsPerTrigger", "", "Shared by queues in proportion to their backlog."),
    _stream("maxBytesPerTrigger", "", "The same, by what the queues' messages take on average."),
    _stream(
        "minRowsPerTrigger",
        "",
        "A batch waits until there are so many rows; not with `availableNow`.",
    ),
    _stream("maxTriggerDelay", "15m", "How long a batch waits for `minRowsPerTrigger` at most."),
    _both("minPartitions", "", "Large ranges are split so that about so many tasks run."),
    _both("rowsPerPartition", "500000", "The most that one task reads."),
    _both("failOnDataLoss", "true", "Whether a range, or a queue, that is gone fails the query."),
    _stream("newQueues", "earliest", "Where queues that are found later start."),
    _stream("failAfterMs", "600000", "How long a broker group may be away until the query fails."),
    _both(
        "includeBody",
        "true",
        "Whether bodies are asked for; `body_crc32` goes with them, and of `pending` all that is"
        " made of the message.",
    ),
    _both(
        "bodyEncoding",
        "decode",
        "`decode`: bodies as they were before they were packed, up to 256 MiB of one; a larger one,"
        " and one that is not gzip to its end, is as it is stored. `raw`: as stored.",
    ),
    _batch(
        "pushdown",
        "false",
        "Whether predicates are handed to the source. Then each `.load()` is for one look with one"
        " predicate: a frame that is used twice, or has a view, may lack rows; see pipeline.md.",
    ),
    _both(
        "readMode", "auto", "`auto`, `archive` or `broker`; `auto` without archivePath is `broker`."
    ),
    _both("archivePath", "", "Where the archive is."),
    _both("pullBatchSize", "16384", "Messages of one call; its answer comes in pages of 128 KiB."),
    _both("maxRatePerTask", "", "Messages a second that a task reads from brokers, evenly."),
    _both("pullTimeoutMs", "30000", "How long one call may take; then it goes on where it was."),
)

SINK: Final = (
    *CONNECTION,
    _both("topic", "", "Where all rows go; without it the column `topic` says it."),
    _both("mode", "at-least-once", "`at-least-once`; the others are not there yet."),
    _both("batchSize", "32", "Messages of one send."),
    _both("maxInflight", "4", "Sends of one task that have no answer yet."),
    _both("sendTimeoutMs", "3000", "How long one send may take."),
    _both("maxRatePerTask", "", "Messages a second of one task."),
    _both("compression", "none", "`none`, or `gzip`: bodies are packed; readers unpack them."),
    _both("onError", "fail", "`fail`, or `dead-letter`: bad rows go to deadLetterPath."),
    _both("deadLetterPath", "", "Folder of the table of bad rows, Parquet: all columns, row, why."),
)


_SPELT: Final = {option.name.lower(): option.name for option in (*SINK, *SOURCE)}


def spelt(name: str) -> str:
    """Return an option's name as it is spelt here: letters are alike to who gives it."""
    return _SPELT.get(name.lower(), name)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """How proxies are reached. Credentials are names of files, read where a connection is made."""

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
        """Return it as options, but for who asks: no part of a credential is written anywhere."""
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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSelection:
    """Which topics are read: some by name, or all that match."""

    names: tuple[str, ...] = ()
    pattern: str = ""

    def have(self, topic: str) -> bool:
        """Say whether a topic is one of them.

        The cluster's own topics, which begin with %, are meant by expressions that begin so, too.
        """
        if topic in self.names:
            return True
        if topic.startswith("%") and not self.pattern.startswith("%"):
            return False
        return bool(self.pattern) and re.fullmatch(self.pattern, topic) is not None


EARLIEST: Final = -2  # in a start
LATEST: Final = -1  # in a start or an end

# Offsets by topic, broker group and queue; what is not in it takes the other word.
ByQueue = dict[str, dict[str, dict[int, int]]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBoundary:
    """Where a read starts or ends in every queue.

    One of: the same `everywhere`, offsets `by_queue`, the progress of a `group`, or an instant.
    """

    everywhere: int | None = None
    by_queue: ByQueue | None = None
    group: str = ""
    at_ms: int | None = None


# Of options that not all datasets have a use for: which have.
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
            "pullTimeoutMs",
        ),
        _STORED,
    ),
    **dict.fromkeys(("startingOffsets", "endingOffsets", "failOnDataLoss"), STREAMED),
    **dict.fromkeys(("startingTimestamp", "endingTimestamp"), (*STREAMED, "pending")),
    **dict.fromkeys(("includeBody", "bodyEncoding", "pushdown"), _WITH_BODIES),
}
# And what else to say than that a dataset has no use for an option.
_INSTEAD: Final[Mapping[tuple[str, Dataset], str]] = {
    ("groups", "messages"): "dataset dlq has the dead letters of groups",
    ("startingOffsets", "pending"): "startingTimestamp says when messages are due",
    ("endingOffsets", "pending"): "endingTimestamp says when messages are due",
    ("startingTimestampStrategy", "events"): "they start with the first one that is that young",
    **{
        ("failOnDataLoss", each): "what is deleted meanwhile is left out with a warning"
        for each in ("pending", "inflight", "groups")
    },
}


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
    reports_as: str  # a consumer group; empty: nothing is published
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
    dead_letter_path: str  # empty: a bad row fails the task


def parse_source(given: Mapping[str, str], *, is_stream: bool | None) -> SourceOptions:
    """Parse the options of a batch read or of a stream; None: of either. Raises BadOption."""
    values = _OptionReader(given, SOURCE, is_stream=is_stream)
    dataset = values.choice("dataset", DATASETS)
    if is_stream and dataset not in STREAMED:
        values.refuse("dataset", f"{dataset} is read in batches, not as a stream")
    for name, datasets in OF_SOME.items():
        if dataset not in datasets and values.is_given(name):
            known = " and ".join(filter(None, (", ".join(datasets[:-1]), datasets[-1])))
            instead = _INSTEAD.get((name, dataset))
            values.refuse(
                name, f"it is of {known}, not of {dataset}{f'; {instead}' if instead else ''}"
            )
    rows_max, bytes_max = values.count("maxRowsPerTrigger"), values.count("maxBytesPerTrigger")
    rows_min = values.count("minRowsPerTrigger")
    if rows_max is not None and bytes_max is not None:
        values.refuse("maxBytesPerTrigger", "a trigger is bounded by rows or by bytes, not by both")
    if dataset == "events" and (rows_max is not None or rows_min is not None):
        values.refuse(
            "maxRowsPerTrigger" if rows_max is not None else "minRowsPerTrigger",
            "events are bounded by bytes of the log: maxBytesPerTrigger",
        )
    if rows_min is not None and rows_max is not None and rows_min > rows_max:
        values.refuse("minRowsPerTrigger", f"it is above maxRowsPerTrigger, {rows_max}")
    reports_as = values.text("reportProgressAs")
    archive_path = values.text("archivePath")
    read_mode = values.choice("readMode", READ_MODES)
    if read_mode == "archive" and not archive_path:
        values.refuse("readMode", "archivePath says where the archive is")
    if read_mode == "archive" and reports_as:
        values.refuse("reportProgressAs", "no broker is asked with readMode=archive")
    topics = _topics(values, dataset)
    start = _place(
        values, "startingOffsets", "startingTimestamp", LATEST if is_stream else EARLIEST
    )
    end = _place(values, "endingOffsets", "endingTimestamp", LATEST)
    if dataset == "events" and (start.by_queue is not None or start.group):
        values.refuse("startingOffsets", "events start at `earliest`, `latest` or a timestamp")
    if dataset == "events" and end.by_queue is not None:
        values.refuse("endingOffsets", "events end at `latest` or a timestamp")
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
    )


def parse_connection(given: Mapping[str, str]) -> ConnectionOptions:
    """Parse what `ConnectionOptions.as_options` made, and who asks beside it. Raises BadOption."""
    return _connection(_OptionReader(given, CONNECTION, is_stream=None))


def parse_sink(given: Mapping[str, str]) -> SinkOptions:
    """Parse the options of a write. Raises BadOption."""
    values = _OptionReader(given, SINK, is_stream=None)
    mode = values.choice("mode", ("at-least-once", "dedup", "exactly-once"))
    if mode != "at-least-once":
        values.refuse("mode", f"{mode} is not there yet")
    on_error = values.choice("onError", ("fail", "dead-letter"))
    path = values.text("deadLetterPath")
    if (on_error == "dead-letter") != bool(path):
        values.refuse("onError", "dead-letter and deadLetterPath belong together")
    return SinkOptions(
        connection=_connection(values),
        topic=values.text("topic"),
        batch_size=values.at_most("batchSize", 128),
        inflight_max=values.at_most("maxInflight", 64),
        send_timeout_ms=values.at_most("sendTimeoutMs", 600_000),
        rate_max=_rate(values),
        packs_bodies=values.choice("compression", ("none", "gzip")) == "gzip",
        dead_letter_path=path,
    )


def instant_ms(text: str) -> int | None:
    """Return an instant of ISO 8601 or milliseconds; None where it is neither.

    One within a millisecond is the next one: what is told to the millisecond is before it, or not.
    """
    if re.fullmatch(r"\d{1,15}", text):
        return int(text)
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        return None
    # An instant without its zone is one of UTC, as everything in a pipeline is.
    aware = instant if instant.tzinfo is not None else instant.replace(tzinfo=UTC)
    return -((_EPOCH - aware) // timedelta(milliseconds=1))


class _OptionReader:
    """The options as they came, and how each is read."""

    def __init__(
        self, given: Mapping[str, str], table: Sequence[Option], *, is_stream: bool | None
    ) -> None:
        self._table = {option.name.lower(): option for option in table}
        self._given = {name.lower(): value for name, value in given.items()}
        for name in sorted(given):
            option = self._table.get(name.lower())
            if option is None:
                raise BadOption(self._unknown(name))
            if is_stream is not None and not (option.stream if is_stream else option.batch):
                kind = "batch reads" if is_stream else "streams"
                raise BadOption(f"option {option.name} is for {kind} only")

    def _unknown(self, name: str) -> str:
        """Return a sentence on an option that is not of this table; it may be meant for the other.

        A replay takes those of both, and hands the sink what neither knows.
        """
        if name.lower() in _SPELT:
            return f"option {spelt(name)} is for {self._others()} only"
        near = difflib.get_close_matches(name.lower(), [*self._table, *_SPELT], n=1, cutoff=0.5)
        if not near:
            known = ", ".join(option.name for option in self._table.values())
            return f"there is no option {name}; known are {known}"
        whose = "" if near[0] in self._table else f", which is for {self._others()}"
        return f"there is no option {name}; did you mean {spelt(near[0])}{whose}?"

    def _others(self) -> str:
        return "writes" if "dataset" in self._table else "reads"

    def refuse(self, name: str, why: str) -> NoReturn:
        value = self._given.get(name.lower())
        raise BadOption(f"option {name}{'' if value is None else f' = {value}'}: {why}")

    def text(self, name: str) -> str:
        key = name.lower()
        return self._given.get(key, self._table[key].default).strip()

    def is_given(self, name: str) -> bool:
        return bool(self._given.get(name.lower(), "").strip())

    def names(self, name: str) -> tuple[str, ...]:
        return tuple(part for part in map(str.strip, self.text(name).split(",")) if part)

    def flag(self, name: str) -> bool:
        text = self.text(name).lower()
        if text not in {"true", "false"}:
            self.refuse(name, "it is true or false")
        return text == "true"

    def choice(self, name: str, choices: Sequence[_Choice]) -> _Choice:
        text = self.text(name).lower()
        for each in choices:
            if each == text:
                return each
        near = difflib.get_close_matches(text, choices, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it is one of {', '.join(choices)}"
        return self.refuse(name, hint)

    def count(self, name: str) -> int | None:
        """Return a number from 1; None where it was not given."""
        text = self.text(name)
        if not text:
            return None
        if not re.fullmatch(r"\d{1,18}", text) or int(text) < 1:
            self.refuse(name, "it is a number from 1")
        return int(text)

    def at_most(self, name: str, most: int) -> int:
        value = self.count(name)
        assert value is not None, f"{name} has a default"
        if value > most:
            self.refuse(name, f"it is at most {most}")
        return value

    def duration_ms(self, name: str) -> int:
        found = re.fullmatch(r"(\d{1,9})\s*(ms|s|m|h)", self.text(name).lower())
        if found is None:
            self.refuse(name, "it is a duration such as 500ms, 30s, 15m or 1h")
        return int(found[1]) * _UNIT_MS[found[2]]


# What an expression has and a tag hardly does.
_SQL: Final = re.compile(r"[<>=]|\bTAGS\b|\s(is|in|between|like|and|or|not)\s", re.IGNORECASE)
_UNIT_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}


def _connection(values: _OptionReader, *, is_needed: bool = True) -> ConnectionOptions:
    endpoints = values.names("endpoints")
    if not endpoints and is_needed:
        values.refuse("endpoints", "it is required: host:port[,host:port]")
    for endpoint in endpoints:
        if not re.fullmatch(r"\S+:\d{1,5}", endpoint):
            values.refuse("endpoints", f"{endpoint} is not host:port")
    access_key, secret_file = values.text("auth.accessKey"), values.text("auth.secretKeyFile")
    if bool(access_key) != bool(secret_file):
        values.refuse("auth.accessKey", "it and auth.secretKeyFile belong together")
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


def _filter(values: _OptionReader) -> str:
    """Return the tags that are asked for; none, and a star among them, are all."""
    tags = [tag for tag in map(str.strip, values.text("filter").split("||")) if tag]
    if not tags or "*" in tags:
        return "*"
    for tag in tags:
        if "|" in tag:
            values.refuse("filter", "tags are separated by two bars")
        if _SQL.search(tag):
            values.refuse("filter", "SQL is not served; it is tags, as `a || b`")
    return " || ".join(tags)


def _rate(values: _OptionReader) -> float | None:
    rate = values.text("maxRatePerTask")
    if rate and not (re.fullmatch(r"\d+(\.\d+)?", rate) and float(rate) > 0):
        values.refuse("maxRatePerTask", "it is a number of messages a second")
    return float(rate) if rate else None


def _retries(values: _OptionReader) -> int:
    # The one number that may be 0.
    return 0 if values.text("maxRetries") == "0" else values.at_most("maxRetries", RETRIES_MAX)


def _topics(values: _OptionReader, dataset: Dataset) -> TopicSelection:
    given = [name for name in ("topic", "topics", "topicPattern") if values.text(name)]
    if len(given) > 1:
        values.refuse(given[1], f"topics are chosen by one option, and {given[0]} is there")
    if dataset == "dlq":
        if given:
            values.refuse(given[0], "dead letters are chosen by option groups, or all are read")
        groups = values.names("groups")
        if groups:
            return TopicSelection(names=tuple(f"%DLQ%{group}" for group in groups))
        return TopicSelection(pattern="%DLQ%.*")
    if not given and dataset == "messages":
        raise BadOption("which topics? give one of topic, topics, topicPattern")
    pattern = values.text("topicPattern")
    try:
        re.compile(pattern)
    except re.error as error:
        values.refuse("topicPattern", f"it is no regular expression: {error}")
    return TopicSelection(names=values.names("topic") or values.names("topics"), pattern=pattern)


def _place(values: _OptionReader, offsets: str, timestamp: str, default: int) -> ReadBoundary:
    at = values.text(timestamp)
    if at:
        at_ms = instant_ms(at)
        if at_ms is None:
            values.refuse(timestamp, "it is an instant of ISO 8601, or milliseconds since 1970")
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
        values.refuse(offsets, f"it is {', '.join(known)} or JSON")
    return ReadBoundary(everywhere=words[text.lower()])


def _by_queue(values: _OptionReader, name: str, text: str, *, is_end: bool) -> ByQueue:
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
        values.refuse(name, f"it is not offsets by topic, broker group and queue, {form}{why}")


def _offset(value: object, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{value} is no offset")
    return value
