"""`tidemill pipeline ...`: jobs on Spark, installed with `pip install tidemill-pipeline`.

Exit status: 0 done; 1 it could not be done, or an archive is not what it should be; 2 wrong usage,
or an audit or a measurement found what must not be; 3 the cluster cannot be reached.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn, TypeVar

import typer

from tidemill.common.clock import SystemClock
from tidemill.common.prompts import EXIT_REFUSED, EXIT_UNREACHABLE, EXIT_USAGE, confirm, fail
from tidemill.common.times import DURATION, INSTANT, instant_ms, seconds, utc
from tidemill_pipeline import errors
from tidemill_pipeline.priority import Priority, lower_priority
from tidemill_pipeline.signals import raise_on_sigterm

app = typer.Typer(no_args_is_help=True)


@app.callback()
def beside_brokers(
    priority: Annotated[
        Priority,
        typer.Option(
            envvar="TIDEMILL_PIPELINE_PRIORITY",
            help="Claim to this machine's processors: as everybody, little, or what is left over.",
        ),
    ] = Priority.LOW,
) -> None:
    """Archive, audit, measure and replay the messages of a cluster with Spark."""
    lower_priority(priority)


EXIT_FOUND = 2  # of an audit that found what must not be
EXIT_DAMAGED = 1  # as of `tidemill store`
EXIT_INTERRUPTED = 130  # as shells tell of who was ended by Ctrl-C
EXIT_TERMINATED = 143  # and by SIGTERM

R = TypeVar("R")


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Take the options that a file has as defaults: `to: ./archive`, `topic: [orders]`."""
    if path is None:
        return None
    import yaml

    try:
        found = yaml.safe_load(path.read_text("utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{path} is no mapping of options")
    # By the names that one would give on the command line.
    named = {
        word.removeprefix("--"): parameter
        for parameter in context.command.params
        for word in parameter.opts
        if word.startswith("--")
    }
    given = {}
    for name, value in found.items():
        parameter = named.get(str(name).replace("_", "-"))
        if parameter is None:
            near = difflib.get_close_matches(str(name).replace("_", "-"), named, n=1, cutoff=0.5)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise typer.BadParameter(f"{path}: this command has no option {name}{meant}")
        is_alone = getattr(parameter, "multiple", False) and not isinstance(value, list)
        given[parameter.name] = [value] if is_alone else value
    context.default_map = given
    return path


Config = Annotated[
    Path | None,
    typer.Option(callback=_read_config, is_eager=True, help="YAML with options of this command."),
]
Endpoints = Annotated[
    str, typer.Option(envvar="TIDEMILL_ENDPOINTS", help="Proxies, `host:port[,host:port]`.")
]
To = Annotated[str, typer.Option("--to", help="Folder, or s3a://bucket/path.")]
TopicNames = Annotated[
    list[str] | None, typer.Option("--topic", "-t", help="A topic; may be repeated. All, without.")
]
Pattern = Annotated[
    str, typer.Option("--topic-pattern", help="Regular expression of whole topic names.")
]
Master = Annotated[
    str | None,
    typer.Option(help="Of Spark; that of spark-submit, or local[*] on a machine of its own."),
]
OptionPairs = Annotated[
    list[str] | None,
    typer.Option("--option", "-O", help="More options of the source, as `tls.enabled=true`."),
]

MetricsFile = Annotated[
    str, typer.Option(help="File to write metrics to, for a textfile collector.")
]
ClusterName = Annotated[
    str, typer.Option(envvar="TIDEMILL_CLUSTER", help="Label of the metrics, as brokers have it.")
]

Gate = Annotated[
    str,
    typer.Option(
        metavar="GROUP", help="Brokers keep what is not sealed: their archive_gate_group."
    ),
]

StoreIsGone = Annotated[
    bool,
    typer.Option(
        "--store-is-gone",
        help="A broker group has another store, or is not there, and that is for good.",
    ),
]

ENDPOINTS = "127.0.0.1:8081"
EVERY_TOPIC = ".*"
CLUSTER = "tidemill"  # as processes are called whose settings say nothing


def _given(
    endpoints: str, topics: list[str] | None, pattern: str, more: list[str] | None, **own: str
) -> dict[str, str]:
    """Return options of the source."""
    given = {"endpoints": endpoints, **{name: value for name, value in own.items() if value}}
    if topics:
        given["topics"] = ",".join(topics)
    elif pattern:
        given["topicPattern"] = pattern
    return given | _pairs(more)


def _pairs(more: list[str] | None) -> dict[str, str]:
    """Return what `--option` says, by the names that jobs look for."""
    from tidemill_pipeline.options import spelt

    given = {}
    for pair in more or ():
        name, found, value = pair.partition("=")
        if not found:
            fail(f"--option {pair} is not name=value", EXIT_USAGE)
        given[spelt(name)] = value
    return given


def run_job(module: str, work: Callable[[Any], R], *, goes_on: bool = False) -> R:
    """Do a job with a module of the pipeline, and end with a sentence where it cannot.

    `goes_on`: one that is started again goes on where it was.
    """
    # PySpark forks to start Java, which handlers of gRPC break now and then.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    try:
        with raise_on_sigterm():
            _check_spark()
            return work(importlib.import_module(module))
    except KeyboardInterrupt as ended:
        by, status = (
            ("SIGTERM", EXIT_TERMINATED)
            if isinstance(ended, errors.Termination)
            else ("Ctrl-C", EXIT_INTERRUPTED)
        )
        again = ", and it goes on where it was" if goes_on else ""
        line = "\n" if sys.stderr.isatty() else ""  # That of the progress is left as it is.
        _end(f"ended by {by}: start it again{again}", status, before=line)
    except Exception as error:  # Spark wraps what a task has raised.
        told = errors.error_summary(error)
        if told is not None:
            statuses = {
                errors.NoAnswer.__name__: EXIT_UNREACHABLE,
                errors.BadOption.__name__: EXIT_USAGE,
            }
            fail(told[1], statuses.get(told[0], EXIT_REFUSED))
        if isinstance(error, OSError):  # A folder or a file that is not what it should be.
            fail(str(error), EXIT_REFUSED)
        raise


def _check_spark() -> None:
    try:
        importlib.import_module("tidemill_pipeline.session").check_spark()
    except ModuleNotFoundError as error:
        fail(f"{error}: pip install tidemill-pipeline", EXIT_REFUSED)
    except errors.PipelineError as error:
        fail(str(error), EXIT_REFUSED)


def _end(told: str, status: int, *, before: str) -> NoReturn:
    """End at once, without the interpreter's own end, which has been seen to wait for grpcio."""
    typer.echo(f"{before}error: {told}", err=True)
    sys.stdout.flush()
    os._exit(status)


_ARCHIVE = "tidemill_pipeline.jobs.archive_commands"
PERIOD_S_LEAST: Final = 1  # a round asks all broker groups where their queues end
_DAY_MS: Final = 86_400_000
_TOPICS_SHOWN: Final = 5


def _archive_settings(
    module: Any, given: dict[str, str], master: str | None, **more: object
) -> Any:
    return module.ArchiveSettings(given=given, master=master, **more)


def _period_s(given: str | float) -> float:
    """Read how long to wait between two rounds."""
    period_s = seconds(given)
    if period_s < PERIOD_S_LEAST:
        raise typer.BadParameter(f"{given} is shorter than {PERIOD_S_LEAST} s")
    return period_s


@app.command()
def archive(
    to: To,
    endpoints: Endpoints = ENDPOINTS,
    topic: TopicNames = None,
    topic_pattern: Pattern = "",
    master: Master = None,
    every: Annotated[
        float | None,
        typer.Option(parser=_period_s, metavar=DURATION, help="Go on, so long after each end."),
    ] = None,
    batch_rows: Annotated[
        int, typer.Option(min=1, help="Messages of one commit, and what a kill repeats.")
    ] = 1_000_000,
    allow_loss: Annotated[
        bool,
        typer.Option(
            "--allow-loss", help="Go on behind what went by retention, or with its topic."
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
        bool, typer.Option("--then-verify", help="Then do what archive-verify does, each time.")
    ] = False,
    option: OptionPairs = None,
    config: Config = None,
) -> None:
    """Copy what topics store into Parquet files, each message exactly once.

    Start it again whenever you like: it goes on where its manifest ends. Queues that it cannot go
    on with, for something of them is gone or damaged, are named at the end, with status 1.

    Examples:
    * `tidemill pipeline archive --to ./archive`
    * `tidemill pipeline archive --to ./archive -t orders -t payments --every 1m`
    * `tidemill pipeline archive --to ./archive --gate archive --then-verify`
    """
    del config
    given = _given(
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
        _tell_verified(verified)
    if not appended.is_well:
        raise typer.Exit(EXIT_DAMAGED)


def _tell_verified(verified: Any) -> None:
    for sentence in verified.closed:
        typer.echo(f"sealed by its files alone: {sentence}", err=True)
    for sentence in verified.wrong:
        typer.echo(sentence)
    if verified.wrong:
        return
    if verified.unread:
        typer.echo(
            "archive, manifest and broker agree; what was not sealed is sealed now, and"
            f" {verified.unread:,} messages were before: --all reads their files again",
            err=True,
        )
    else:
        typer.echo("archive, manifest and broker agree; all of it is sealed", err=True)


@app.command("archive-verify")
def archive_verify(
    to: To,
    endpoints: Endpoints = ENDPOINTS,
    master: Master = None,
    gate: Gate = "",
    allow_loss: Annotated[
        bool, typer.Option("--allow-loss", hidden=True, help="It was --store-is-gone.")
    ] = False,
    store_is_gone: StoreIsGone = False,
    is_all: Annotated[
        bool, typer.Option("--all", help="Read the files of what is sealed again, too.")
    ] = False,
    option: OptionPairs = None,
    config: Config = None,
) -> None:
    """Compare what is archived with the broker, and seal what agrees; status 1 where it does not.

    What is sealed is not looked at again, unless by `--all`: by its files and their checksums.

    With `--store-is-gone` what a store had that is another one now, was restored, or is not there
    is sealed by its files alone: say so when it is for good, and not the wrong cluster that is
    asked. What retention took is sealed so without a word.

    Examples:
    * `tidemill pipeline archive-verify --to ./archive`
    * `tidemill pipeline archive-verify --to ./archive --all`
    * `tidemill pipeline archive-verify --to ./archive --store-is-gone`
    """
    del config
    if allow_loss:
        fail(
            "archive-verify has no --allow-loss any more: what retention took is sealed without it,"
            " and what a store had that is not there any more with --store-is-gone",
            EXIT_USAGE,
        )
    given = _given(endpoints, None, EVERY_TOPIC, option, archivePath=to)
    verified = run_job(
        _ARCHIVE,
        lambda jobs: jobs.verify(
            _archive_settings(jobs, given, master, gate_group=gate, store_is_gone=store_is_gone),
            is_all=is_all,
        ),
    )
    _tell_verified(verified)
    if verified.wrong:
        raise typer.Exit(EXIT_DAMAGED)


@app.command("archive-compact")
def archive_compact(to: To, master: Master = None, config: Config = None) -> None:
    """Write the small files of each hour as larger ones.

    Example: tidemill pipeline archive-compact --to ./archive
    """
    del config
    given = _given(ENDPOINTS, None, EVERY_TOPIC, None, archivePath=to)
    before, after = run_job(
        _ARCHIVE, lambda jobs: jobs.compact(_archive_settings(jobs, given, master))
    )
    typer.echo(f"{before} files are {after} now; archive-vacuum deletes the old ones", err=True)


@app.command("archive-expire")
def archive_expire(
    to: To,
    days: Annotated[float, typer.Option(min=0, help="What is older goes.")],
    topic: TopicNames = None,
    option: OptionPairs = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go.")] = False,
    is_sure: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask, as on a terminal it does.")
    ] = False,
    config: Config = None,
) -> None:
    """Let go of what is older than so many days, which no read finds then.

    Its files are deleted by `archive-vacuum`, once that was a day ago. Topics that are named are
    those of no namespace, or of that of `--option namespace=NAME`.

    * `tidemill pipeline archive-expire --to ./archive --days 90 --dry-run`
    * `tidemill pipeline archive-expire --to ./archive --days 90 -t orders`
    """
    del config
    given = _given(ENDPOINTS, topic, EVERY_TOPIC, option, archivePath=to)
    before_ms = SystemClock().wall_ms() - round(days * _DAY_MS)
    found = run_job(
        _ARCHIVE,
        lambda jobs: jobs.look_expiring(_archive_settings(jobs, given, None), before_ms=before_ms),
    )
    what = f"{found.files:,} files with {found.rows:,} messages"
    if found.topics:
        what = f"{what} of {_listed(found.topics)}, stored before {utc(before_ms)}"
    if dry_run:
        typer.echo(f"{what} would be let go")
        return
    if found.files and not is_sure and sys.stdin.isatty():
        confirm(f"Let go of {what}?")
    count = run_job(
        _ARCHIVE,
        lambda jobs: jobs.expire(_archive_settings(jobs, given, None), before_ms=before_ms),
    )
    typer.echo(
        f"{count} files are let go; archive-vacuum deletes them once that was a day ago", err=True
    )


def _listed(topics: Sequence[str]) -> str:
    """Return names in a sentence; of many the first ones."""
    shown, more = ", ".join(topics[:_TOPICS_SHOWN]), len(topics) - _TOPICS_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


@app.command("archive-vacuum")
def archive_vacuum(to: To, config: Config = None) -> None:
    """Delete files that the manifest does not name, once they are a day old.

    Example: tidemill pipeline archive-vacuum --to ./archive
    """
    del config
    given = _given(ENDPOINTS, None, EVERY_TOPIC, None, archivePath=to)
    count, waiting = run_job(
        _ARCHIVE, lambda jobs: jobs.vacuum(_archive_settings(jobs, given, None))
    )
    more = ""
    if waiting.files:
        first = utc(waiting.first_due_at_ms)
        more = f"; {waiting.files:,} wait until a day has passed, the first of them until {first}"
    typer.echo(f"{count:,} files are deleted{more}", err=True)


@app.command()
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
            help="What is younger is not missed yet.",
        ),
    ] = 600,
    late_ms: Annotated[int, typer.Option(min=0, help="What fires later than this is late.")] = 1000,
    window: Annotated[str, typer.Option(help="Of the tables and curves.")] = "5 minutes",
    filtered_group: Annotated[
        list[str] | None, typer.Option(help="A group with a filter, which misses by right.")
    ] = None,
    metrics_file: MetricsFile = "",
    cluster: ClusterName = CLUSTER,
    master: Master = None,
    option: OptionPairs = None,
    config: Config = None,
) -> None:
    """Prove what was consumed against what was produced; status 2 where it is not as it should be.

    That is where messages are lost or early, or came in spite of their recall; and where a part of
    a broker's log cannot be read: what it tells nobody knows then.

    Ends in a table, and in a page with curves: DIR/audit/index.html.

    Example: tidemill pipeline audit --to ./audit -t orders --grace 0
    """
    del config
    given = _given(endpoints, topic, topic_pattern, option)
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
    _tell_audited(verdict)
    for sentence in verdict.unreadable:
        typer.echo(f"not seen: {sentence}", err=True)
    if verdict.is_incomplete:
        typer.echo("this audit is incomplete: what the logs tell there, nobody knows", err=True)
    if verdict.outstanding:
        typer.echo(f"not through yet, counted by group: {verdict.outstanding}", err=True)
    typer.echo(f"{to.rstrip('/')}/audit/index.html has the findings and the curves", err=True)
    if verdict.is_broken or verdict.is_incomplete:
        raise typer.Exit(EXIT_FOUND)


@app.command("delay-accuracy")
def delay_accuracy(
    to: To,
    endpoints: Endpoints = ENDPOINTS,
    topic: TopicNames = None,
    baseline: Annotated[
        str, typer.Option(help="Folder of an earlier run; status 2 where a P99 is worse.")
    ] = "",
    master: Master = None,
    metrics_file: MetricsFile = "",
    cluster: ClusterName = CLUSTER,
    option: OptionPairs = None,
    config: Config = None,
) -> None:
    """Say how late delayed messages were, by topic and by how long they had waited.

    Example: tidemill pipeline delay-accuracy --to ./accuracy
    """
    del config
    given = _given(endpoints, topic, "", option)
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
    _table(heads, [[band[n] for n in names] for band in measured.bands])
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
_OF_DELAYS: Final = frozenset({"scheduled", "fired", "recalled"})  # shown where there are any


def _tell_audited(verdict: Any) -> None:
    from tidemill_pipeline.jobs.verdict import count_of

    def cell(row: dict[str, Any], name: str) -> str:
        count = count_of(row, name)
        return "-" if count is None else f"{count:,}"

    rows = [row for row in verdict.totals if row["topic"] is not None]
    columns = [name for name in _SHOWN if name not in _OF_DELAYS or any(row[name] for row in rows)]
    typer.echo("", err=True)
    _table(
        ("TOPIC", "GROUP", *(name.upper().replace("_", " ") for name in columns)),
        [
            (row["topic"], row["consumer_group"] or "-", *(cell(row, name) for name in columns))
            for row in rows
        ],
    )
    _table(("FINDING", "COUNT"), [(kind, f"{n:,}") for kind, n in verdict.counts.items()])
    for sentence in verdict.broken:
        typer.echo(sentence)
    if verdict.sends is not None:
        typer.echo(str(verdict.sends), err=True)


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table whose columns are as wide as they must be."""
    lines = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())
    typer.echo("")


class ReplayTiming(StrEnum):
    """How replayed messages are spaced."""

    ASAP = "asap"
    ORIGINAL = "original"
    SCALED = "scaled"


@app.command()
def replay(
    source: Annotated[str, typer.Option("--from", metavar="DIR", help="The archive.")],
    into: Annotated[str, typer.Option(help="Topic that everything is sent to.")],
    state: Annotated[
        str, typer.Option(metavar="DIR", help="Remembers how far it is; a new one starts anew.")
    ],
    endpoints: Endpoints = ENDPOINTS,
    topic: TopicNames = None,
    topic_pattern: Pattern = "",
    since: Annotated[
        str | None, typer.Option(metavar=INSTANT, help="What was stored then or later.")
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar=INSTANT, help="What was stored before.")
    ] = None,
    timing: Annotated[
        ReplayTiming, typer.Option(help="At once, spaced as they were, or --speed times that.")
    ] = ReplayTiming.ASAP,
    speed: Annotated[float, typer.Option(min=0.001, help="With --timing scaled.")] = 1.0,
    rate: Annotated[
        float | None, typer.Option(min=0.1, help="Messages a second of one task.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="COLUMN=SQL", help="Send this of a column; may be repeated."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would send.")] = False,
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

    `--set` sends something else of a column, as an expression of Spark SQL says of the archived
    message; with `--dry-run` what becomes of it is counted and shown.

    Examples:
    * `tidemill pipeline replay --from ./archive --into again --state ./replay -t orders`
    * `tidemill pipeline replay --from ./archive --into again --state ./masked --set "tag=null"`
    """
    del config
    if speed != 1.0 and timing is not ReplayTiming.SCALED:
        fail(f"--speed {speed:g} is with --timing scaled", EXIT_USAGE)
    given = _given(endpoints, topic, topic_pattern or EVERY_TOPIC, None)
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
                more=_pairs(option),
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
    plan = replayed.plan
    whole = (
        f"{plan.rows:,} messages, stored from {utc(plan.first_stored_ms)} to"
        f" {utc(plan.last_stored_ms)}"
    )
    if dry_run:
        if replayed.left is None:
            typer.echo(f"{whole}, would be sent")
        else:
            typer.echo(f"{replayed.left:,} would be sent, what is left of a replay of {whole}")
            typer.echo("of a run that was ended in a batch some of it may have been sent", err=True)
        for effect in replayed.effects:
            for sentence in effect.sentences():
                typer.echo(sentence)
    else:
        typer.echo(f"{replayed.sent:,} messages are sent by this run, of a replay of {whole}")
        if replayed.late_ms:
            typer.echo(
                f"messages were sent up to {replayed.late_ms / 1000:,.1f} s after they were due:"
                " sending was slower than what is replayed, and what was due came at once",
                err=True,
            )
        if replayed.bad:
            fail(
                f"{replayed.bad:,} messages could not be sent: they are in the table of"
                " deadLetterPath, each with why, and a run that goes on leaves them out",
                EXIT_REFUSED,
            )


def _expressions(given: list[str] | None) -> dict[str, str]:
    """Return what `--set` says, by column."""
    found: dict[str, str] = {}
    for each in given or ():
        name, is_pair, text = (part.strip() for part in each.partition("="))
        if not (name and is_pair and text):
            fail(f"--set {each} is not COLUMN=SQL", EXIT_USAGE)
        if name in found:
            fail(f"--set {name} is given twice", EXIT_USAGE)
        found[name] = text
    return found


@app.command()
def prepare() -> None:
    """Have Java keep Spark's classes, so that Spark starts in less than half of the time.

    Once for a Python environment, a minute or two and 194 MB; again after another Java or PySpark,
    which does without until then.

    Example: tidemill pipeline prepare
    """
    path = run_job("tidemill_pipeline.jobs.preparing", lambda jobs: jobs.prepare())
    typer.echo(f"{path} has what Java keeps, {path.stat().st_size / 1e6:,.0f} MB", err=True)
