"""`tidemill broker-group ...`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from tidemill.cli.broker_group_options import DRY_QUERY, DryRun, Name, Yes
from tidemill.cli.masters import set_broker_group, show_history, transfer_master
from tidemill.cli.rest import call, check_is_sure, is_text, say, segment, show
from tidemill.cli.watching import watch
from tidemill.common.exit_codes import EXIT_REFUSED
from tidemill.common.prompts import confirm, fail
from tidemill.common.rest_client import Json
from tidemill.common.times import span, utc

app = typer.Typer(
    no_args_is_help=True,
    help="""List, show, add, change, drain and remove broker groups, and move their masters.

A broker group is one log. Several broker groups share the messages of all topics. The home decides
about topics, consumer groups and the list of broker groups. To remove a broker group, drain it
first: it stores no new messages, and consumers empty it.

* `tidemill broker-group add broker-3 10.0.0.7:10911`
* `tidemill broker-group drain broker-3 --wait`
* `tidemill broker-group remove broker-3`
""",
)

WAIT_S = 1.0  # between two checks of a draining broker group
COLUMNS = ("BROKER GROUP", "STATE", "ADDRESS", "EPOCH", "REACHABLE", "SILENT", "LEFT", "REASON")

app.command("set")(set_broker_group)
app.command("transfer")(transfer_master)
app.command("history")(show_history)


@app.command("list")
def list_broker_groups(context: typer.Context) -> None:
    """List the broker groups, the home first, with the backlog of draining ones.

    Example: tidemill broker-group list
    """
    listed = call(context, "GET", "/broker-groups")
    groups = listed["items"]
    rows = [_row(group) for group in groups]
    show(context, listed, COLUMNS, rows, names=[group["name"] for group in groups])


@app.command("show")
def show_broker_group(context: typer.Context, name: Name) -> None:
    """Show a broker group, and its backlog if it is draining.

    Example: tidemill broker-group show broker-1
    """
    _show(context, _get(context, name))


@app.command("add")
def add_broker_group(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name that its broker was started with.")],
    address: Annotated[str, typer.Argument(help="host:port of its broker for other processes.")],
    is_forced: Annotated[
        bool, typer.Option("--force", help="Add it even if no broker of this name answers there.")
    ] = False,
    is_dry: DryRun = False,
    is_sure: Yes = False,
) -> None:
    """Add a broker group without topics, or end the drain of one.

    Start its broker first: `tidemill broker --name broker-3 --data-dir DIR`. A broker of this name
    must answer at the address. For a member, another address moves it there.

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
                f"Add {name} even if no broker of this name answers at {address}? Until one does,"
                f" messages of the message groups that are placed there are rejected."
            )
    done = call(context, "PUT", path, body=body)
    group = done["group"]
    say(context, done, f"broker group {name} at {group['address']} is a member{_but(group)}")


@app.command("drain")
def drain_broker_group(
    context: typer.Context,
    name: Name,
    is_waiting: Annotated[
        bool, typer.Option("--wait", help="Wait until it is empty, and print its backlog.")
    ] = False,
    is_dry: DryRun = False,
    is_sure: Yes = False,
) -> None:
    """Stop new messages to a broker group, so that it can be removed when it is empty.

    Consumers continue to receive its messages. Until it is removed, these sends are rejected:
    * to message groups that are placed there
    * with a dedup key that it owns, also repeats. Right after the drain, give the keys of each
      topic with deduplication to other owners: `tidemill topic spread TOPIC`.

    `tidemill broker-group undrain` ends the drain.

    Examples:
    * `tidemill broker-group drain broker-1 --dry-run`
    * `tidemill broker-group drain broker-1 --wait --yes`
    """
    path = f"/broker-groups/{segment(name)}:drain"
    if is_dry:
        planned = call(context, "POST", path, query={"dryRun": "true"})
        say(context, planned, f"broker group {name} would store no new messages")
        return
    check_is_sure("broker-group drain", is_sure=is_sure)
    if not is_sure:
        call(context, "POST", path, query={"dryRun": "true"})
        confirm(
            f"Stop new messages to {name}? Until it is removed, sends to message groups that are"
            f" placed there are rejected. Sends with its dedup keys are rejected until `tidemill"
            f" topic spread` gives the keys of each topic to other owners."
        )
    done = call(context, "POST", path)
    if not is_waiting:
        say(context, done, f"broker group {name} is draining: {_backlog_text(done['group'])}")
        return

    def look() -> bool:
        group = _get(context, name)
        _print_backlog(context, group)
        if group["state"] != "draining":
            fail(f"the drain of {name} was ended by another command", EXIT_REFUSED)
        return not _is_empty(group)

    watch(look, WAIT_S)


@app.command("undrain")
def undrain_broker_group(context: typer.Context, name: Name, is_dry: DryRun = False) -> None:
    """Let a draining broker group store new messages again.

    Example: tidemill broker-group undrain broker-1
    """
    group = _get(context, name)
    if group["state"] != "draining":
        say(context, group, f"broker group {name} is not draining, unchanged")
        return
    query = {"dryRun": "true"} if is_dry else {}
    body = {"address": group["address"]}
    done = call(context, "PUT", f"/broker-groups/{segment(name)}", body=body, query=query)
    verb = "would store" if is_dry else "stores"
    say(context, done, f"broker group {name} {verb} new messages again{_but(done['group'])}")


@app.command("remove")
def remove_broker_group(
    context: typer.Context,
    name: Name,
    is_forced: Annotated[
        bool, typer.Option("--force", help="Give up its backlog, even an unknown one.")
    ] = False,
    is_record_only: Annotated[
        bool,
        typer.Option("--record-only", help="Delete what controllers know of its ended replicas."),
    ] = False,
    is_dry: DryRun = False,
    is_sure: Yes = False,
) -> None:
    """Remove a draining, empty broker group; its message groups move to the others.

    If it is not empty, the command prints its backlog by topic and consumer group. The backlog of a
    consumer group begins at its position. A consumer group that never polled may start with any
    topic, so every message counts for it: let it poll once, or delete it. The backlog of a group
    that pulls, such as an archive, begins at its pull offset. Afterwards the broker can be stopped.

    `--force` removes it with its backlog, even if it is unreachable. The backlog stays in its data
    directory. If you add the broker group again, the messages return; those of message groups are
    then delivered after newer ones.

    `--record-only` is for a broker group that was removed or misspelt. It deletes the record of its
    replicas, and does not touch their stores. The command is rejected until all replicas have ended
    or were silent for half a minute. If the replicas return, choose their master with `tidemill
    broker-group transfer --unclean`.

    Examples:
    * `tidemill broker-group remove broker-1`
    * `tidemill broker-group remove broker-1 --force --dry-run`
    """
    if is_record_only:
        if is_forced:
            raise typer.BadParameter("--record-only takes no --force")
        _remove_record(context, name, is_dry=is_dry, is_sure=is_sure)
        return
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


def _remove_record(context: typer.Context, name: str, *, is_dry: bool, is_sure: bool) -> None:
    path = f"/replicas/{segment(name)}"
    if is_dry:
        planned = call(context, "DELETE", path, query=DRY_QUERY)
        text = f"the record of broker group {name} with {len(planned['replicas'])} replicas"
        say(context, planned, f"{text} would be deleted; their stores stay")
        return
    check_is_sure("broker-group remove --record-only", is_sure=is_sure)
    if not is_sure:
        confirm(f"Delete the record of {name}, which names its complete replicas?")
    done = call(context, "DELETE", path)
    say(context, done, f"the record of broker group {name} is deleted")


def _given_up(group: Json) -> str:
    """Describe the backlog that a removal gives up."""
    if "left" in group:
        if _is_empty(group):
            return "it is empty"
        return f"{_counts(group['left'])} are given up{_items(group['left'])}"
    if "lastLeft" in group:
        last = group["lastLeft"]
        return (
            f"its backlog is given up; at {utc(last['atMs'])} it was {_counts(last)}{_items(last)}"
        )
    return "its backlog is given up; its size is unknown"


def _items(left: Json) -> str:
    """Describe the backlog by topic and consumer group, as a part of a sentence."""
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
        ("address", _address(group)),
        ("reachable", "yes" if group["reachable"] else "no"),
        ("silent", _silence(group)),
        ("master", group["master"]),
        ("epoch", group.get("epoch")),
        ("feature level", group.get("featureLevel")),
        ("left", _backlog_text(group)),
        *[("", line) for line in _lines(group)],
        ("reason", group.get("reason")),
    ]
    show(context, group, ("BROKER GROUP", group["name"]), rows)


def _print_backlog(context: typer.Context, group: Json) -> None:
    if not is_text(context):
        say(context, group, "")
        return
    typer.echo(f"{time.strftime('%H:%M:%S')} {group['name']}: {_backlog_text(group)}{_but(group)}")


def _address(group: Json) -> str:
    """Return the address of the master if controllers know it; else the one in the list."""
    return str(group.get("masterAddress", group["address"]))


def _row(group: Json) -> tuple[object, ...]:
    return (
        group["name"] + (" (home)" if group["isHome"] else ""),
        group["state"],
        _address(group),
        group.get("epoch"),
        "yes" if group["reachable"] else "no",
        _silence(group),
        _backlog_text(group) if group["state"] == "draining" else None,
        group.get("reason"),
    )


def _silence(group: Json) -> str | None:
    """Return how long a broker group has not answered the home; None for less than a second."""
    silent_ms = group.get("unreachableMs", 0)
    return span(silent_ms) if silent_ms >= 1_000 else None


def _backlog_text(group: Json) -> str:
    """Describe the backlog of a broker group."""
    if group["state"] != "draining":
        return "active; its backlog is counted only while it drains"
    if "left" not in group:
        return "backlog unknown"
    if _is_empty(group):
        return "empty: it can be removed"
    return _counts(group["left"])


def _lines(group: Json) -> list[str]:
    left = group.get("left") or group.get("lastLeft")
    return _named_items(left) if left else []


def _counts(left: Json) -> str:
    counts = f"{left['messages']} messages, {left['inFlight']} in flight, {left['delayed']} delayed"
    others = {"half messages": left.get("halfMessages"), "dedup keys": left.get("dedupKeys")}
    return "".join([counts, *(f", {count} {name}" for name, count in others.items() if count)])


def _is_empty(group: Json) -> bool:
    left = group.get("left")
    counted = ("messages", "inFlight", "delayed", "halfMessages", "dedupKeys")
    return left is not None and not any(left.get(key) for key in counted)


def _but(group: Json) -> str:
    return f"; {group['reason']}" if "reason" in group else ""
