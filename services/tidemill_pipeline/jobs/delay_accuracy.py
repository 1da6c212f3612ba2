"""J3: the lateness of delayed messages, by minute and by requested delay.

Writes `delay-accuracy/by_minute` and `by_band` (Parquet). With the folder of an earlier run it
reports each band with a worse P99, to compare two releases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from tidemill.common.clock import SystemClock
from tidemill_pipeline.errors import BadOption
from tidemill_pipeline.jobs.events import (
    check_any,
    check_options,
    read_events,
    report_missing,
    unreadable_in,
)
from tidemill_pipeline.jobs.inputs import logs_before, note_events
from tidemill_pipeline.jobs.running import progress_line, recorded, session, watching
from tidemill_pipeline.metrics import PipelineMetrics
from tidemill_pipeline.transforms.delay_accuracy import by_band, by_minute, fired

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FOLDER: Final = "delay-accuracy"
WORSE_FACTOR: Final = 1.5  # of the earlier P99: runs of one release differ by less
WORSE_MS: Final = 20  # minimum increase: smaller ones do not matter


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracySettings:
    """Options of a measurement."""

    to: str
    given: Mapping[str, str]
    master: str | None = None
    baseline: str = ""  # folder of an earlier measurement
    metrics_file: str = ""
    cluster: str = ""  # metrics label


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyResult:
    """Result of a measurement, with the bands that became worse."""

    bands: list[dict[str, Any]]
    worse: list[str]
    unreadable: list[str]  # a sentence for each unreadable part of a log


def run(settings: AccuracySettings) -> AccuracyResult:
    """Read the events, write the tables, and compare them with the baseline."""
    before = Path(settings.baseline) / FOLDER / "by_band"
    if settings.baseline and "://" not in settings.baseline and not before.is_dir():
        raise BadOption(f"--baseline {settings.baseline}: no earlier run found at {before}")
    check_options(settings.given)
    say = progress_line()
    with recorded("delay-accuracy", settings.to) as record:
        missing = report_missing(say, settings.given)
        say("starting Spark")
        with session("delay-accuracy", settings.master) as spark:
            logs = logs_before(settings.given)
            events = read_events(spark, settings.given)
            with watching(spark, say, "reading events"):
                check_any(events, settings.given, missing=missing)
                note_events(record.inputs, settings.given, logs, events)
                measured = measure(spark, events, settings)
        record.rows = sum(band["count"] for band in measured.bands)
        record.detail = {"worse": measured.worse}
        if settings.metrics_file:
            metrics = PipelineMetrics(
                "delay-accuracy", settings.cluster, succeeded_at_ms=SystemClock().wall_ms()
            )
            for band in measured.bands:
                metrics.rows[band["topic"]] += band["count"]
            metrics.write(settings.metrics_file)
        return measured


def measure(spark: SparkSession, events: DataFrame, settings: AccuracySettings) -> AccuracyResult:
    """Write the tables for these events, and compare them with the baseline."""
    folder = f"{settings.to.rstrip('/')}/{FOLDER}"
    firings = fired(events).persist()
    by_minute(firings).coalesce(1).write.mode("overwrite").parquet(f"{folder}/by_minute")
    by_band(firings).coalesce(1).write.mode("overwrite").parquet(f"{folder}/by_band")
    bands = [row.asDict() for row in by_band(firings).collect()]
    before: dict[tuple[str, str], int] = {}
    if settings.baseline:
        earlier = spark.read.parquet(f"{settings.baseline.rstrip('/')}/{FOLDER}/by_band")
        before = {(row.topic, row.band): row.p99 for row in earlier.collect()}
    return AccuracyResult(
        bands=bands, worse=worse_than(before, bands), unreadable=unreadable_in(events)
    )


def worse_than(before: Mapping[tuple[str, str], int], bands: list[dict[str, Any]]) -> list[str]:
    """Return a sentence for each band with a worse P99."""
    sentences = []
    for band in bands:
        was = before.get((band["topic"], band["band"]))
        if was is not None and band["p99"] > max(was * WORSE_FACTOR, was + WORSE_MS):
            sentences.append(
                f"{band['topic']}, {band['band']}: P99 was {was} ms and is {band['p99']} ms"
            )
    return sentences
