"""`tidemill pipeline ...`: jobs on Spark, installed with `pip install tidemill-pipeline`.

Exit status: 0 done; 1 failed, or an archive is damaged; 2 wrong usage, or an audit or a measurement
found an error; 3 the cluster is unreachable.
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
            help="Share of the processors of this machine: the usual one, a tenth, or idle time.",
        ),
    ] = Priority.LOW,
) -> None:
    """Archive, audit, measure and replay the messages of a cluster with Spark."""
    lower_priority(priority)


EXIT_FOUND = 2  # an audit found an error
EXIT_DAMAGED = 1  # the same as in `tidemill store`
EXIT_INTERRUPTED = 130  # Ctrl-C, as shells report it
EXIT_TERMINATED = 143  # SIGTERM, as shells report it

R = TypeVar("R")


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Use the options of a file as defaults: `to: ./archive`, `topic: [orders]`."""
    if path is None:
        return None
    import yaml

    try:
        found = yaml.safe_load(path.read_text("utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{path} does not contain `option: value` lines")
    # Keys are the names of the command line.
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
    list[str] | None, typer.Option("--topic", "-t", help="Topic; may be repeated. Default: all.")
]
Pattern = Annotated[
    str, typer.Option("--topic-pattern", help="Regular expression of whole topic names.")
]
Master = Annotated[
    str | None, typer.Option(help="Master of Spark. Default: that of spark-submit, else local[*].")
]
OptionPairs = Annotated[
    list[str] | None,
    typer.Option("--option", "-O", help="Option of the source, such as `tls.enabled=true`."),
]

MetricsFile = Annotated[
    str, typer.Option(help="File to write metrics to, for a textfile collector.")
]
ClusterName = Annotated[
    str, typer.Option(envvar="TIDEMILL_CLUSTER", help="Label `cluster` of the metrics.")
]

GateReporter = Annotated[
    str,
    typer.Option(
        metavar="GROUP", help="The archive_gate_group of brokers that keep unsealed messages."
    ),
]

StoreIsGone = Annotated[
    bool,
    typer.Option(
        "--store-is-gone", help="The store of a broker group was replaced or deleted for good."
    ),
]

ENDPOINTS = "127.0.0.1:8081"
EVERY_TOPIC = ".*"
CLUSTER = "tidemill"  # the default of all processes


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
    """Return the values of `--option` by name."""
    from tidemill_pipeline.option_table import spelt

    given = {}
    for pair in more or ():
        name, found, value = pair.partition("=")
        if not found:
            fail(f"--option {pair} is not name=value", EXIT_USAGE)
        given[spelt(name)] = value
    return given


def run_job(module: str, work: Callable[[Any], R], *, goes_on: bool = False) -> R:
    """Run a job of a module. After an error, print it and exit.

    `goes_on`: the next run continues where this one ended.
    """
    # PySpark forks to start Java, and fork handlers of gRPC sometimes break that.
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
        line = "\n" if sys.stderr.isatty() else ""  # keeps the line of progress
        _end(f"ended by {by}: start it again{again}", status, before=line)
    except Exception as error:  # Spark wraps the exception of a task.
        told = errors.error_summary(error)
        if told is not None:
            statuses = {
                errors.NoAnswer.__name__: EXIT_UNREACHABLE,
                errors.BadOption.__name__: EXIT_USAGE,
            }
            fail(told[1], statuses.get(told[0], EXIT_REFUSED))
        if isinstance(error, OSError):  # an error of a folder or file
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
    """Exit without the shutdown of the interpreter, which can hang in grpcio."""
    typer.echo(f"{before}error: {told}", err=True)
    sys.stdout.flush()
    os._exit(status)


_ARCHIVE = "tidemill_pipeline.jobs.archive_commands"
PERIOD_S_LEAST: Final = 1  # each round asks all broker groups for the ends of their queues
_DAY_MS: Final = 86_400_000
_TOPICS_SHOWN: Final = 5


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


@app.command()
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
    gate: GateReporter = "",
    then_verify: Annotated[
        bool, typer.Option("--then-verify", help="Run archive-verify after each round.")
    ] = False,
    option: OptionPairs = None,
    config: Config = None,
) -> None:
    """Copy messages into Parquet files, each message exactly once.

    Each run continues at the end of the manifest. At the end, the command names queues with missing
    or damaged messages, and exits with 1.

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
            "archive, manifest and broker agree; all new messages are sealed now."
            f" {verified.unread:,} messages were sealed before; --all reads their files again",
            err=True,
        )
    else:
        typer.echo("archive, manifest and broker agree; all messages are sealed", err=True)


@app.command("archive-verify")
def archive_verify(
    to: To,
    endpoints: Endpoints = ENDPOINTS,
    master: Master = None,
    gate: GateReporter = "",
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
    """Combine the small files of each hour into larger ones.

    Example: tidemill pipeline archive-compact --to ./archive
    """
    del config
    given = _given(ENDPOINTS, None, EVERY_TOPIC, None, archivePath=to)
    before, after = run_job(
        _ARCHIVE, lambda jobs: jobs.compact(_archive_settings(jobs, given, master))
    )
    typer.echo(f"{before} files became {after}; archive-vacuum deletes the old ones", err=True)


@app.command("archive-expire")
def archive_expire(
    to: To,
    days: Annotated[float, typer.Option(min=0, help="Age in days from which messages expire.")],
    topic: TopicNames = None,
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
        typer.echo(f"{what} would expire")
        return
    if found.files and not is_sure and sys.stdin.isatty():
        confirm(f"Expire {what}?")
    count = run_job(
        _ARCHIVE,
        lambda jobs: jobs.expire(_archive_settings(jobs, given, None), before_ms=before_ms),
    )
    typer.echo(f"{count} files expired; archive-vacuum deletes them after a day", err=True)


def _listed(topics: Sequence[str]) -> str:
    """Return names for a sentence; of many names the first ones."""
    shown, more = ", ".join(topics[:_TOPICS_SHOWN]), len(topics) - _TOPICS_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


@app.command("archive-vacuum")
def archive_vacuum(to: To, config: Config = None) -> None:
    """Delete files that the manifest does not name, after a day.

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
        more = f"; {waiting.files:,} files wait for a day, the first of them until {first}"
    typer.echo(f"{count:,} files deleted{more}", err=True)


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
            help="Age from which a missing message is a finding.",
        ),
    ] = 600,
    late_ms: Annotated[
        int, typer.Option(min=0, help="Delay in ms from which a timer is late.")
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
        typer.echo("this audit is incomplete: parts of the logs are unreadable", err=True)
    if verdict.outstanding:
        typer.echo(f"outstanding, counted by consumer group: {verdict.outstanding}", err=True)
    typer.echo(f"findings and charts: {to.rstrip('/')}/audit/index.html", err=True)
    if verdict.is_broken or verdict.is_incomplete:
        raise typer.Exit(EXIT_FOUND)


@app.command("delay-accuracy")
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
_OF_DELAYS: Final = frozenset({"scheduled", "fired", "recalled"})  # shown if not all are zero


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
    """Print a table with columns of the least width."""
    lines = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())
    typer.echo("")


class ReplayTiming(StrEnum):
    """Spacing of replayed messages."""

    ASAP = "asap"
    ORIGINAL = "original"
    SCALED = "scaled"


@app.command()
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


@app.command()
def prepare() -> None:
    """Let Java keep the classes of Spark, so that Spark starts in less than half of the time.

    Run it once per Python environment: it takes a minute or two, and 194 MB. Run it again after a
    change of Java or PySpark.

    Example: tidemill pipeline prepare
    """
    path = run_job("tidemill_pipeline.jobs.preparing", lambda jobs: jobs.prepare())
    typer.echo(f"wrote {path}, {path.stat().st_size / 1e6:,.0f} MB", err=True)
