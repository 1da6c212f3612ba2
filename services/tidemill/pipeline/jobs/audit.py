"""J2: lifecycle events against each other and against a list of acknowledged sends.

Writes `audit/summary` and `audit/findings` (Parquet), `audit/index.html`, and a table to the
terminal. It reads all events that are there and writes its tables anew, so it can run twice.
"""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from tidemill.common.clock import SystemClock
from tidemill.pipeline.client import BrokerLog, Client, connect
from tidemill.pipeline.data_source import NAME
from tidemill.pipeline.errors import BadOption
from tidemill.pipeline.jobs.group_progress import read_progress
from tidemill.pipeline.jobs.inputs import logs_before, note_events
from tidemill.pipeline.jobs.page import curve, page, table
from tidemill.pipeline.jobs.running import progress_line, recorded, session
from tidemill.pipeline.jobs.sends import asks_for_topics, check_sends, of_topics, read_sends
from tidemill.pipeline.metrics import PipelineMetrics
from tidemill.pipeline.options import Topics, parse_source
from tidemill.pipeline.rows import UNREADABLE
from tidemill.pipeline.transforms import audit as transforms
from tidemill.pipeline.transforms.audit import BROKEN, COUNTS, KINDS, NEVER_MS, REMOVED, Rules

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FOLDER: Final = "audit"
SHOWN_MAX: Final = 500  # findings on the page; the table has all
UNREADABLE_SHOWN_MAX: Final = 20  # sentences on the terminal; the table has all
GRACE_S: Final = 600.0  # after it was due or stored until nothing of it is expected any more
CURVE_POINTS: Final = 500  # of a curve: what a screen can show


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSettings:
    """What an audit takes."""

    to: str
    given: Mapping[str, str]  # options of the source
    master: str | None = None
    sends: str = ""  # file of acknowledged sends: JSON lines with message_id, topic and at_ms
    grace_s: float = GRACE_S
    late_ms: int = 1_000
    window: str = "5 minutes"
    filtered_groups: Sequence[str] = ()
    metrics_file: str = ""
    cluster: str = ""  # label of the metrics


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What an audit has come to."""

    counts: dict[str, int]  # findings by kind
    totals: list[dict[str, Any]]  # one a topic and group
    findings: list[dict[str, Any]]  # the first of them
    unreadable: list[str]  # the first sentences on what could not be read

    @property
    def is_broken(self) -> bool:
        """Say whether something was lost or early, or came in spite of its recall."""
        return any(self.counts.get(kind) for kind in BROKEN)

    @property
    def is_incomplete(self) -> bool:
        """Say whether a part of what happened could not be read, and nobody knows what it was."""
        return bool(self.counts.get(UNREADABLE))

    @property
    def outstanding(self) -> str:
        """Say how much is not through, of which nobody knows more yet; "" where all is."""
        waiting, in_flight, overdue = (
            sum(row[name] for row in self.totals) for name in ("waiting", "in_flight", "overdue")
        )
        parts = []
        if waiting:
            parts.append(f"{waiting:,} wait to be delivered")
        if in_flight:
            parts.append(f"{in_flight:,} are in flight")
        if overdue:
            parts.append(f"{overdue:,} of these longer than their invisible duration")
        return ", ".join(parts)

    def by_topic(self) -> dict[tuple[str, str], int]:
        """Return the findings by topic and kind, of all groups together."""
        found: Counter[tuple[str, str]] = Counter()
        for row in self.totals:
            for kind in KINDS:
                found[row["topic"] or "", kind] += row[kind.replace("-", "_")]
        return dict(found)


def run(settings: AuditSettings) -> Verdict:
    """Read, reconcile, write, and return the verdict."""
    if "://" in settings.to:
        raise BadOption("--to is a folder of this machine: the page is written beside the tables")
    check_window(settings.window)
    if settings.sends and "://" not in settings.sends:
        check_sends(Path(settings.sends), needs_topic=asks_for_topics(settings.given))
    check_options(settings.given)
    say = progress_line()
    say("starting Spark")
    with recorded("audit", settings.to) as record, session("audit", settings.master) as spark:
        say("asking how far groups are")
        progress = read_progress(spark, settings.given)
        say("reading events")
        logs = logs_before(settings.given)
        events = read_events(spark, settings.given)
        check_any(events, settings.given)
        record.rows = events.count()
        note_events(record.inputs, settings.given, logs, events)
        # Once all is read: what retention takes from now on was told.
        begins_at_ms = 0
        if settings.sends:
            begins_at_ms = max(
                told_from_ms(settings.given), removed_at_ms(spark, events, settings.given)
            )
        verdict = judge(
            spark, events, settings, now_ms=SystemClock().wall_ms(), begins_at_ms=begins_at_ms,
            progress=progress,
        )  # fmt: skip
        record.detail = dict(verdict.counts)
        if settings.metrics_file:
            metrics = PipelineMetrics(
                "audit", settings.cluster, succeeded_at_ms=SystemClock().wall_ms()
            )
            metrics.rows["*"] = record.rows
            metrics.findings = verdict.by_topic()
            metrics.write(settings.metrics_file)
        return verdict


def check_options(given: Mapping[str, str]) -> None:
    """Raise BadOption for what a read of events would refuse, before Spark is started for it."""
    parse_source({**given, "dataset": "events"}, is_stream=False)


def read_events(spark: SparkSession, given: Mapping[str, str]) -> DataFrame:
    """Return all events that are there, kept for the several tables that are made of them.

    What cannot be read is among them, as UNREADABLE, and ends nothing unless that is asked for.
    """
    return _events(spark, given).persist()


def _events(spark: SparkSession, given: Mapping[str, str]) -> DataFrame:
    reader = spark.read.format(NAME)
    for name, value in {"failOnDataLoss": "false", **given, "dataset": "events"}.items():
        reader = reader.option(name, value)
    return reader.load()


def check_any(events: DataFrame, given: Mapping[str, str]) -> None:
    """Raise BadOption where topics were asked for by name, and no event tells of any of them."""
    topics = given.get("topics") or given.get("topic")
    if topics and events.where(~events["event"].isin(UNREADABLE, REMOVED)).isEmpty():
        raise BadOption(
            f"no event tells of topic {topics}: there is none, or nothing ever happened"
        )


def told_from_ms(given: Mapping[str, str]) -> int:
    """Return from when on events of all broker groups are there; 0: from their first ones on."""
    options = parse_source({**given, "dataset": "events"}, is_stream=False)
    client = connect(options.connection)
    begins_at_ms = options.start.at_ms or 0
    for each in client.whole_cluster(Topics()).logs.values():
        # Retention has taken its beginning.
        if each.log_min:
            begins_at_ms = max(begins_at_ms, _first_event_ms(client, each))
    return begins_at_ms


def removed_at_ms(spark: SparkSession, events: DataFrame, given: Mapping[str, str]) -> int:
    """Return when the last broker group was removed; 0: as far as the logs tell, none ever was.

    What was sent to it before its log told of. Where retention has taken the record of that from
    the home's log, that log begins later.
    """
    from pyspark.sql import functions as F  # noqa: N812  # As all of Spark's users write it.

    if given.get("endingTimestamp"):
        # It may have been removed later than that.
        events = _events(spark, {**given, "endingTimestamp": ""})
    (found,) = (
        events.where(F.col("event") == REMOVED)
        .agg(F.max(F.unix_millis("event_ts")).alias("at_ms"))
        .collect()
    )
    return int(found.at_ms or 0)


def _first_event_ms(client: Client, of: BrokerLog) -> int:
    pages = client.events(of.broker, start=of.log_min, until=of.log_end, log_id=of.log_id)
    # Where there is none, nothing is told of any time before now.
    return next((event.at_ms for page in pages for event in page.events), SystemClock().wall_ms())


def check_window(window: str) -> None:
    """Raise BadOption for what Spark would not take for a duration."""
    if not re.fullmatch(r"[1-9]\d{0,5} (second|minute|hour|day|week)s?", window):
        raise BadOption(f"--window {window}: it is a duration such as 30 seconds or 5 minutes")


def judge(
    spark: SparkSession,
    events: DataFrame,
    settings: AuditSettings,
    *,
    now_ms: int,
    begins_at_ms: int = 0,
    progress: DataFrame | None = None,
) -> Verdict:
    """Make the tables and the page of an audit out of events.

    `begins_at_ms`: as `told_from_ms` and `removed_at_ms` say. `progress`: as `read_progress` has
    said before the events were read.
    """
    rules = rules_of(settings, now_ms=now_ms, begins_at_ms=begins_at_ms)
    sends = None
    if settings.sends:
        needs_topic = asks_for_topics(settings.given)
        sends = of_topics(
            read_sends(spark, settings.sends, needs_topic=needs_topic), settings.given
        )
    made = transforms.audit(events, rules, sends=sends, progress=progress)
    folder = f"{settings.to.rstrip('/')}/{FOLDER}"
    made.findings.coalesce(1).write.mode("overwrite").parquet(f"{folder}/findings")
    made.summary.coalesce(1).write.mode("overwrite").parquet(f"{folder}/summary")
    verdict = _verdict(spark, folder)
    late = transforms.lateness(events, settings.window).limit(CURVE_POINTS).collect()
    waits = made.lag.limit(CURVE_POINTS).collect()
    path = Path(folder) / "index.html"
    path.write_text(_page(verdict, late, waits, now_ms=now_ms), "utf-8")
    return verdict


def rules_of(settings: AuditSettings, *, now_ms: int, begins_at_ms: int = 0) -> Rules:
    """Return what an audit goes by."""
    end_ms = _end_ms(settings.given)
    return Rules(
        late_ms=settings.late_ms,
        window=settings.window,
        # What was due shortly before the end may have been fired behind it.
        closed_at_ms=min(now_ms, end_ms) - round(settings.grace_s * 1000),
        ends_at_ms=end_ms,
        begins_at_ms=begins_at_ms,
        filtered_groups=tuple(settings.filtered_groups),
        is_whole=not asks_for_topics(settings.given),
    )


def _end_ms(given: Mapping[str, str]) -> int:
    """Return until when events are read."""
    if not given.get("endingTimestamp"):
        return NEVER_MS
    end = parse_source({**given, "dataset": "events"}, is_stream=False).end
    return NEVER_MS if end.at_ms is None else end.at_ms


def _verdict(spark: SparkSession, folder: str) -> Verdict:
    from pyspark.sql import functions as F  # noqa: N812  # As all of Spark's users write it.

    findings = spark.read.parquet(f"{folder}/findings")
    summary = spark.read.parquet(f"{folder}/summary")
    counts: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    counts.update({row.kind: row["count"] for row in findings.groupBy("kind").count().collect()})
    totals = (
        summary.groupBy("topic", "consumer_group")
        .agg(*(F.sum(name).alias(name) for name in COUNTS))
        .orderBy("topic", "consumer_group")
    )
    unreadable = findings.where(findings["kind"] == UNREADABLE).orderBy("broker", "detail")
    first = findings.orderBy("kind", "at", "broker", "queue_id", "queue_offset").limit(SHOWN_MAX)
    return Verdict(
        counts=dict(counts),
        totals=[row.asDict() for row in totals.collect()],
        findings=[row.asDict() for row in first.collect()],
        unreadable=[row.detail for row in unreadable.limit(UNREADABLE_SHOWN_MAX).collect()],
    )


def _page(
    verdict: Verdict, late: Sequence[Any], waits: Sequence[Any], *, now_ms: int
) -> str:  # fmt: skip
    groups = sorted({row.consumer_group for row in waits})
    parts = [
        *(f"<p class='{name}'>{html.escape(said)}</p>" for name, said in headlines(verdict)),
        table(("finding", "how many"), [(kind, verdict.counts[kind]) for kind in KINDS]),
        "<h2>By topic and group</h2>",
        table(
            ("topic", "group", *COUNTS),
            [
                (row["topic"] or "", row["consumer_group"] or "", *(row[name] for name in COUNTS))
                for row in verdict.totals
            ],
        ),
        "<h2>Lateness of delayed messages</h2>",
        curve(
            {
                name: [(row.window.timestamp(), row[name]) for row in late]
                for name in ("p50", "p99", "max")
            },
            unit="ms",
        ),
        "<h2>From stored to delivered, P99 by group</h2>",
        curve(
            {
                group: [(r.window.timestamp(), r.p99) for r in waits if r.consumer_group == group]
                for group in groups
            },
            unit="ms",
        ),
        f"<h2>Findings{_of(verdict)}</h2>",
        table(
            ("finding", "topic", "group", "broker", "queue", "offset", "message", "at", "what"),
            [_row(found) for found in verdict.findings],
            details=[_journey(found) for found in verdict.findings],
        ),
    ]
    return page("Audit", parts, now_ms=now_ms)


def headlines(verdict: Verdict) -> list[tuple[str, str]]:
    """Return the sentences at the head of the page, each with its class."""
    lines = []
    counts = verdict.counts
    if counts["missing"] or counts["early"]:
        lines.append(("bad", "Something was lost or early."))
    if counts["unexpected"]:
        lines.append(("bad", f"Recalled, and there all the same: {counts['unexpected']:,}."))
    if verdict.is_incomplete:
        parts = parts_of_logs(counts[UNREADABLE])
        lines.append(("bad", f"This audit is incomplete: {parts} cannot be read."))
    if counts["unknown"]:
        count = counts["unknown"]
        lines.append(("bad", f"Whether {count:,} messages were lost nobody can say (unknown)."))
    left = verdict.outstanding
    if not lines:
        of = ", of what is through" if left else ""
        lines.append(("good", f"Nothing was lost, and nothing was early{of}."))
    if left:
        lines.append(("", f"Not through yet, counted by group: {left}."))
    return lines


def parts_of_logs(count: int) -> str:
    """Return how many parts of logs there are, in words."""
    return "a part of the log" if count == 1 else f"{count:,} parts of the logs"


def unreadable_in(events: DataFrame) -> list[str]:
    """Return the first sentences on what of the logs cannot be read."""
    parts = events.where(events["event"] == UNREADABLE).select("broker", "log_position", "detail")
    rows = parts.orderBy("broker", "log_position").limit(UNREADABLE_SHOWN_MAX).collect()
    return [row.detail for row in rows]


def _of(verdict: Verdict) -> str:
    total = sum(verdict.counts.values())
    return f", the first {SHOWN_MAX} of {total}" if total > SHOWN_MAX else ""


def _row(found: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(
        "" if found[name] is None else found[name]
        for name in (
            "kind", "topic", "consumer_group", "broker", "queue_id", "queue_offset", "message_id",
            "at", "detail",
        )
    )  # fmt: skip


def _journey(found: Mapping[str, Any]) -> str:
    steps = json.loads(found["journey"] or "[]")
    lines = [
        " ".join(
            str(step[name])
            for name in ("at", "event", "stands_on", "consumer_group", "attempt", "detail")
            if step.get(name) is not None
        )
        for step in steps
    ]
    return "<br>".join(html.escape(line) for line in lines)
