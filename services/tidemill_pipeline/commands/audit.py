"""Commands that audit deliveries and measure delays."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from tidemill.common.times import DURATION, seconds
from tidemill_pipeline.commands.shared import (
    CLUSTER,
    ENDPOINTS,
    EXIT_FOUND,
    ClusterName,
    Config,
    Endpoints,
    Master,
    MetricsFile,
    OptionPairs,
    Pattern,
    To,
    TopicNames,
    given_options,
    print_table,
    run_job,
)


def audit(
    to: To,
    endpoints: Endpoints = ENDPOINTS,
    topic: TopicNames = None,
    topic_pattern: Pattern = "",
    sends: Annotated[
        str, typer.Option(help="Acknowledged sends: JSON lines with message_id, topic, at_ms.")
    ] = "",
    grace: Annotated[
        float,
        typer.Option(
            parser=seconds,
            metavar=DURATION,
            show_default="10m",
            help="Smallest age of a missing message that counts.",
        ),
    ] = 600,
    late_ms: Annotated[
        int, typer.Option(min=0, help="Largest allowed delay of a timer, in ms.")
    ] = 1000,
    window: Annotated[str, typer.Option(help="Time window of tables and charts.")] = "5 minutes",
    filtered_group: Annotated[
        list[str] | None, typer.Option(help="Consumer group with a filter; may be repeated.")
    ] = None,
    metrics_file: MetricsFile = "",
    cluster: ClusterName = CLUSTER,
    master: Master = None,
    option: OptionPairs = None,
    config: Config = None,
) -> None:
    """Compare produced and consumed messages; exit with 2 after an error.

    Errors are lost or early messages, deliveries after a recall, and unreadable parts of a log.

    The command prints a table and writes a page with charts: DIR/audit/index.html.

    Example: tidemill pipeline audit --to ./audit -t orders --grace 0
    """
    del config
    given = given_options(endpoints, topic, topic_pattern, option)
    verdict = run_job(
        "tidemill_pipeline.jobs.audit",
        lambda jobs: jobs.run(
            jobs.AuditSettings(
                to=to,
                given=given,
                master=master,
                sends=sends,
                grace_s=grace,
                late_ms=late_ms,
                window=window,
                filtered_groups=filtered_group or (),
                metrics_file=metrics_file,
                cluster=cluster,
            )
        ),
    )
    _print_verdict(verdict)
    for sentence in verdict.unreadable:
        typer.echo(f"not seen: {sentence}", err=True)
    if verdict.is_incomplete:
        typer.echo("this audit is incomplete: parts of the logs are unreadable", err=True)
    if verdict.outstanding:
        typer.echo(f"outstanding, counted by consumer group: {verdict.outstanding}", err=True)
    typer.echo(f"findings and charts: {to.rstrip('/')}/audit/index.html", err=True)
    if verdict.is_broken or verdict.is_incomplete:
        raise typer.Exit(EXIT_FOUND)


def delay_accuracy(
    to: To,
    endpoints: Endpoints = ENDPOINTS,
    topic: TopicNames = None,
    baseline: Annotated[
        str, typer.Option(help="Folder of an earlier run; exit with 2 if a P99 is worse.")
    ] = "",
    master: Master = None,
    metrics_file: MetricsFile = "",
    cluster: ClusterName = CLUSTER,
    option: OptionPairs = None,
    config: Config = None,
) -> None:
    """Show how late delayed messages were, by topic and by delay.

    Example: tidemill pipeline delay-accuracy --to ./accuracy
    """
    del config
    given = given_options(endpoints, topic, "", option)
    measured = run_job(
        "tidemill_pipeline.jobs.delay_accuracy",
        lambda jobs: jobs.run(
            jobs.AccuracySettings(
                to=to,
                given=given,
                master=master,
                baseline=baseline,
                metrics_file=metrics_file,
                cluster=cluster,
            )
        ),
    )
    names = ("topic", "band", "count", "early", "p50", "p90", "p99", "p999", "max")
    typer.echo("", err=True)
    heads = [f"{name.upper()} MS" if name[0] in "pm" else name.upper() for name in names]
    print_table(heads, [[band[n] for n in names] for band in measured.bands])
    for sentence in measured.unreadable:
        typer.echo(f"not measured: {sentence}", err=True)
    for sentence in measured.worse:
        typer.echo(sentence)
    if measured.worse or any(band["early"] for band in measured.bands):
        raise typer.Exit(EXIT_FOUND)


_SHOWN: Final = (
    "produced",
    "scheduled",
    "fired",
    "recalled",
    "delivered",
    "acked",
    "in_flight",
    "overdue",
    "waiting",
    "dead_lettered",
    "expired",
)
_OF_DELAYS: Final = frozenset({"scheduled", "fired", "recalled"})  # shown if not all are zero


def _print_verdict(verdict: Any) -> None:
    from tidemill_pipeline.jobs.verdict import count_of

    def cell(row: dict[str, Any], name: str) -> str:
        count = count_of(row, name)
        return "-" if count is None else f"{count:,}"

    rows = [row for row in verdict.totals if row["topic"] is not None]
    columns = [name for name in _SHOWN if name not in _OF_DELAYS or any(row[name] for row in rows)]
    typer.echo("", err=True)
    print_table(
        ("TOPIC", "GROUP", *(name.upper().replace("_", " ") for name in columns)),
        [
            (row["topic"], row["consumer_group"] or "-", *(cell(row, name) for name in columns))
            for row in rows
        ],
    )
    print_table(("FINDING", "COUNT"), [(kind, f"{n:,}") for kind, n in verdict.counts.items()])
    for sentence in verdict.broken:
        typer.echo(sentence)
    if verdict.sends is not None:
        typer.echo(str(verdict.sends), err=True)
