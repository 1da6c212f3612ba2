"""`tidemill operation ...`."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import Annotated, Final

import typer

from tidemill.cli.numbers import UNKNOWN
from tidemill.cli.rest import (
    call,
    check_is_sure,
    connect,
    say,
    segment,
    show,
    warn_partial,
    warn_unreachable,
)
from tidemill.common.clock import SystemClock
from tidemill.common.exit_codes import EXIT_REFUSED, EXIT_UNREACHABLE
from tidemill.common.prompts import confirm, fail
from tidemill.common.rest_client import Json, RestOptionError, RestRejection
from tidemill.common.times import DURATION, age, duration_ms, from_now, span, utc
from tidemill.release.patient_rest import ForeignAnswer, PatientRestClient, WaitTimeout

app = typer.Typer(
    no_args_is_help=True,
    help="List, show, wait for and cancel operations: bulk changes that run in the background, such"
    " as `dead-letter replay --all`.",
)

POLL_S: Final = 0.5  # between two looks at an operation
PATIENCE_S: Final = 60.0  # while its broker group starts again or fails over


class OperationStateName(StrEnum):
    """The states of an operation."""

    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


Id = Annotated[str, typer.Argument(metavar="ID", help="Id, as `operation list` shows it.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the effect and change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

COLUMNS: Final = ("OPERATION", "STATE", "KIND", "GROUP/TOPIC", "DONE", "TOTAL", "AGE", "BY")


@app.command("list")
def list_operations(
    context: typer.Context,
    state: Annotated[
        OperationStateName | None,
        typer.Option(case_sensitive=False, help="Only in this state. Default: all."),
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, max=1_000, help="Maximum number of operations.")
    ] = 100,
) -> None:
    """List operations, the newest first. They are known for 7 days after their end.

    Example: tidemill operation list --state running
    """
    query = {"pageSize": str(limit)}
    if state is not None:
        query["state"] = state.name
    found = call(context, "GET", "/operations", query=query)
    now_ms = SystemClock().wall_ms()
    rows = [
        (
            one["id"],
            _words(one["state"]),
            _words(one["kind"]),
            one.get("group") or one.get("topic") or "",
            one["done"],
            one["total"],
            age(one["createdAtMs"], now_ms),
            one["by"],
        )
        for one in found["operations"]
    ]
    show(context, found["operations"], COLUMNS, rows)
    warn_unreachable(found)
    if "nextPageToken" in found:
        typer.echo(f"there are more than these {limit}; see --limit", err=True)


@app.command("show")
def show_operation(context: typer.Context, operation: Id) -> None:
    """Show an operation, its progress and its parts at the broker groups.

    Example: tidemill operation show broker-0:52326
    """
    shown = call(context, "GET", _path(operation))
    now_ms = SystemClock().wall_ms()
    eta_ms, ended_at_ms = shown.get("etaMs"), shown.get("endedAtMs")
    rate = shown.get("ratePerSecond")
    rows = [
        ("state", _words(shown["state"])),
        ("kind", _words(shown["kind"])),
        ("group", shown.get("group")),
        ("topic", shown.get("topic")),
        ("done", _progress(shown)),
        ("failed", shown.get("failed") or None),
        ("error", shown.get("error")),
        ("skipped", shown.get("skipped")),
        ("rate", None if rate is None else f"{rate} per second"),
        ("ends in", None if eta_ms is None else f"at least {span(eta_ms)}"),
        ("begun", f"{utc(shown['createdAtMs'])} ({from_now(shown['createdAtMs'], now_ms)})"),
        ("ended", None if ended_at_ms is None else utc(ended_at_ms)),
        ("by", shown.get("by", UNKNOWN)),
        *((f"part {part['broker']}", _part(part)) for part in shown["brokers"]),
        *((f"item {one['id']}", one["outcome"]) for one in shown.get("errors", [])),
    ]
    filled = [(name, value) for name, value in rows if value is not None]
    show(context, shown, ("OPERATION", operation), filled)
    warn_unreachable(shown)


@app.command("wait")
def wait_for_operation(
    context: typer.Context,
    operation: Id,
    timeout: Annotated[
        str | None,
        typer.Option(metavar=DURATION, help="Exit with 1 after this time. Default: no limit."),
    ] = None,
) -> None:
    """Wait until an operation ends. Exit with 1 if it failed or was cancelled.

    Exit with 3 if its broker group or the API is unreachable for 60 s.

    Example: tidemill operation wait broker-0:52326 --timeout 10m
    """
    ended = await_end(context, operation, None if timeout is None else duration_ms(timeout))
    say(context, ended, result_of(ended))
    if ended["state"] != "DONE":
        raise typer.Exit(EXIT_REFUSED)


@app.command("cancel")
def cancel_operation(
    context: typer.Context, operation: Id, is_dry: DryRun = False, is_sure: Yes = False
) -> None:
    """End an operation. Its completed items stay.

    Example: tidemill operation cancel broker-0:52326 --yes
    """
    path = f"{_path(operation)}:cancel"
    if not is_dry:
        check_is_sure("operation cancel", is_sure=is_sure)
    if is_dry or not is_sure:
        planned = call(context, "POST", path, query={"dryRun": "true"})["operation"]
        progress = f"{_progress(planned)} items are done"
        if is_dry:
            say(context, planned, f"operation {operation} would be cancelled: {progress}")
            warn_unreachable(planned)
            return
        confirm(f"{progress}. Cancel the others?")
    done = call(context, "POST", path)
    say(context, done, result_of(done["operation"]))
    for text in done.get("warnings", []):
        warn_partial(text)
    warn_unreachable(done, "if it has a part of the operation, the part may run; repeat the cancel")


def await_end(context: typer.Context, operation: str, timeout_ms: int | None = None) -> Json:
    """Return an operation when it has ended. Exit with 1 after the timeout.

    Exit with 3 if its state is unknown for PATIENCE_S, or until the timeout.
    """
    clock = SystemClock()
    end_ms = None if timeout_ms is None else clock.monotonic_ms() + timeout_ms
    while True:
        left_s = PATIENCE_S
        if end_ms is not None:
            left_s = max(min(PATIENCE_S, (end_ms - clock.monotonic_ms()) / 1_000), 0.0)
        shown = _look(context, operation, left_s)
        if shown["state"] != "RUNNING":
            return shown
        if end_ms is not None and clock.monotonic_ms() >= end_ms:
            progress = f"{_progress(shown)} items are done"
            warn_unreachable(shown)
            fail(f"operation {operation} still runs: {progress}", EXIT_REFUSED)
        time.sleep(POLL_S)


def _look(context: typer.Context, operation: str, patience_s: float) -> Json:
    """Return an operation. Repeat the call while a broker group or the API is unreachable."""
    client = PatientRestClient(
        connect(context), patience_s=patience_s, login_patience_s=0.0, pause_s=POLL_S
    )
    try:
        return client.call("GET", _path(operation))
    except WaitTimeout as error:
        fail(f"the state of operation {operation} is unknown: {error}", EXIT_UNREACHABLE)
    except (RestRejection, RestOptionError, ForeignAnswer):
        return call(context, "GET", _path(operation))  # It prints the reason.


def result_of(operation: Json) -> str:
    """Return in one line how far an operation is."""
    errors = [f": {one['error']}" for one in (operation, *operation["brokers"]) if "error" in one]
    progress = f"{_progress(operation)} items"
    if operation.get("failed"):
        progress += f", {operation['failed']} failed"
    return f"operation {operation['id']}: {_words(operation['state'])}, {progress}{''.join(errors)}"


def _progress(operation: Json) -> str:
    return f"{operation.get('done', UNKNOWN)} of {operation.get('total', UNKNOWN)}"


def _part(part: Json) -> str:
    text = f"{_words(part['state'])}, {part['done']} of {part['total']} ({part['id']})"
    return f"{text}: {part['error']}" if "error" in part else text


def _path(operation: str) -> str:
    return f"/operations/{segment(operation)}"


def _words(text: str) -> str:
    return text.lower().replace("_", " ")
