"""`tidemill store ...`: work on a data directory, without a broker and without the API.

The folder of a standalone with several broker groups holds a store for each: the home's files lie
in it, those of the others in folders of it by their names. Every command takes all of them.

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

from tidemill.cli.rest import OutputFormat, options_of, say, show
from tidemill.common.prompts import fail, warn
from tidemill.common.rest_client import Json
from tidemill.common.times import utc

if TYPE_CHECKING:
    from tidemill.broker.offline.check import Report
    from tidemill.broker.offline.findings import Concern, Finding, Progress
    from tidemill.broker.offline.repair import RepairReport

app = typer.Typer(
    no_args_is_help=True, help="Check, copy and repair a data directory. Needs no running broker."
)
T = TypeVar("T")
EXIT_DAMAGED = 1
EXIT_UNREADABLE = 2
CONCERNS_SHOWN = 20  # of one finding; JSON has all
# Any of these in a folder, and it is a store; the folders of a store itself have none of them.
OF_A_STORE = ("log", "checkpoint", "queues", "snapshots", "timer")
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
    reports = {}
    for store in _stores(directory):
        with _told(store):
            reports[store] = _watch(_check(store))
    if options_of(context).output is OutputFormat.JSON:
        show(context, _together([_report_json(*each) for each in reports.items()]), (), ())
    else:
        for store, report in reports.items():
            _print_report(store, report)
    is_sound = all(report.is_sound for report in reports.values())
    raise typer.Exit(0 if is_sound else EXIT_DAMAGED)


@app.command("copy")
def copy_store(
    context: typer.Context,
    directory: Directory,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="Empty, or not there yet.")],
) -> None:
    """Copy a data directory consistently while its brokers run: a backup.

    The copy has everything that was answered with OK before the command began, and is durable when
    it says so. Of a standalone with several broker groups it has all of them; of brokers with
    folders of their own copy each, the home last. To restore, put it in the place of the data
    directory of a broker that is stopped.

    Example: tidemill store copy ./data /backup/monday
    """
    with _told(directory):
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            fail(f"{target} is not empty; name a folder that is, or is not there", EXIT_UNREADABLE)
        if target.resolve().is_relative_to(directory.resolve()):
            fail(f"{target} lies inside of {directory}", EXIT_UNREADABLE)
    copied = []
    stores = _stores(directory)
    with _unfinished(target) if len(stores) > 1 else contextlib.nullcontext():
        # The home last: members that know of more than it would be told to delete that.
        for store in reversed(stores):
            with _told(store):
                copied.append(_copy_one(store, target / store.relative_to(directory)))
    _sync_above(target)
    say(context, _together(copied), "\n".join(map(_copy_words, copied)))
    raise typer.Exit(EXIT_DAMAGED if any(one["damaged"] for one in copied) else 0)


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
    from tidemill.common.lifecycle import StartError

    with _told(directory):
        if backup is not None and not backup.is_dir():
            fail(f"{backup} is not a folder", EXIT_UNREADABLE)
        if backup is not None and backup.resolve() == directory.resolve():
            fail(f"{backup} is the store itself", EXIT_UNREADABLE)
    stores = _stores(directory)
    reports = _missing_stores(directory, stores, backup)
    with contextlib.ExitStack() as locks:
        try:
            for store in stores:
                locks.enter_context(locked_data_dir(store))
        except StartError as error:
            fail(str(error).replace(", or choose another --data-dir", ""), EXIT_UNREADABLE)
        for store in stores:
            source = None if backup is None else backup / store.relative_to(directory)
            if source is not None and not source.is_dir():
                warn(f"{backup} has no {source.name}: {store} is repaired from its own files")
                source = None
            with _told(store):
                reports[store] = _repair_one(store, source, is_dry=is_dry)
    answers = [_repair_json(store, report, is_dry=is_dry) for store, report in reports.items()]
    words = [_repair_words(store, report, is_dry=is_dry) for store, report in reports.items()]
    say(context, _together(answers), "\n".join(words))
    is_whole = all(report.is_whole for report in reports.values())
    raise typer.Exit(0 if is_whole else EXIT_DAMAGED)


# ---------------------------------------------------------------- one store of several


def _stores(directory: Path) -> list[Path]:
    """Return the folders of the stores in a data directory, the home's first."""
    with _told(directory):
        members = [folder for folder in directory.iterdir() if _is_store(folder)]
    return [directory, *sorted(members)]


def _is_store(folder: Path) -> bool:
    """Whether a broker has lived in a folder: also where its log is gone, that is a damaged one."""
    return any((folder / name).exists() for name in OF_A_STORE)


def _check(store: Path) -> Generator[Progress, None, Report]:
    from tidemill.broker.offline.check import check
    from tidemill.broker.offline.source import ReadOnlyDisk

    return check(ReadOnlyDisk(store))


def _copy_one(store: Path, target: Path) -> dict[str, Json]:
    from tidemill.broker.offline.copy import copy
    from tidemill.broker.offline.source import ReadOnlyDisk
    from tidemill.broker.posix_disk import PosixDisk

    report = _watch(copy(ReadOnlyDisk(store), PosixDisk(target)))
    for damage in report.damaged:
        warn(f"{store}: copied as it is, though damaged: {damage}")
    return {
        "store": str(store),
        "target": str(target),
        "logFrom": report.log_from,
        "logTo": report.log_end,
        "records": report.record_count,
        "bytes": report.copied_bytes,
        "files": report.file_count,
        "damaged": report.damaged,
    }


def _copy_words(copied: dict[str, Json]) -> str:
    return (
        f"copied {copied['records']} records, {copied['bytes']} bytes in {copied['files']} files,"
        f" to {copied['target']}"
    )


@contextlib.contextmanager
def _unfinished(target: Path) -> Iterator[None]:
    """Let no broker start in `target` before the block has ended well.

    Without this a copy that ends between two stores would start as members of a new, empty home.
    """
    from tidemill.broker.engine.store.segment import FOLDER
    from tidemill.broker.offline.copy import COPYING

    mark = target / FOLDER / f"unfinished{COPYING}"
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    # Durable before there is a member in it; the folders above by the same reason.
    _sync_above(mark)
    yield
    mark.unlink()
    _sync_folder(mark.parent)


def _repair_one(store: Path, backup: Path | None, *, is_dry: bool) -> RepairReport:
    from tidemill.broker.offline.repair import repair
    from tidemill.broker.offline.source import ReadOnlyDisk
    from tidemill.broker.posix_disk import PosixDisk

    source = None if backup is None else ReadOnlyDisk(backup)
    return _watch(repair(PosixDisk(store), source, is_dry=is_dry))


def _missing_stores(
    directory: Path, stores: list[Path], backup: Path | None
) -> dict[Path, RepairReport]:
    """Return a report for each store that the backup has and that is not there at all."""
    from tidemill.broker.offline.repair import RepairReport

    members = _stores(backup)[1:] if backup is not None else []
    missing = [directory / one.name for one in members if directory / one.name not in stores]
    why = "the backup has this store, and it is not there: if it was not removed, copy the folder"
    return {one: RepairReport(left=[why], is_whole=False) for one in missing}


def _together(answers: list[dict[str, Json]]) -> Json:
    """Return the answer of the one store there is, or all of them in a list."""
    return answers[0] if len(answers) == 1 else {"stores": answers}


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


def _report_json(directory: Path, report: Report) -> dict[str, Json]:
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


def _repair_json(store: Path, report: RepairReport, *, is_dry: bool) -> dict[str, Json]:
    return {"store": str(store), "dryRun": is_dry, "mended": report.mended, "left": report.left}


def _repair_words(store: Path, report: RepairReport, *, is_dry: bool) -> str:
    would = "would be " if is_dry else ""
    lines = [f"{store}: {would}mended: {one}" for one in report.mended]
    lines += [f"{store}: left as it is: {one}" for one in report.left]
    return "\n".join(lines or [f"{store}: nothing to repair"])


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
        _sync_folder(above)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
