"""The command that sends archived messages again.

`replay` is long because most of its lines are options.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from tidemill.common.exit_codes import EXIT_REFUSED, EXIT_USAGE
from tidemill.common.prompts import fail
from tidemill.common.times import INSTANT, instant_ms, utc
from tidemill_pipeline.commands.shared import (
    CLUSTER,
    ENDPOINTS,
    EVERY_TOPIC,
    ClusterName,
    Config,
    Endpoints,
    Master,
    MetricsFile,
    OptionPairs,
    Pattern,
    TopicNames,
    given_options,
    option_pairs,
    run_job,
)


class ReplayTiming(StrEnum):
    """Spacing of replayed messages."""

    ASAP = "asap"
    ORIGINAL = "original"
    SCALED = "scaled"


def replay(
    source: Annotated[str, typer.Option("--from", metavar="DIR", help="The archive.")],
    into: Annotated[str, typer.Option(help="Target topic.")],
    state: Annotated[
        str, typer.Option(metavar="DIR", help="Folder of the progress; an empty one starts again.")
    ],
    endpoints: Endpoints = ENDPOINTS,
    topic: TopicNames = None,
    topic_pattern: Pattern = "",
    since: Annotated[str | None, typer.Option(metavar=INSTANT, help="First storage time.")] = None,
    until: Annotated[
        str | None, typer.Option(metavar=INSTANT, help="Stored before this time.")
    ] = None,
    timing: Annotated[
        ReplayTiming, typer.Option(help="At once, with the original spacing, or scaled by --speed.")
    ] = ReplayTiming.ASAP,
    speed: Annotated[float, typer.Option(min=0.001, help="With --timing scaled.")] = 1.0,
    rate: Annotated[
        float | None, typer.Option(min=0.1, help="Messages per second of one task.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="COLUMN=SQL", help="New value of a column; may be repeated."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the effect and send nothing.")
    ] = False,
    master: Master = None,
    metrics_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of /metrics while it sends; 0: none.")
    ] = 0,
    metrics_file: MetricsFile = "",
    cluster: ClusterName = CLUSTER,
    option: OptionPairs = None,
    config: Config = None,
) -> None:
    """Send archived messages again, each with its first id in `tidemill-original-id`.

    `--set` replaces a column by an expression of Spark SQL over the archived message. `--dry-run`
    counts and shows the results.

    Examples:
    * `tidemill pipeline replay --from ./archive --into again --state ./replay -t orders`
    * `tidemill pipeline replay --from ./archive --into again --state ./masked --set "tag=null"`
    """
    del config
    if speed != 1.0 and timing is not ReplayTiming.SCALED:
        fail(f"--speed {speed:g} needs --timing scaled", EXIT_USAGE)
    given = given_options(endpoints, topic, topic_pattern or EVERY_TOPIC, None)
    sink = {"endpoints": endpoints, "topic": into}
    if rate is not None:
        sink["maxRatePerTask"] = str(rate)
    replayed = run_job(
        "tidemill_pipeline.jobs.replay",
        lambda jobs: jobs.run(
            jobs.ReplaySettings(
                archive=source,
                given=given,
                sink=sink,
                more=option_pairs(option),
                state=state,
                timing=timing.value,
                speed=speed,
                since_ms=None if since is None else instant_ms(since),
                until_ms=None if until is None else instant_ms(until),
                expressions=_expressions(set_),
                master=master,
                metrics_port=metrics_port,
                metrics_file=metrics_file,
                cluster=cluster,
            ),
            is_dry=dry_run,
        ),
        goes_on=True,
    )
    typer.echo("", err=True)
    _print_replay(replayed, is_dry=dry_run)


def _print_replay(replayed: Any, *, is_dry: bool) -> None:
    """Print the result of a replay, or the plan of a dry run."""
    plan = replayed.plan
    whole = (
        f"{plan.rows:,} messages, stored from {utc(plan.first_stored_ms)} to"
        f" {utc(plan.last_stored_ms)}"
    )
    if is_dry:
        if replayed.left is None:
            typer.echo(f"{whole}, would be sent")
        else:
            typer.echo(f"{replayed.left:,} messages would be sent, the rest of a replay of {whole}")
            typer.echo("a part of the interrupted batch may have been sent already", err=True)
        for effect in replayed.effects:
            for sentence in effect.sentences():
                typer.echo(sentence)
    else:
        typer.echo(f"this run sent {replayed.sent:,} messages, of a replay of {whole}")
        if replayed.late_ms:
            typer.echo(
                f"messages were sent up to {replayed.late_ms / 1000:,.1f} s late: the sends were"
                " slower than the original, and overdue messages were sent at once",
                err=True,
            )
        if replayed.bad:
            fail(
                f"{replayed.bad:,} messages were not sent. The table of deadLetterPath has them"
                " with the reasons, and the next run skips them",
                EXIT_REFUSED,
            )


def _expressions(given: list[str] | None) -> dict[str, str]:
    """Return the expressions of `--set` by column."""
    found: dict[str, str] = {}
    for each in given or ():
        name, is_pair, text = (part.strip() for part in each.partition("="))
        if not (name and is_pair and text):
            fail(f"--set {each} is not COLUMN=SQL", EXIT_USAGE)
        if name in found:
            fail(f"--set {name} is given twice", EXIT_USAGE)
        found[name] = text
    return found
