"""`tidemill replica ...`."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from tidemill.cli.broker_group_options import DRY_QUERY, DryRun, YesOnTerminal, is_asked
from tidemill.cli.completion_names import complete_broker_group
from tidemill.cli.rest import call, say, segment, show
from tidemill.common.exit_codes import EXIT_REFUSED, EXIT_USAGE
from tidemill.common.prompts import confirm, fail
from tidemill.common.rest_client import Json
from tidemill.common.times import span

app = typer.Typer(
    no_args_is_help=True,
    help="""List, show, drain and undrain replicas.

A broker group can have several replicas of one log. One of them is the master. Replicas in sync
have all acknowledged messages, and one of them takes over when the master fails.

* `tidemill replica list`
* `tidemill replica drain broker-0-1`
""",
)

COLUMNS: Final = ("REPLICA", "BROKER GROUP", "ROLE", "ADDRESS", "EPOCH", "LAG", "SILENT", "ALARM")

Replica = Annotated[str, typer.Argument(help="Broker group and number, such as broker-0-1.")]


@app.command("list")
def list_replicas(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(help="Broker group. Default: all.", autocompletion=complete_broker_group),
    ] = "",
) -> None:
    """List replicas: role, sync state and lag. The first one of a broker group has its alarm.

    Examples:
    * `tidemill replica list`
    * `tidemill replica list broker-0 -o json`
    """
    if name:
        answer = call(context, "GET", f"/replicas/{segment(name)}")
        groups = [answer]
    else:
        answer = call(context, "GET", "/replicas")
        groups = answer["items"]
    rows = [row for group in groups for row in _rows(group)]
    items = [{"brokerGroup": group["name"], **one} for group in groups for one in group["replicas"]]
    show(context, answer, COLUMNS, rows, items=items)


@app.command("show")
def show_replica(context: typer.Context, replica: Replica) -> None:
    """Show a replica: role, sync state and lag.

    Example: tidemill replica show broker-0-1
    """
    name, number = _parts(replica)
    group = call(context, "GET", f"/replicas/{segment(name)}")
    found = _find(group, name, number)
    row = (*_row(group, found), group.get("alarm") or group.get("notice"))
    rows = [(column.lower(), cell) for column, cell in zip(COLUMNS, row, strict=True)]
    show(context, found, ("REPLICA", replica), rows[1:])


@app.command("drain")
def drain_replica(
    context: typer.Context, replica: Replica, is_dry: DryRun = False, is_sure: YesOnTerminal = False
) -> None:
    """Retire one replica, before its machine or pod is removed.

    A master hands over first. Afterwards no send waits for the replica. It continues to copy the
    log, so `tidemill replica undrain` takes a moment. `tidemill replica list` shows it as retired.
    The command is rejected if too few replicas would remain. To drain a whole broker group, use
    `tidemill broker-group drain`.

    Example: tidemill replica drain broker-0-1
    """
    name, number = _parts(replica)
    if is_dry or is_asked(is_sure=is_sure):
        effect = _plan(context, name, number, undo=False, is_dry=is_dry)
        if is_dry:
            return
        confirm(f"{effect}. Retire it?")
    done, role = _change(context, name, number, undo=False)
    if role == "retired":
        result = "is retired; it can be removed"
    elif role == "master":
        result = "hands over; it retires when another replica is master"
    else:
        result = "retires when the other replicas no longer need it"
    say(context, done, f"replica {number} of broker group {name} {result}")


@app.command("undrain")
def undrain_replica(context: typer.Context, replica: Replica, is_dry: DryRun = False) -> None:
    """Make a drained replica a full replica again.

    Example: tidemill replica undrain broker-0-1
    """
    name, number = _parts(replica)
    if is_dry:
        _plan(context, name, number, undo=True, is_dry=True)
        return
    done, role = _change(context, name, number, undo=True)
    if role in {"in-sync", "master"}:
        result = "is a full replica in sync"  # It was not drained, or the drain had not begun.
    else:
        result = "is a full replica again when it has caught up"
    say(context, done, f"replica {number} of broker group {name} {result}")


def _plan(context: typer.Context, name: str, number: int, *, undo: bool, is_dry: bool) -> str:
    """Return the effect of a change of a replica. In a dry run, print it."""
    planned, role = _change(
        context, name, number, undo=undo, is_dry=True, is_for_question=not is_dry
    )
    is_master = role == "master" and not undo
    first = "hand over first, and then " if is_master else ""
    change = "become a full replica again" if undo else "retire"
    effect = f"replica {number} of broker group {name} would {first}{change}; no message is lost"
    if is_dry:
        say(context, planned, effect)
    return effect


def _change(
    context: typer.Context,
    name: str,
    number: int,
    *,
    undo: bool,
    is_dry: bool = False,
    is_for_question: bool = False,
) -> tuple[Json, str]:
    """Drain or undrain a replica. Return its broker group, and its role."""
    body: Json = {"replica": number, "undo": undo}
    path = f"/replicas/{segment(name)}:drain"
    query = DRY_QUERY if is_dry else None
    done = call(context, "POST", path, body=body, query=query, is_for_question=is_for_question)
    return done, next((one["role"] for one in done["replicas"] if one["replica"] == number), "")


def _parts(replica: str) -> tuple[str, int]:
    """Return the broker group and the number of a replica. Ends the command if it has none."""
    name, dash, number = replica.rpartition("-")
    if not (dash and name and number.isdecimal()):
        fail(f"{replica} is not a replica; give group and number, such as broker-0-1", EXIT_USAGE)
    return name, int(number)


def _find(group: Json, name: str, number: int) -> Json:
    """Return a replica of a broker group. Ends the command if it is missing."""
    found = next((one for one in group["replicas"] if one["replica"] == number), None)
    if found is None:
        fail(f"broker group {name} has no replica {number}", EXIT_REFUSED)
    return found


def _rows(group: Json) -> list[tuple[object, ...]]:
    """Return a row per replica; the alarm of the group stands in the first row."""
    alarm = group.get("alarm") or group.get("notice", "")
    if not group["replicas"]:
        return [("", group["name"], "", "", group["epoch"], "", "", alarm)]
    rows = [_row(group, one) for one in group["replicas"]]
    return [(*row, "" if number else alarm) for number, row in enumerate(rows)]


def _row(group: Json, one: Json) -> tuple[object, ...]:
    return (
        f"{group['name']}-{one['replica']}",
        group["name"],
        _role(one),
        one["address"],
        group["epoch"],
        f"{one['lagBytes']} B" if "lagBytes" in one else "unknown",
        span(one["silentMs"]),
    )


def _role(one: Json) -> str:
    notes = ["unclean"] if one["unclean"] else []
    if "retired" in one and one["role"] != "retired":
        notes.append("to be retired")
    if one["diverged"]:
        notes.append("DIVERGED")
    if one["full"]:
        notes.append("DISK FULL")
    if one["unheard"]:
        notes.append(f"does not hear {' and '.join(map(str, one['unheard']))}")
    return ", ".join([one["role"], *notes])
