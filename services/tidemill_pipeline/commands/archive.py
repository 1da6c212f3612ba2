"""Commands that write, verify and clean an archive.

`archive` is long because most of its lines are options.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, Final

import typer

from tidemill.common.clock import SystemClock
from tidemill.common.prompts import confirm
from tidemill.common.times import DURATION, seconds, utc
from tidemill_pipeline.commands.shared import (
    CLUSTER,
    ENDPOINTS,
    EVERY_TOPIC,
    EXIT_DAMAGED,
    ClusterName,
    Config,
    Endpoints,
    Gate,
    Master,
    MetricsFile,
    OptionPairs,
    Pattern,
    StoreIsGone,
    To,
    TopicNames,
    given_options,
    run_job,
)
from tidemill_pipeline.errors import listed

_ARCHIVE = "tidemill_pipeline.jobs.archive_commands"
PERIOD_S_LEAST: Final = 1  # each round asks all broker groups for the ends of their queues
_DAY_MS: Final = 86_400_000


def _archive_settings(
    module: Any, given: dict[str, str], master: str | None, **more: object
) -> Any:
    return module.ArchiveSettings(given=given, master=master, **more)


def _period_s(given: str | float) -> float:
    """Parse the pause between two rounds."""
    period_s = seconds(given)
    if period_s < PERIOD_S_LEAST:
        raise typer.BadParameter(f"{given} is shorter than {PERIOD_S_LEAST} s")
    return period_s


def archive(
    to: To,
    endpoints: Endpoints = ENDPOINTS,
    topic: TopicNames = None,
    topic_pattern: Pattern = "",
    master: Master = None,
    every: Annotated[
        float | None,
        typer.Option(
            parser=_period_s,
            metavar=DURATION,
            help="Repeat, with this pause between runs. Default: run once.",
        ),
    ] = None,
    batch_rows: Annotated[
        int, typer.Option(min=1, help="Messages per commit. After a kill, one commit is repeated.")
    ] = 1_000_000,
    allow_loss: Annotated[
        bool,
        typer.Option(
            "--allow-loss", help="Continue after messages that retention or a deletion removed."
        ),
    ] = False,
    store_is_gone: StoreIsGone = False,
    metrics_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of /metrics, with --every; 0: none.")
    ] = 0,
    metrics_file: MetricsFile = "",
    cluster: ClusterName = CLUSTER,
    gate: Gate = "",
    then_verify: Annotated[
        bool, typer.Option("--then-verify", help="Run archive-verify after each round.")
    ] = False,
    option: OptionPairs = None,
    config: Config = None,
) -> None:
    """Copy messages into Parquet files, each message exactly once.

    Each run continues at the end of the manifest. At the end, the command names queues with missing
    or damaged messages, and exits with 1. The default leaves out dead letters and names them.

    Examples:
    * `tidemill pipeline archive --to ./archive`
    * `tidemill pipeline archive --to ./archive -t '*' -t '%DLQ%*'`
    * `tidemill pipeline archive --to ./archive -t orders -t payments --every 1m`
    * `tidemill pipeline archive --to ./archive --gate archive --then-verify`
    """
    del config
    given = given_options(
        endpoints,
        topic,
        topic_pattern or EVERY_TOPIC,
        option,
        archivePath=to,
        readMode="broker",
        failOnDataLoss="false" if allow_loss else "true",
    )
    appended = run_job(
        _ARCHIVE,
        lambda jobs: jobs.append(
            _archive_settings(
                jobs,
                given,
                master,
                batch_rows=batch_rows,
                metrics_port=metrics_port,
                metrics_file=metrics_file,
                cluster=cluster,
                gate_group=gate,
                store_is_gone=store_is_gone,
            ),
            every_s=every,
            then_verify=then_verify,
        ),
        goes_on=True,
    )
    done, verified = appended.done, appended.verified
    if not done.rows and not done.wrong:
        typer.echo("nothing new", err=True)
    for sentence in (*done.over, *done.wrong):
        typer.echo(sentence)
    if verified is not None:
        _print_verification(verified)
    if not appended.is_well:
        raise typer.Exit(EXIT_DAMAGED)


def _print_verification(verified: Any) -> None:
    for sentence in verified.closed:
        typer.echo(f"sealed by its files alone: {sentence}", err=True)
    for sentence in verified.wrong:
        typer.echo(sentence)
    if verified.wrong:
        return
    if verified.unread:
        typer.echo(
            "archive, manifest and broker agree; all new messages are sealed now."
            f" {verified.unread:,} messages were sealed before; --all reads their files again",
            err=True,
        )
    else:
        typer.echo("archive, manifest and broker agree; all messages are sealed", err=True)


def archive_verify(
    to: To,
    endpoints: Endpoints = ENDPOINTS,
    master: Master = None,
    gate: Gate = "",
    store_is_gone: StoreIsGone = False,
    is_all: Annotated[
        bool, typer.Option("--all", help="Also read the files of sealed messages again.")
    ] = False,
    option: OptionPairs = None,
    config: Config = None,
) -> None:
    """Compare the archive with the brokers, and seal the messages that agree; else exit with 1.

    Sealed messages are not compared again. `--all` reads their files and checks their checksums.

    Messages that retention has removed are sealed by their files alone. `--store-is-gone` does the
    same for a store that was replaced, restored or deleted. Use it only if that is permanent, and
    after you have checked the address of the cluster.

    Examples:
    * `tidemill pipeline archive-verify --to ./archive`
    * `tidemill pipeline archive-verify --to ./archive --all`
    * `tidemill pipeline archive-verify --to ./archive --store-is-gone`
    """
    del config
    given = given_options(endpoints, None, EVERY_TOPIC, option, archivePath=to)
    verified = run_job(
        _ARCHIVE,
        lambda jobs: jobs.verify(
            _archive_settings(jobs, given, master, gate_group=gate, store_is_gone=store_is_gone),
            is_all=is_all,
        ),
    )
    _print_verification(verified)
    if verified.wrong:
        raise typer.Exit(EXIT_DAMAGED)


def archive_compact(to: To, master: Master = None, config: Config = None) -> None:
    """Combine the small files of each hour into larger ones.

    Example: tidemill pipeline archive-compact --to ./archive
    """
    del config
    given = given_options(ENDPOINTS, None, EVERY_TOPIC, None, archivePath=to)
    before, after = run_job(
        _ARCHIVE, lambda jobs: jobs.compact(_archive_settings(jobs, given, master))
    )
    typer.echo(f"{before} files became {after}; archive-vacuum deletes the old ones", err=True)


def archive_expire(
    to: To,
    days: Annotated[float, typer.Option(min=0, help="Largest age of messages, in days.")],
    topic: Annotated[
        list[str] | None,
        typer.Option("--topic", "-t", help="As in `archive`. Default: all that the archive has."),
    ] = None,
    option: OptionPairs = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the effect and change nothing.")
    ] = False,
    is_sure: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    config: Config = None,
) -> None:
    """Expire messages older than a number of days; reads no longer return them.

    `archive-vacuum` deletes their files a day later. Topics belong to no namespace, or to the one
    of `--option namespace=NAME`.

    * `tidemill pipeline archive-expire --to ./archive --days 90 --dry-run`
    * `tidemill pipeline archive-expire --to ./archive --days 90 -t orders`
    """
    del config
    given = given_options(ENDPOINTS, topic, EVERY_TOPIC, option, archivePath=to)
    before_ms = SystemClock().wall_ms() - round(days * _DAY_MS)
    found = run_job(
        _ARCHIVE,
        lambda jobs: jobs.look_expiring(_archive_settings(jobs, given, None), before_ms=before_ms),
    )
    what = f"{found.files:,} files with {found.rows:,} messages"
    if found.topics:
        what = f"{what} of {listed(found.topics)}, stored before {utc(before_ms)}"
    if dry_run:
        typer.echo(f"{what} would expire")
        return
    if found.files and not is_sure and sys.stdin.isatty():
        confirm(f"Expire {what}?")
    count = run_job(
        _ARCHIVE,
        lambda jobs: jobs.expire(_archive_settings(jobs, given, None), before_ms=before_ms),
    )
    typer.echo(f"{count} files expired; archive-vacuum deletes them after a day", err=True)


def archive_vacuum(to: To, config: Config = None) -> None:
    """Delete files that the manifest does not name, after a day.

    Example: tidemill pipeline archive-vacuum --to ./archive
    """
    del config
    given = given_options(ENDPOINTS, None, EVERY_TOPIC, None, archivePath=to)
    count, waiting = run_job(
        _ARCHIVE, lambda jobs: jobs.vacuum(_archive_settings(jobs, given, None))
    )
    more = ""
    if waiting.files:
        first = utc(waiting.first_due_at_ms)
        more = f"; {waiting.files:,} files wait for a day, the first of them until {first}"
    typer.echo(f"{count:,} files deleted{more}", err=True)
