"""`tidemill store ...`: work on a data directory, without a broker and without the API.

Exit status: 0 sound or done, 1 damaged, 2 it cannot be read, or wrong usage.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from tidemill.cli.rest import Json, OutputFormat, fail, options_of, say, show
from tidemill.cli.times import utc

if TYPE_CHECKING:
    from tidemill.broker.offline.check import Report
    from tidemill.broker.offline.findings import Concern, Finding, Progress
    from tidemill.broker.offline.repair import RepairReport

app = typer.Typer(
    no_args_is_help=True,
    help="Check, copy and repair a data directory. Needs no running broker.",
)
T = TypeVar("T")
EXIT_DAMAGED = 1
EXIT_UNREADABLE = 2
CONCERNS_SHOWN = 20  # of one finding; JSON has all
TOLD_EVERY_S = 0.1  # how far long work has come

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="The data directory of a broker, as --data-dir.")
]


@app.command("check")
def check_store(context: typer.Context, directory: Directory) -> None:
    """Read everything, and say what is damaged, whom it concerns, and what can be done.

    Changes nothing, and may run beside the broker. Exit status: 0 sound, 1 damaged, 2 it cannot be
    read.

    Example: tidemill store check ./data
    """
    from tidemill.broker.offline.check import check
    from tidemill.broker.offline.source import ReadOnlyDisk

    with _told(directory):
        report = _watch(check(ReadOnlyDisk(directory)))
    answer = _report_json(directory, report)
    if options_of(context).output is OutputFormat.JSON:
        show(context, answer, (), ())
    else:
        _print_report(directory, report)
    raise typer.Exit(0 if report.is_sound else EXIT_DAMAGED)


@app.command("copy")
def copy_store(
    context: typer.Context,
    directory: Directory,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="Empty, or not there yet.")],
) -> None:
    """Copy a data directory consistently while its broker runs: a backup.

    The copy has everything that was answered with OK before the command began, and is durable when
    it says so. To restore, put it in the place of the data directory of a broker that is stopped.

    Example: tidemill store copy ./data /backup/monday
    """
    from tidemill.broker.offline.copy import copy
    from tidemill.broker.offline.source import ReadOnlyDisk
    from tidemill.broker.posix_disk import PosixDisk

    with _told(directory):
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            fail(f"{target} is not empty; name a folder that is, or is not there", EXIT_UNREADABLE)
        if target.resolve().is_relative_to(directory.resolve()):
            fail(f"{target} lies inside of {directory}", EXIT_UNREADABLE)
        report = _watch(copy(ReadOnlyDisk(directory), PosixDisk(target)))
        _sync_above(target)
    for damage in report.damaged:
        typer.echo(f"warning: copied as it is, though damaged: {damage}", err=True)
    answer = {
        "store": str(directory),
        "target": str(target),
        "logFrom": report.log_from,
        "logTo": report.log_end,
        "records": report.record_count,
        "bytes": report.copied_bytes,
        "files": report.file_count,
        "damaged": report.damaged,
    }
    say(
        context, answer,
        f"copied {report.record_count} records, {report.copied_bytes} bytes in "
        f"{report.file_count} files, to {target}",
    )  # fmt: skip
    raise typer.Exit(EXIT_DAMAGED if report.damaged else 0)


@app.command("repair")
def repair_store(
    context: typer.Context,
    directory: Directory,
    backup: Annotated[
        Path | None,
        typer.Option("--from", metavar="BACKUP", help="A copy or backup of the same store."),
    ] = None,
    is_dry: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done, and change nothing.")
    ] = False,
) -> None:
    """Take what is damaged in the log from a backup, and delete what a start makes again.

    The broker must be stopped. Only bytes that check are written. Exit status: 0 nothing damaged is
    left, 1 something is, 2 it cannot be read or a broker holds it.

    Examples:
    * `tidemill store repair ./data`
    * `tidemill store repair ./data --from /backup/monday --dry-run`
    """
    from tidemill.broker.data_dir import locked_data_dir
    from tidemill.broker.offline.repair import repair
    from tidemill.broker.offline.source import ReadOnlyDisk
    from tidemill.broker.posix_disk import PosixDisk
    from tidemill.common.lifecycle import StartRefused

    with _told(directory):
        if backup is not None and not backup.is_dir():
            fail(f"{backup} is not a folder", EXIT_UNREADABLE)
        if backup is not None and backup.resolve() == directory.resolve():
            fail(f"{backup} is the store itself", EXIT_UNREADABLE)
        source = None if backup is None else ReadOnlyDisk(backup)
        try:
            with locked_data_dir(directory):
                report = _watch(repair(PosixDisk(directory), source, is_dry=is_dry))
        except StartRefused as error:
            fail(str(error).replace(", or choose another --data-dir", ""), EXIT_UNREADABLE)
    _show_repair(context, directory, report, is_dry=is_dry)
    raise typer.Exit(0 if report.is_whole else EXIT_DAMAGED)


# ---------------------------------------------------------------- how it is shown


def _print_report(directory: Path, report: Report) -> None:
    counted = f"{report.record_count} records from {report.log_from} to {report.log_end}"
    if report.is_sound:
        typer.echo(f"{directory} is sound: {counted}")
        return
    for finding in report.findings:
        _print_finding(finding)
    typer.echo(f"{directory} is damaged in {len(report.findings)} places; {counted}")


def _print_finding(finding: Finding) -> None:
    from tidemill.broker.offline.findings import MEANINGS

    meaning = MEANINGS[finding.damage]
    where = f"byte {finding.position}"
    if finding.log_offset is not None:
        where += f", log offset {finding.log_offset}"
    if finding.size:
        where += f", {finding.size} bytes"
    typer.echo(f"{finding.file} ({where}): {finding.detail}")
    typer.echo(f"  means: {meaning.means}")
    for concern in finding.concerns[:CONCERNS_SHOWN]:
        typer.echo(f"  concerns: {_sentence(concern)}")
    if len(finding.concerns) > CONCERNS_SHOWN:
        typer.echo(f"  and {len(finding.concerns) - CONCERNS_SHOWN} more; -o json names them")
    if finding.stops_start:
        typer.echo("  the broker does not start before this is mended")
    typer.echo(f"  remedy: {meaning.remedy}")


def _sentence(concern: Concern) -> str:
    id_ = f"message {concern.message_id}" if concern.message_id else "a message"
    if not concern.topic:
        return id_
    told = f"{id_}, topic {concern.topic}, queue {concern.queue_id}, offset {concern.queue_offset}"
    if concern.timer is not None:
        timer = concern.timer
        due = f"due {utc(timer.due_at_ms)} on topic {timer.topic}"
        told += f"; timer {timer.timer_id} {timer.state.lower()}, {due}"
    return told


def _report_json(directory: Path, report: Report) -> Json:
    return {
        "store": str(directory),
        "state": "sound" if report.is_sound else "damaged",
        "logFrom": report.log_from,
        "logTo": report.log_end,
        "records": report.record_count,
        "findings": [_finding_json(finding) for finding in report.findings],
    }


def _finding_json(finding: Finding) -> Json:
    from tidemill.broker.offline.findings import MEANINGS

    meaning = MEANINGS[finding.damage]
    fields = {
        "damage": finding.damage.value,
        "file": finding.file,
        "byte": finding.position,
        "size": finding.size,
        "logOffset": finding.log_offset,
        "detail": finding.detail,
        "means": meaning.means,
        "remedy": meaning.remedy,
        "stopsStart": finding.stops_start,
        "concerns": [_camel(asdict(concern)) for concern in finding.concerns],
    }
    return {name: value for name, value in fields.items() if value is not None}


def _camel(fields: dict[str, Json]) -> Json:
    found = {}
    for name, value in fields.items():
        first, *rest = name.split("_")
        if value not in (None, ""):
            key = first + "".join(map(str.capitalize, rest))
            found[key] = _camel(value) if isinstance(value, dict) else value
    return found


def _show_repair(
    context: typer.Context, directory: Path, report: RepairReport, *, is_dry: bool
) -> None:
    answer = {
        "store": str(directory),
        "dryRun": is_dry,
        "mended": report.mended,
        "left": report.left,
    }
    would = "would be " if is_dry else ""
    lines = [f"{would}mended: {one}" for one in report.mended]
    lines += [f"left as it is: {one}" for one in report.left]
    say(context, answer, "\n".join(lines or [f"{directory}: nothing to repair"]))


# ---------------------------------------------------------------- how it runs


@contextlib.contextmanager
def _told(directory: Path) -> Iterator[None]:
    """Say what cannot be read, and exit."""
    from tidemill.broker.engine.layout.record import UnknownRecord
    from tidemill.broker.engine.store.disk import DiskFailed
    from tidemill.broker.offline.check import NoStore
    from tidemill.broker.offline.copy import CopyRefused

    if not directory.is_dir():
        fail(f"{directory} is not a folder", EXIT_UNREADABLE)
    try:
        yield
    except NoStore as error:
        fail(f"{directory}: {error}", EXIT_UNREADABLE)
    except (CopyRefused, DiskFailed) as error:
        fail(str(error), EXIT_UNREADABLE)
    except UnknownRecord as error:
        fail(
            f"{directory} holds a {error}, which this version does not know; use the version that "
            "wrote it, or a later one",
            EXIT_UNREADABLE,
        )
    except OSError as error:
        fail(f"{error.filename or directory}: {error.strerror or error}", EXIT_UNREADABLE)


def _watch(steps: Generator[Progress, None, T]) -> T:
    """Run long work to its end; tell a terminal how far it has come."""
    is_terminal = sys.stderr.isatty()
    told_at_s = 0.0
    try:
        while True:
            progress = next(steps)
            if is_terminal and time.monotonic() - told_at_s > TOLD_EVERY_S:
                told_at_s = time.monotonic()
                sys.stderr.write(f"\r\x1b[K{_words(progress)}")
                sys.stderr.flush()
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        if is_terminal:
            sys.stderr.write("\r\x1b[K")


def _words(progress: Progress) -> str:
    if not progress.total_bytes:
        return f"{progress.what} ..."
    share = 100 * progress.done_bytes // progress.total_bytes
    return f"{progress.what}: {progress.done_bytes >> 20} MiB, {share} %"


def _sync_above(folder: Path) -> None:
    """Make the name of a folder durable: it may be new, as may be those above it."""
    for above in folder.resolve().parents:
        fd = os.open(above, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
