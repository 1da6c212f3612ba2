"""`tidemill broker-group ...`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from tidemill.cli.rest import OutputFormat, call, check_is_sure, options_of, say, segment, show
from tidemill.cli.watching import watch
from tidemill.common.prompts import EXIT_REFUSED, confirm, fail
from tidemill.common.rest_client import Json
from tidemill.common.times import utc

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
    listed = call(context, "GET", "/broker-groups")
    show(context, listed, COLUMNS, [_row(group) for group in listed["items"]])


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
    is_forced: Annotated[
        bool, typer.Option("--force", help="Also where no broker of that name answers there.")
    ] = False,
    is_dry: DryRun = False,
    is_sure: Yes = False,
) -> None:
    """Add a broker group, or take one back that drains; its store must have no topics of its own.

    Start its broker first: `tidemill broker --name broker-3 --data-dir DIR`. With another address
    it moves the broker group there. A broker of that name has to answer at the address.

    Examples:
    * `tidemill broker-group add broker-3 10.0.0.7:10911`
    * `tidemill broker-group add broker-3 10.0.0.7:10911 --dry-run`
    """
    path, body = f"/broker-groups/{segment(name)}", {"address": address, "force": is_forced}
    if is_dry:
        planned = call(context, "PUT", path, body=body, query={"dryRun": "true"})
        say(context, planned, f"broker group {name} would be a member at {address}")
        return
    if is_forced:
        check_is_sure("broker-group add --force", is_sure=is_sure)
        if not is_sure:
            confirm(
                f"Add {name} though no broker of that name may answer at {address}? Messages of"
                f" message groups that get a place there are refused until one does."
            )
    done = call(context, "PUT", path, body=body)
    group = done["group"]
    say(context, done, f"broker group {name} at {group['address']} is a member{_but(group)}")


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
    context: typer.Context,
    name: Name,
    is_forced: Annotated[
        bool, typer.Option("--force", help="Give up what is left there, known or not.")
    ] = False,
    is_dry: DryRun = False,
    is_sure: Yes = False,
) -> None:
    """Remove a broker group that drains and is empty; its places go to the others.

    It says what is left where it is not empty, by topic and consumer group. A group has what is
    behind its position; one that has never polled anything may begin with any topic, so all there
    is counts for it: let it poll once, or delete it. One that pulls, as an archive does, has what
    is behind the offset that it told. Its broker can be stopped afterwards.

    With `--force` it is removed whatever is left, and also where it cannot be reached. What was
    left stays in its data directory, and comes back when it is added again: messages of message
    groups then come behind what was sent meanwhile.

    Examples:
    * `tidemill broker-group remove broker-1`
    * `tidemill broker-group remove broker-1 --force --dry-run`
    """
    path = f"/broker-groups/{segment(name)}"
    query = {"force": "true"} if is_forced else {}
    if not is_dry:
        check_is_sure("broker-group remove", is_sure=is_sure)
    if is_dry or not is_sure:
        planned = call(context, "DELETE", path, query=query | {"dryRun": "true"})
        given_up = _given_up(planned["group"])
        if is_dry:
            say(context, planned, f"broker group {name} would be removed: {given_up}")
            return
        confirm(f"Remove broker group {name}? {given_up[0].upper()}{given_up[1:]}.")
    done = call(context, "DELETE", path, query=query)
    if is_forced:
        text = f"broker group {name} is removed: {_given_up(done['group'])}"
        say(context, done, text)
        return
    say(context, {}, f"broker group {name} is removed; its broker may be stopped")


def _given_up(group: Json) -> str:
    """Return in words what a removal gives up."""
    if "left" in group:
        if _is_empty(group):
            return "nothing is left there"
        return f"{_counts(group['left'])} are given up{_items(group['left'])}"
    if "lastLeft" in group:
        last = group["lastLeft"]
        return (
            f"what is left there is given up, at {utc(last['atMs'])} that was"
            f" {_counts(last)}{_items(last)}"
        )
    return "what is left there is given up, and nobody knows what that is"


def _items(left: Json) -> str:
    """Return in words of which topics and groups something is left, as a part of a sentence."""
    named = _named_items(left)
    return f" ({'; '.join(named)})" if named else ""


def _named_items(left: Json) -> list[str]:
    named = [_named_item(item) for item in left["items"]]
    if left["unnamed"]:
        named.append(f"and {left['unnamed']} more")
    return named


def _named_item(item: Json) -> str:
    if (queue := item.get("pulledQueue")) is not None:
        place = f"{item['topic']}, queue {queue}"
        return f"{place} for {item['group']}: {item['messages']} (not pulled there yet)"
    return (
        f"{item['topic']} for {item.get('group', 'nobody')}: {item['messages'] + item['inFlight']}"
        + (" (not read there yet)" if item["unread"] and "group" in item else "")
    )


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
        *[("", line) for line in _lines(group)],
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
        return "what is left is not known"
    if _is_empty(group):
        return "empty: it can be removed"
    return _counts(group["left"])


def _lines(group: Json) -> list[str]:
    left = group.get("left") or group.get("lastLeft")
    return _named_items(left) if left else []


def _counts(left: Json) -> str:
    return f"{left['messages']} messages, {left['inFlight']} in flight, {left['delayed']} delayed"


def _is_empty(group: Json) -> bool:
    left = group.get("left")
    return left is not None and not any(left[key] for key in ("messages", "inFlight", "delayed"))


def _but(group: Json) -> str:
    return f"; {group['reason']}" if "reason" in group else ""
