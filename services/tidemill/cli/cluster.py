"""`tidemill cluster show`: the state of the cluster on one page."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from tidemill.cli.numbers import UNKNOWN, certificate_end, dead_numbers, number
from tidemill.cli.rest import call, is_text, show, show_table, warn_partial, warn_unreachable
from tidemill.common.clock import SystemClock
from tidemill.common.exit_codes import EXIT_PROBLEM
from tidemill.common.rest_client import Json
from tidemill.common.times import age, span, utc

app = typer.Typer(no_args_is_help=True, help="Show the state of the cluster.")

FINE: Final = "OK"
PROBLEM_COLUMNS: Final = ("PROBLEM", "SEVERITY", "OBJECT", "SINCE", "FINDING", "COMMAND")
BROKER_COLUMNS: Final = (
    *("BROKER GROUP", "STATE", "MASTER", "EPOCH", "IN SYNC", "REACHABLE", "DISK", "FULL IN"),
)
GROUP_COLUMNS: Final = ("GROUP", "LAG", "OLDEST", "IN/S", "OUT/S", "CONSUMERS", "DEAD", "DEAD 1H")
TOPIC_COLUMNS: Final = ("TOPIC", "BYTES", "MESSAGES", "IN/S", "OUT/S")
CERTIFICATE_COLUMNS: Final = ("PROCESS", "CERTIFICATE", "EXPIRES", "LEFT")


@app.command("show")
def show_cluster(
    context: typer.Context,
    is_check: Annotated[
        bool, typer.Option("--check", help="Exit with 4 if there is a problem.")
    ] = False,
) -> None:
    """Show problems, broker groups, certificates, groups furthest behind, and the largest topics.

    With --check, the exit status is 4 if there is a problem, and 5 if a part is unknown. Open dead
    letters are notices, which do not change the exit status.

    Examples:
    * `tidemill cluster show`
    * `tidemill cluster show --check`
    """
    found = call(context, "GET", "/overview")
    hidden = call(context, "GET", "/session").get("hidden", ())
    problems = [_problem_row(each) for each in found["problems"]]
    show(context, found, PROBLEM_COLUMNS, problems)
    if is_text(context):
        status = "unknown" if hidden and found["status"] == FINE else found["status"]
        typer.echo(f"\nStatus: {status}")
        _show_parts(context, found, SystemClock().wall_ms())
    warn_unreachable(found)
    if hidden:
        warn_partial(f"the user of this command may not see all {', '.join(hidden)}")
    unanswered = found.get("unanswered")
    if unanswered:
        warn_partial(f"no answer within two seconds: {', '.join(unanswered)}")
    if is_check and found["status"] != FINE:
        raise typer.Exit(EXIT_PROBLEM)


def _show_parts(context: typer.Context, found: Json, now_ms: int) -> None:
    """Print the parts that the user may see."""
    disks = {each["broker"]: each for each in found.get("disks") or ()}
    tables = (
        (BROKER_COLUMNS, [_broker_row(each, disks) for each in found.get("brokerGroups") or ()]),
        (
            CERTIFICATE_COLUMNS,
            [_certificate_row(each, now_ms) for each in found.get("certificates") or ()],
        ),
        (GROUP_COLUMNS, [_group_row(each, now_ms) for each in found.get("groups") or ()]),
        (TOPIC_COLUMNS, [_topic_row(each) for each in found.get("topics") or ()]),
    )
    for columns, rows in tables:
        if rows:
            typer.echo()
            show_table(context, columns, rows)


def _problem_row(problem: Json) -> tuple[object, ...]:
    since = span(problem["sinceMs"]) if "sinceMs" in problem else None
    severity = problem.get("severity", UNKNOWN)  # An older admin process has none.
    return (
        *(problem["code"], severity, problem["object"]),
        *(since, problem["text"], problem["command"]),
    )


def _broker_row(group: Json, disks: dict[str, Json]) -> tuple[object, ...]:
    disk = disks.get(group["name"])
    used = UNKNOWN
    if disk is not None:
        used = f"{1 - disk['freeBytes'] / max(disk['totalBytes'], 1):.0%}"
        used += " FULL" if disk["isFull"] else ""
    replicas = group["replicas"]
    return (
        group["name"] + (" (home)" if group["isHome"] else ""),
        group["state"],
        group["master"],
        group.get("epoch"),
        f"{sum(each['inSync'] for each in replicas)}/{len(replicas)}" if replicas else "",
        "yes" if group["reachable"] else "NO",
        used,
        _full_in(disk),
    )


def _certificate_row(certificate: Json, now_ms: int) -> tuple[object, ...]:
    end = certificate_end(certificate, now_ms)
    expires_at_ms = certificate.get("expiresAtMs")
    expires = UNKNOWN if expires_at_ms is None else utc(expires_at_ms)
    return (certificate["process"], certificate.get("use", UNKNOWN), expires, end)


def _full_in(disk: Json | None) -> str:
    """Return when a disk is full."""
    if disk is None or "fullInMs" not in disk:
        return UNKNOWN
    return span(disk["fullInMs"])


def _group_row(group: Json, now_ms: int) -> tuple[object, ...]:
    return (
        group["name"],
        number(group.get("lag")),
        age(group.get("oldestUnackedAtMs"), now_ms) if "lag" in group else UNKNOWN,
        number(group.get("inPerSecond")),
        number(group.get("outPerSecond")),
        number(group.get("consumers")),
        *dead_numbers(group),
    )


def _topic_row(topic: Json) -> tuple[object, ...]:
    fields = ("bytes", "messages", "inPerSecond", "outPerSecond")
    return (topic["name"], *(number(topic.get(each)) for each in fields))
