"""The second opinion on loads among kills: an audit of what brokers tell of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.api import POLL_MS_MIN
from tests.support.history import Outcome
from tests.support.load import Load
from tests.support.second_opinion import Compared, Failed, audited, compare, witness_of
from tidemill.common.clock import SystemClock
from tidemill.pipeline.jobs.audit import AuditSettings, judge, read_events
from tidemill.pipeline.jobs.group_progress import read_progress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def second_opinion(
    spark: SparkSession, endpoints: str, loads: Sequence[Load], kills: Sequence[Failed], to: Path
) -> tuple[Compared, list[dict[str, Any]]]:
    """Audit what became of loads that have ended; return where that differs, and its findings."""
    settings = AuditSettings(
        to=str(to), given={"endpoints": endpoints}, grace_s=0,
        sends=str(_acknowledged(to / "sends.jsonl", loads)),
    )  # fmt: skip
    progress = read_progress(spark, settings.given)
    events = read_events(spark, settings.given)
    judge(spark, events, settings, now_ms=SystemClock().wall_ms(), progress=progress)
    findings, deliveries = audited(spark, events, str(to), {})
    witnesses = [
        witness_of(
            load.history, topic=load.topic, group=load.group, early=load.early,
            failed=[*load.failed, *kills],
        )
        for load in loads
    ]  # fmt: skip
    return compare(witnesses, findings, deliveries, slack_ms=POLL_MS_MIN), findings


def _acknowledged(path: Path, loads: Sequence[Load]) -> Path:
    """Write the list of acknowledged sends as producers keep it."""
    with path.open("w") as file:
        for load in loads:
            for key, send in load.history.sends.items():
                if send.outcome is Outcome.OK:
                    file.write(json.dumps({"message_id": key, "topic": load.topic}) + "\n")
    return path
