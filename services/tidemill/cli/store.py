"""`tidemill store ...`: work on a data directory, without a broker and without the API.

The folder of a standalone with several broker groups holds one store per broker group: the store of
the home in the folder itself, the others in subfolders with their names. Every command handles all
stores.

Exit status: 0 sound or done, 1 damage is left or copied, 2 unreadable or wrong usage, 4 damaged.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from tidemill.cli.rest import check_is_sure, is_text, say, show
from tidemill.common.exit_codes import EXIT_PROBLEM, EXIT_REFUSED
from tidemill.common.private_files import make_private_folder
from tidemill.common.prompts import confirm, fail, warn
from tidemill.common.rest_client import Json
from tidemill.common.times import utc
from tidemill.security.secret_keys import KEY_FILE

if TYPE_CHECKING:
    from tidemill.broker.offline.check import CheckReport
    from tidemill.broker.offline.findings import AffectedMessage, Finding, WorkProgress
    from tidemill.broker.offline.rebuild import MendReport

app = typer.Typer(
    no_args_is_help=True, help="Check, copy, mend and delete a data directory without a broker."
)
T = TypeVar("T")
EXIT_DAMAGED = EXIT_REFUSED
EXIT_UNREADABLE = 2
AFFECTED_SHOWN = 20  # of one finding; JSON has all
# A folder with any of these is a store. The subfolders of a store have none of them.
OF_A_STORE = ("log", "checkpoint", "queues", "snapshots", "timer")
PROGRESS_PERIOD_S = 0.1

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="Data directory of a broker, as in --data-dir.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would be done, and change nothing.")
]


@app.command("check")
def check_store(context: typer.Context, directory: Directory) -> None:
    """Read all files, and report damage, the messages that it concerns, and the remedy.

    Changes nothing, and may run beside the broker. A derived file that is missing beside a sound
    log is a note. Exit status: 0 sound, 2 unreadable, 4 damaged.

    Example: tidemill store check ./data
    """
    reports = {}
    for store in _stores(directory):
        with _failures(store):
            reports[store] = _run(_check(store))
    if not is_text(context):
        found = [_report_json(*each) for each in reports.items()]
        rows = [(one["store"], one["state"], one["records"], len(one["findings"])) for one in found]
        columns = "STORE", "STATE", "RECORDS", "FINDINGS"
        show(context, _together(found), columns, rows, items=found)
    else:
        for store, report in reports.items():
            _print_report(store, report)
    is_sound = all(report.is_sound for report in reports.values())
    raise typer.Exit(0 if is_sound else EXIT_PROBLEM)


@app.command("copy")
def copy_store(
    context: typer.Context,
    directory: Directory,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="Empty or missing folder.")],
) -> None:
    """Make a consistent copy of a data directory as a backup, also while its brokers run.

    The copy has everything that was acknowledged before the command began. It is durable when the
    command ends. It has all broker groups of a standalone. Of brokers with their own folders, copy
    each folder, the home last. To restore, replace the data directory of a stopped broker by it.

    Example: tidemill store copy ./data /backup/monday
    """
    with _failures(directory):
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            fail(f"{target} is not empty; name an empty or missing folder", EXIT_UNREADABLE)
        if target.resolve().is_relative_to(directory.resolve()):
            fail(f"{target} is inside of {directory}; name another folder", EXIT_UNREADABLE)
    copied = []
    stores = _stores(directory)
    with _unfinished(target) if len(stores) > 1 else contextlib.nullcontext():
        # The home last: it would make members delete topics that it does not know.
        for store in reversed(stores):
            with _failures(store):
                copied.append(_copy_one(store, target / store.relative_to(directory)))
    _sync_above(target)
    if (directory / KEY_FILE).exists():
        warn(f"{KEY_FILE} is not in the copy: users need it, so keep it in another place")
    say(context, _together(copied), "\n".join(map(_copy_words, copied)))
    raise typer.Exit(EXIT_DAMAGED if any(one["damaged"] for one in copied) else 0)


@app.command("mend")
def mend_store(
    context: typer.Context,
    directory: Directory,
    backup: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="BACKUP",
            help="Copy or backup of the same store. Default: mend derived files alone.",
        ),
    ] = None,
    is_dry: DryRun = False,
    accepts_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss",
            help="Let the log end with the backup if the end of the store's own log is lost:"
            " acknowledged messages behind it may be lost (default: such damage is left).",
        ),
    ] = False,
) -> None:
    """Mend damaged segments of the log from a backup, and delete derived files to rebuild.

    Without a backup, damaged derived files are deleted if the log is sound. The next start rebuilds
    them. The broker must be stopped. Exit status: 0 no damage is left, 1 some is left, 2 the store
    cannot be read or a broker uses it.

    Examples:
    * `tidemill store mend ./data`
    * `tidemill store mend ./data --from /backup/monday --dry-run`
    """
    if backup is None and accepts_loss:
        raise typer.BadParameter("--accept-loss needs --from")
    with _failures(directory):
        if backup is not None and not backup.is_dir():
            fail(f"{backup} is not a folder", EXIT_UNREADABLE)
        if backup is not None and backup.resolve() == directory.resolve():
            fail(f"{backup} is the store itself", EXIT_UNREADABLE)
    stores = _stores(directory)
    reports = {} if backup is None else _missing_stores(directory, stores, backup)
    with _locked(stores):
        for store in stores:
            source = None if backup is None else backup / store.relative_to(directory)
            with _failures(store):
                if source is not None and source.is_dir():
                    reports[store] = _mend_one(
                        store, source, is_dry=is_dry, accepts_loss=accepts_loss
                    )
                    continue
                if source is not None:
                    warn(f"{backup} has no {source.name}: its log is not mended")
                reports[store] = _rebuild_one(store, is_dry=is_dry)
    _print_mended(context, reports, is_dry=is_dry)


@app.command("delete")
def delete_store(
    context: typer.Context,
    directory: Directory,
    is_dry: DryRun = False,
    is_sure: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a data directory with all its messages.

    A directory that a broker uses is refused, and one without a store. The file with the keys of
    secrets is deleted too: keep a copy of it if users shall have the same secrets again.

    Examples:
    * `tidemill store delete ./data --dry-run`
    * `tidemill store delete ./data`
    """
    with _failures(directory):
        stores = [store for store in _stores(directory) if _is_store(store)]
        if not stores:
            fail(f"{directory} is not the data directory of a broker", EXIT_UNREADABLE)
        files = [each for each in directory.rglob("*") if each.is_file()]
        size = sum(each.stat().st_size for each in files)
    loss = f"{directory} with {len(files)} files, {size / (1 << 20):.1f} MiB"
    answer = {"store": str(directory), "files": len(files), "bytes": size, "dryRun": is_dry}
    if not is_dry:
        check_is_sure("store delete", is_sure=is_sure)
    with _locked(stores):
        if not is_dry:
            if not is_sure:
                confirm(f"Delete {loss}?")
            with _failures(directory):
                shutil.rmtree(directory)
    say(context, answer, f"{loss} {'would be' if is_dry else 'is'} deleted")


# ---------------------------------------------------------------- one store of several


def _stores(directory: Path) -> list[Path]:
    """Return the folders of the stores in a data directory, the home's first."""
    with _failures(directory):
        members = [folder for folder in directory.iterdir() if _is_store(folder)]
    return [directory, *sorted(members)]


def _is_store(folder: Path) -> bool:
    """Whether a folder is the store of a broker, even one whose log is missing."""
    return any((folder / name).exists() for name in OF_A_STORE)


def _check(store: Path) -> Generator[WorkProgress, None, CheckReport]:
    from tidemill.broker.offline.check import check
    from tidemill.broker.offline.source import ReadOnlyDisk

    return check(ReadOnlyDisk(store))


def _copy_one(store: Path, target: Path) -> dict[str, Json]:
    from tidemill.broker.offline.copy import copy
    from tidemill.broker.offline.source import ReadOnlyDisk
    from tidemill.broker.posix_disk import PosixDisk

    report = _run(copy(ReadOnlyDisk(store), PosixDisk(target)))
    for damage in report.damaged:
        warn(f"{store}: copied with damage: {damage}")
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
    """Prevent brokers from starting in `target` until the block has succeeded.

    Without this, a copy that ends between two stores would start as members of a new, empty home.
    """
    from tidemill.broker.engine.store.segment import FOLDER
    from tidemill.broker.offline.copy import COPYING

    mark = target / FOLDER / f"unfinished{COPYING}"
    make_private_folder(target)
    make_private_folder(mark.parent)
    mark.touch()
    # The mark and the folders above it are durable before the first member.
    _sync_above(mark)
    yield
    mark.unlink()
    _sync_folder(mark.parent)


@contextlib.contextmanager
def _locked(stores: list[Path]) -> Iterator[None]:
    """Lock all stores, or fail if a broker uses one of them."""
    from tidemill.broker.data_dir import locked_data_dir
    from tidemill.common.lifecycle import StartError

    with contextlib.ExitStack() as locks:
        try:
            for store in stores:
                locks.enter_context(locked_data_dir(store))
        except StartError as error:
            fail(str(error).replace(", or choose another --data-dir", ""), EXIT_UNREADABLE)
        yield


def _mend_one(store: Path, backup: Path, *, is_dry: bool, accepts_loss: bool) -> MendReport:
    from tidemill.broker.offline.mend import mend
    from tidemill.broker.offline.source import ReadOnlyDisk
    from tidemill.broker.posix_disk import PosixDisk

    source = ReadOnlyDisk(backup)
    return _run(mend(PosixDisk(store), source, is_dry=is_dry, accepts_loss=accepts_loss))


def _rebuild_one(store: Path, *, is_dry: bool) -> MendReport:
    from tidemill.broker.offline.rebuild import rebuild
    from tidemill.broker.posix_disk import PosixDisk

    return _run(rebuild(PosixDisk(store), is_dry=is_dry))


def _missing_stores(directory: Path, stores: list[Path], backup: Path) -> dict[Path, MendReport]:
    """Return a report for each store of the backup that does not exist in the directory."""
    from tidemill.broker.offline.rebuild import MendReport

    members = _stores(backup)[1:]
    missing = [directory / one.name for one in members if directory / one.name not in stores]
    why = "the backup has this store, and the directory does not; copy the folder if it is needed"
    return {one: MendReport(left=[why]) for one in missing}


def _together(answers: list[dict[str, Json]]) -> Json:
    """Return the answer of a single store, or all answers in a list."""
    return answers[0] if len(answers) == 1 else {"stores": answers}


# ---------------------------------------------------------------- output


def _print_report(directory: Path, report: CheckReport) -> None:
    counted = f"{report.record_count} records from {report.log_from} to {report.log_end}"
    if report.is_sound:
        for note in report.findings:
            typer.echo(f"note: {note.file}: {note.detail}; the next start rebuilds it")
        typer.echo(f"{directory} is sound: {counted}")
        return
    for finding in report.findings:
        _print_finding(finding)
    typer.echo(f"{directory} is damaged in {len(report.findings)} ranges; {counted}")


def _print_finding(finding: Finding) -> None:
    from tidemill.broker.offline.findings import DAMAGE_DESCRIPTIONS

    meaning = DAMAGE_DESCRIPTIONS[finding.damage]
    where = f"byte {finding.position}"
    if finding.log_offset is not None:
        where += f", log offset {finding.log_offset}"
    if finding.size:
        where += f", {finding.size} bytes"
    typer.echo(f"{finding.file} ({where}): {finding.detail}")
    typer.echo(f"  means: {meaning.means}")
    for affected in finding.affected[:AFFECTED_SHOWN]:
        typer.echo(f"  concerns: {_sentence(affected)}")
    if len(finding.affected) > AFFECTED_SHOWN:
        typer.echo(f"  and {len(finding.affected) - AFFECTED_SHOWN} more; -o json lists all")
    if finding.stops_start:
        typer.echo("  the broker does not start over this damage")
    typer.echo(f"  remedy: {finding.remedy}")


def _sentence(affected: AffectedMessage) -> str:
    id_ = f"message {affected.message_id}" if affected.message_id else "a message"
    if not affected.topic:
        return id_
    text = (
        f"{id_}, topic {affected.topic}, queue {affected.queue_id}, offset {affected.queue_offset}"
    )
    if affected.timer is not None:
        timer = affected.timer
        due = f"due {utc(timer.due_at_ms)} on topic {timer.topic}"
        text += f"; timer {timer.timer_id} {timer.state.lower()}, {due}"
    return text


def _report_json(directory: Path, report: CheckReport) -> dict[str, Json]:
    shown = [_finding_json(finding) for finding in report.findings]
    return {
        "store": str(directory),
        "state": "sound" if report.is_sound else "damaged",
        "logFrom": report.log_from,
        "logTo": report.log_end,
        "records": report.record_count,
        "findings": [] if report.is_sound else shown,
        "notes": shown if report.is_sound else [],
    }


def _finding_json(finding: Finding) -> Json:
    from tidemill.broker.offline.findings import DAMAGE_DESCRIPTIONS

    meaning = DAMAGE_DESCRIPTIONS[finding.damage]
    fields = {
        "damage": finding.damage.value,
        "file": finding.file,
        "byte": finding.position,
        "size": finding.size,
        "logOffset": finding.log_offset,
        "detail": finding.detail,
        "means": meaning.means,
        "remedy": finding.remedy,
        "stopsStart": finding.stops_start,
        "concerns": [_camel(asdict(affected)) for affected in finding.affected],
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


def _print_mended(context: typer.Context, reports: dict[Path, MendReport], *, is_dry: bool) -> None:
    """Print what was mended and what is left, and exit."""
    answers: list[dict[str, Json]] = [
        {"store": str(store), "dryRun": is_dry, "mended": [*one.mended], "left": [*one.left]}
        for store, one in reports.items()
    ]
    would = "would be " if is_dry else ""
    lines = []
    for store, report in reports.items():
        lines += [f"{store}: {would}mended: {one}" for one in report.mended]
        lines += [f"{store}: not mended: {one}" for one in report.left]
        if not (report.mended or report.left):
            lines.append(f"{store}: nothing to mend")
    say(context, _together(answers), "\n".join(lines))
    is_whole = all(report.is_whole for report in reports.values())
    raise typer.Exit(0 if is_whole else EXIT_DAMAGED)


# ---------------------------------------------------------------- execution


@contextlib.contextmanager
def _failures(directory: Path) -> Iterator[None]:
    """Print why a store cannot be read, and exit."""
    from tidemill.broker.engine.layout.record import UnknownRecord
    from tidemill.broker.engine.store.disk import DiskFailed
    from tidemill.broker.offline.check import NoStore
    from tidemill.broker.offline.copy import CopyError

    if not directory.is_dir():
        fail(f"{directory} is not a folder", EXIT_UNREADABLE)
    try:
        yield
    except NoStore as error:
        fail(f"{directory}: {error}", EXIT_UNREADABLE)
    except (CopyError, DiskFailed) as error:
        fail(str(error), EXIT_UNREADABLE)
    except UnknownRecord as error:
        fail(
            f"{directory} has a {error}, which this version does not know; use the version that "
            "wrote it, or a later one",
            EXIT_UNREADABLE,
        )
    except OSError as error:
        fail(f"{error.filename or directory}: {error.strerror or error}", EXIT_UNREADABLE)


def _run(steps: Generator[WorkProgress, None, T]) -> T:
    """Run long work to its end; show its progress on a terminal."""
    is_terminal = sys.stderr.isatty()
    shown_at_s = 0.0
    try:
        while True:
            progress = next(steps)
            if is_terminal and time.monotonic() - shown_at_s > PROGRESS_PERIOD_S:
                shown_at_s = time.monotonic()
                sys.stderr.write(f"\r\x1b[K{_words(progress)}")
                sys.stderr.flush()
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        if is_terminal:
            sys.stderr.write("\r\x1b[K")


def _words(progress: WorkProgress) -> str:
    if not progress.total_bytes:
        return f"{progress.what} ..."
    share = 100 * progress.done_bytes // progress.total_bytes
    return f"{progress.what}: {progress.done_bytes >> 20} MiB, {share} %"


def _sync_above(folder: Path) -> None:
    """Make the names of a folder and of the folders above it durable."""
    for above in folder.resolve().parents:
        _sync_folder(above)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
