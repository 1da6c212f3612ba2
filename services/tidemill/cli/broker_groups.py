"""`tidemill broker-group ...`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from tidemill.cli.rest import (
    EXIT_REFUSED,
    Json,
    OutputFormat,
    call,
    check_is_sure,
    confirm,
    fail,
    options_of,
    say,
    segment,
    show,
)
from tidemill.cli.watching import watch

app = typer.Typer(
    no_args_is_help=True,
    help="""List, add, drain and remove broker groups.

A broker group is one log with its broker. Several share the messages of all topics; the home is
the one that decides about topics, consumer groups and the others. One that is to go is drained
first: it takes no new messages, and consumers empty it. Then it is removed.

* `tidemill broker-group add broker-3 10.0.0.7:10911`
* `tidemill broker-group drain broker-3 --wait`
* `tidemill broker-group remove broker-3`
""",
)

WAIT_S = 1.0  # between two looks whether a broker group is empty
COLUMNS = ("BROKER GROUP", "STATE", "ADDRESS", "EPOCH", "REACHABLE", "LEFT", "REASON")

Name = Annotated[str, typer.Argument(help="Name of the broker group, as `ls` shows it.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what it would do, and do nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@app.command("ls")
def list_broker_groups(context: typer.Context) -> None:
    """List the broker groups, the home first, and what is left at those that drain.

    Example: tidemill broker-group ls
    """
    groups = call(context, "GET", "/broker-groups")["items"]
    show(context, groups, COLUMNS, [_row(group) for group in groups])


@app.command("status")
def show_broker_group(
    context: typer.Context,
    name: Name,
    is_watched: Annotated[
        bool, typer.Option("--watch", "-w", help="Look again until it is empty, or Ctrl-C.")
    ] = False,
) -> None:
    """Show a broker group; of a draining one what is left there.

    Examples:
    * `tidemill broker-group status broker-1`
    * `tidemill broker-group status broker-1 --watch`
    """
    if not is_watched:
        _show(context, _get(context, name))
        return

    def look() -> bool:
        group = _get(context, name)
        _say_left(context, group)
        return group["state"] == "draining" and not _is_empty(group)

    watch(look, WAIT_S)


@app.command("add")
def add_broker_group(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The name that its broker was started with.")],
    address: Annotated[str, typer.Argument(help="host:port at which it serves the others.")],
) -> None:
    """Add a broker group, or take one back that drains; its store must have no topics of its own.

    Start its broker first: `tidemill broker --name broker-3 --data-dir DIR`. With another address
    it moves the broker group there.

    Example: tidemill broker-group add broker-3 10.0.0.7:10911
    """
    group = call(context, "PUT", f"/broker-groups/{segment(name)}", body={"address": address})
    say(context, group, f"broker group {name} at {group['address']} is a member{_but(group)}")


@app.command("drain")
def drain_broker_group(
    context: typer.Context,
    name: Name,
    is_waiting: Annotated[
        bool, typer.Option("--wait", help="End when it is empty; say what is left meanwhile.")
    ] = False,
    is_dry: DryRun = False,
    is_sure: Yes = False,
) -> None:
    """Let a broker group have no more new messages, so that it can be removed when it is empty.

    Consumers go on with what it has. Sends to message groups that have their place there are
    refused until it is removed. `tidemill broker-group add` takes it back.

    Examples:
    * `tidemill broker-group drain broker-1 --dry-run`
    * `tidemill broker-group drain broker-1 --wait --yes`
    """
    path = f"/broker-groups/{segment(name)}:drain"
    if is_dry:
        planned = call(context, "POST", path, query={"dryRun": "true"})
        say(context, planned, f"broker group {name} would take no more messages")
        return
    check_is_sure("broker-group drain", is_sure=is_sure)
    if not is_sure:
        call(context, "POST", path, query={"dryRun": "true"})
        confirm(
            f"Let {name} have no more messages? Message groups with a place there wait until it is"
            f" removed."
        )
    done = call(context, "POST", path)
    if not is_waiting:
        say(context, done, f"broker group {name} is draining: {_left(done['group'])}")
        return

    def look() -> bool:
        group = _get(context, name)
        _say_left(context, group)
        if group["state"] != "draining":
            fail(f"{name} was taken back: it is not draining any more", EXIT_REFUSED)
        return not _is_empty(group)

    watch(look, WAIT_S)


@app.command("remove")
def remove_broker_group(
    context: typer.Context, name: Name, is_dry: DryRun = False, is_sure: Yes = False
) -> None:
    """Remove a broker group that drains and is empty; its places go to the others.

    It says what is left where it is not empty. Its broker can be stopped afterwards. A consumer
    group that has never polled a topic there counts for nothing: what is older than its first poll
    is gone with the broker group. Let new consumers poll once before.

    Example: tidemill broker-group remove broker-1
    """
    path = f"/broker-groups/{segment(name)}"
    if not is_dry:
        check_is_sure("broker-group remove", is_sure=is_sure)
    if is_dry or not is_sure:
        planned = call(context, "DELETE", path, query={"dryRun": "true"})
        if is_dry:
            say(context, planned, f"broker group {name} would be removed: nothing is left there")
            return
        confirm(f"Remove broker group {name}?")
    call(context, "DELETE", path)
    say(context, {}, f"broker group {name} is removed; its broker may be stopped")


def _get(context: typer.Context, name: str) -> Json:
    return call(context, "GET", f"/broker-groups/{segment(name)}")


def _show(context: typer.Context, group: Json) -> None:
    rows = [
        ("state", group["state"]),
        ("home", "yes" if group["isHome"] else "no"),
        ("address", group["address"]),
        ("reachable", "yes" if group["reachable"] else "no"),
        ("master", group["master"]),
        ("epoch", group.get("epoch")),
        ("left", _left(group)),
        ("reason", group.get("reason")),
    ]
    show(context, group, ("BROKER GROUP", group["name"]), rows)


def _say_left(context: typer.Context, group: Json) -> None:
    if options_of(context).output is OutputFormat.JSON:
        say(context, group, "")
        return
    typer.echo(f"{time.strftime('%H:%M:%S')} {group['name']}: {_left(group)}{_but(group)}")


def _row(group: Json) -> tuple[object, ...]:
    return (
        group["name"] + (" (home)" if group["isHome"] else ""),
        group["state"],
        group["address"],
        group.get("epoch"),
        "yes" if group["reachable"] else "no",
        _left(group) if group["state"] == "draining" else None,
        group.get("reason"),
    )


def _left(group: Json) -> str:
    """Return in words what is left at a broker group."""
    if group["state"] != "draining":
        return "active, nothing is counted"
    if "left" not in group:
        return "draining, what is left is not known"
    left = group["left"]
    if _is_empty(group):
        return "empty: it can be removed"
    return f"{left['messages']} messages, {left['inFlight']} in flight, {left['delayed']} delayed"


def _is_empty(group: Json) -> bool:
    return "left" in group and not any(group["left"].values())


def _but(group: Json) -> str:
    return f"; {group['reason']}" if "reason" in group else ""
