"""J2: compare lifecycle events with each other and with a list of acknowledged sends.

Writes `audit/summary` and `audit/findings` (Parquet), `audit/index.html`, and a table to the
terminal. Each run reads all events and replaces its tables.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from tidemill.common.clock import SystemClock
from tidemill_pipeline.errors import BadOption
from tidemill_pipeline.jobs.audit_page import SHOWN_MAX, audit_page
from tidemill_pipeline.jobs.events import (
    UNREADABLE_SHOWN_MAX,
    check_any,
    check_options,
    complete_from_ms,
    read_events,
    removed_at_ms,
    report_missing,
)
from tidemill_pipeline.jobs.group_progress import read_progress
from tidemill_pipeline.jobs.inputs import logs_before, note_events
from tidemill_pipeline.jobs.running import (
    RunRecord,
    Say,
    progress_line,
    recorded,
    session,
    watching,
)
from tidemill_pipeline.jobs.sends import asks_for_topics, check_sends, of_topics, read_sends
from tidemill_pipeline.jobs.verdict import AuditVerdict, SendCounts
from tidemill_pipeline.metrics import PipelineMetrics
from tidemill_pipeline.options import parse_source
from tidemill_pipeline.rows import UNREADABLE
from tidemill_pipeline.transforms import audit as transforms
from tidemill_pipeline.transforms.audit import COUNTS
from tidemill_pipeline.transforms.findings import BROKEN, KINDS, NEVER_MS, AuditRules

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FOLDER: Final = "audit"
GRACE_S: Final = 600.0  # after the due or store time: younger messages are not judged
CURVE_POINTS: Final = 500  # per curve: as many as a screen can show


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSettings:
    """Options of an audit."""

    to: str
    given: Mapping[str, str]  # options of the source
    master: str | None = None
    sends: str = ""  # file of acknowledged sends: JSON lines with message_id, topic and at_ms
    grace_s: float = GRACE_S
    late_ms: int = 1_000
    window: str = "5 minutes"
    filtered_groups: Sequence[str] = ()
    metrics_file: str = ""
    cluster: str = ""  # metrics label


def run(settings: AuditSettings) -> AuditVerdict:
    """Read the events, reconcile them, write the tables and the page; return the verdict."""
    if "://" in settings.to:
        raise BadOption("--to must be a local folder: the page is written next to the tables")
    check_window(settings.window)
    if settings.sends and "://" not in settings.sends:
        check_sends(Path(settings.sends), needs_topic=asks_for_topics(settings.given))
    check_options(settings.given)
    say = progress_line()
    with recorded("audit", settings.to) as record:
        missing = report_missing(say, settings.given)
        say("starting Spark")
        with session("audit", settings.master) as spark:
            verdict = _run(spark, settings, say, record, missing)
        record.detail = dict(verdict.counts)
        if settings.metrics_file:
            metrics = PipelineMetrics(
                "audit", settings.cluster, succeeded_at_ms=SystemClock().wall_ms()
            )
            metrics.rows["*"] = record.rows
            metrics.findings = verdict.by_topic()
            metrics.write(settings.metrics_file)
        return verdict


def _run(
    spark: SparkSession, settings: AuditSettings, say: Say, record: RunRecord, missing: str
) -> AuditVerdict:
    say("querying the progress of consumer groups")
    progress = read_progress(spark, settings.given)
    logs = logs_before(settings.given)
    events = read_events(spark, settings.given)
    with watching(spark, say, "reading events"):
        check_any(events, settings.given, missing=missing)
        record.rows = events.count()
    note_events(record.inputs, settings.given, logs, events)
    with watching(spark, say, f"reconciling {record.rows:,} events"):
        # After the read: events that retention deletes from now on are included.
        begins_at_ms = 0
        if settings.sends:
            begins_at_ms = max(
                complete_from_ms(settings.given), removed_at_ms(spark, events, settings.given)
            )
        return judge(
            spark,
            events,
            settings,
            now_ms=SystemClock().wall_ms(),
            begins_at_ms=begins_at_ms,
            progress=progress,
        )


def check_window(window: str) -> None:
    """Raise BadOption for a window that Spark does not accept."""
    if not re.fullmatch(r"[1-9]\d{0,5} (second|minute|hour|day|week)s?", window):
        raise BadOption(f"--window {window}: give a duration such as 30 seconds or 5 minutes")


def judge(
    spark: SparkSession,
    events: DataFrame,
    settings: AuditSettings,
    *,
    now_ms: int,
    begins_at_ms: int = 0,
    progress: DataFrame | None = None,
) -> AuditVerdict:
    """Write the tables and the page of an audit; return the verdict.

    `begins_at_ms`: the later one of `told_from_ms` and `removed_at_ms`. `progress`: from
    `read_progress`, called before the events were read.
    """
    rules = rules_of(settings, now_ms=now_ms, begins_at_ms=begins_at_ms)
    sends = counts = None
    if settings.sends:
        listed = read_sends(spark, settings.sends, needs_topic=asks_for_topics(settings.given))
        sends = of_topics(listed, settings.given)
        counts = _counts_of_sends(listed, sends, rules)
    made = transforms.audit(events, rules, sends=sends, progress=progress)
    folder = f"{settings.to.rstrip('/')}/{FOLDER}"
    made.findings.coalesce(1).write.mode("overwrite").parquet(f"{folder}/findings")
    made.summary.coalesce(1).write.mode("overwrite").parquet(f"{folder}/summary")
    verdict = _verdict(spark, folder, counts)
    late = transforms.lateness(events, settings.window).limit(CURVE_POINTS).collect()
    waits = made.lag.limit(CURVE_POINTS).collect()
    path = Path(folder) / "index.html"
    path.write_text(audit_page(verdict, late, waits, now_ms=now_ms), "utf-8")
    return verdict


def rules_of(settings: AuditSettings, *, now_ms: int, begins_at_ms: int = 0) -> AuditRules:
    """Return the rules of an audit."""
    end_ms = _end_ms(settings.given)
    return AuditRules(
        late_ms=settings.late_ms,
        window=settings.window,
        # A message that was due shortly before the end may have fired after it.
        closed_at_ms=min(now_ms, end_ms) - round(settings.grace_s * 1000),
        ends_at_ms=end_ms,
        begins_at_ms=begins_at_ms,
        filtered_groups=tuple(settings.filtered_groups),
        is_whole=not asks_for_topics(settings.given),
    )


def _end_ms(given: Mapping[str, str]) -> int:
    """Return the end of the time range of the events."""
    if not given.get("endingTimestamp"):
        return NEVER_MS
    end = parse_source({**given, "dataset": "events"}, is_stream=False).end
    return NEVER_MS if end.at_ms is None else end.at_ms


def _counts_of_sends(listed: DataFrame, sends: DataFrame, rules: AuditRules) -> SendCounts:
    young = sends.where(sends["at_ms"] >= rules.closed_at_ms).count()
    count = sends.count()
    return SendCounts(compared=count - young, young=young, elsewhere=listed.count() - count)


def _verdict(spark: SparkSession, folder: str, sends: SendCounts | None) -> AuditVerdict:
    from pyspark.sql import functions as F  # noqa: N812  # The usual name among users of Spark.

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
    first = findings.orderBy(
        ~F.col("kind").isin(*BROKEN), "kind", "at", "broker", "queue_id", "queue_offset"
    ).limit(SHOWN_MAX)
    return AuditVerdict(
        counts=dict(counts),
        totals=[row.asDict() for row in totals.collect()],
        findings=[row.asDict() for row in first.collect()],
        unreadable=[row.detail for row in unreadable.limit(UNREADABLE_SHOWN_MAX).collect()],
        sends=sends,
    )
