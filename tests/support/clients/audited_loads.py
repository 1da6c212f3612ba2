"""A second verdict on loads with kills: an audit of the brokers' events."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.clients.api import POLL_MS_MIN
from tests.support.clients.history import Outcome
from tests.support.clients.history_against_audit import (
    Comparison,
    Delivery,
    LostAnswerSpan,
    audited,
    compare,
    witness_of,
)
from tests.support.clients.load import Load
from tidemill.common.clock import SystemClock
from tidemill_pipeline.jobs.audit import AuditSettings, judge
from tidemill_pipeline.jobs.events import read_events
from tidemill_pipeline.jobs.group_progress import read_progress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def second_opinion(
    spark: SparkSession,
    endpoints: str,
    loads: Sequence[Load],
    kills: Sequence[LostAnswerSpan],
    to: Path,
) -> tuple[Comparison, list[dict[str, Any]]]:
    """Audit loads that have ended; return the differences from their histories, and findings."""
    findings, deliveries = audit(
        spark,
        endpoints,
        (
            (load.topic, key)
            for load in loads
            for key, send in load.history.sends.items()
            if send.outcome is Outcome.OK
        ),
        to,
    )
    witnesses = [
        witness_of(
            load.history,
            topic=load.topic,
            group=load.group,
            early=load.early,
            failed=[*load.failed, *kills],
        )
        for load in loads
    ]
    return compare(witnesses, findings, deliveries, slack_ms=POLL_MS_MIN), findings


def audit(
    spark: SparkSession, endpoints: str, acknowledged: Iterable[tuple[str, str]], to: Path
) -> tuple[list[dict[str, Any]], list[Delivery]]:
    """Audit a cluster; return the findings and the deliveries.

    `acknowledged`: topic and message id of each acknowledged send.
    """
    sends = to / "sends.jsonl"
    with sends.open("w") as file:
        for topic, message_id in acknowledged:
            file.write(json.dumps({"message_id": message_id, "topic": topic}) + "\n")
    settings = AuditSettings(
        to=str(to), given={"endpoints": endpoints}, grace_s=0, sends=str(sends)
    )
    progress = read_progress(spark, settings.given)
    events = read_events(spark, settings.given)
    judge(spark, events, settings, now_ms=SystemClock().wall_ms(), progress=progress)
    return audited(spark, events, str(to), {})
