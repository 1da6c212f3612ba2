"""`tidemill cluster ...`: replicas, masters and elections."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Final

import typer

from tidemill.cli.completion_names import complete_broker_group
from tidemill.cli.rest import call, check_is_sure, say, segment, show
from tidemill.common.exit_codes import EXIT_REFUSED, EXIT_USAGE
from tidemill.common.prompts import confirm, fail
from tidemill.common.rest_client import Json
from tidemill.common.times import span, utc

app = typer.Typer(
    no_args_is_help=True,
    help="""Show the replicas of broker groups, and move the master.

A broker group can have several replicas of one log. One of them is the master. Replicas in sync
have all acknowledged messages, and one of them takes over when the master fails.

* `tidemill cluster status`
* `tidemill cluster history broker-0`
* `tidemill cluster transfer broker-0 --to 1`
* `tidemill cluster drain broker-0-1`
""",
)

WAIT_PERIOD_S: Final = 0.3  # about the time of a transfer

STATUS = ("BROKER GROUP", "REPLICA", "ROLE", "ADDRESS", "EPOCH", "LAG", "SILENT", "ALARM")
HISTORY = ("BROKER GROUP", "EPOCH", "AT", "FROM", "TO", "SENDS AWAY", "CUT", "REASON")

Name = Annotated[
    str,
    typer.Argument(
        help="Name of the broker group, as `status` shows it.", autocompletion=complete_broker_group
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the effect and change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask on a terminal.")]
AnyName = Annotated[
    str, typer.Argument(help="Broker group. Default: all.", autocompletion=complete_broker_group)
]


@app.command("status")
def show_status(context: typer.Context, name: AnyName = "") -> None:
    """Show all replicas: role, sync state and lag.

    Examples:
    * `tidemill cluster status`
    * `tidemill cluster status broker-0 -o json`
    """
    answer, groups = _groups(context, name)
    show(context, answer, STATUS, [row for group in groups for row in _replicas(group)])


@app.command("history")
def show_history(context: typer.Context, name: AnyName = "") -> None:
    """Show the last elections: old and new master, time and reason.

    SENDS AWAY is the time without answers to sends, from the loss of the master to the first commit
    of the next master. CUT is the part of the log of a replica that the new master did not have. No
    message in it was acknowledged, unless LOST is shown. The console has the same at `/ui/cluster`.

    Example: tidemill cluster history broker-0
    """
    answer, groups = _groups(context, name)
    show(context, answer, HISTORY, [row for group in groups for row in _elections(group)])


@app.command("transfer")
def transfer_master(
    context: typer.Context,
    name: Name,
    target: Annotated[
        int | None, typer.Option("--to", min=0, help="Number of the replica. Default: any.")
    ] = None,
    is_waiting: Annotated[
        bool, typer.Option("--wait", help="Wait for the transfer. Exit with 1 if it fails.")
    ] = False,
    is_dry: DryRun = False,
    is_sure: Yes = False,
) -> None:
    """Make another replica master by a planned transfer; sends pause for a moment.

    The controller gives up a transfer that has not happened after half a minute.

    Examples:
    * `tidemill cluster transfer broker-0 --to 1 --wait`
    * `tidemill cluster transfer broker-0 --dry-run`
    """
    if is_dry or _is_asked(is_sure=is_sure):
        group = call(context, "GET", f"/replicas/{segment(name)}")
        to = "another replica" if target is None else f"replica {target}"
        effect = f"broker group {name}: replica {_master(group)} would hand over to {to}"
        if is_dry:
            say(context, {"dryRun": True, "group": group}, effect)
            return
        confirm(f"{effect}; sends pause for a moment. Transfer the master?")
    body: dict[str, Json] = {} if target is None else {"target": target}
    done = call(context, "POST", f"/replicas/{segment(name)}:transfer", body=body)
    asked = done.get("transfer")
    while is_waiting and "transfer" in done:
        time.sleep(WAIT_PERIOD_S)
        done = call(context, "GET", f"/replicas/{segment(name)}")
    if asked is None or done.get("master") == asked:
        say(context, done, f"broker group {name}: replica {_master(done)} is master")
    elif is_waiting:
        reason = f"replica {asked} has not taken over from {_master(done)}"
        fail(f"broker group {name}: {reason}", EXIT_REFUSED)
    else:
        say(context, done, f"broker group {name}: replica {asked} is asked to take over")


@app.command("drain")
def drain_replica(
    context: typer.Context,
    replica: Annotated[str, typer.Argument(help="Broker group and number, like broker-0-1.")],
    undo: Annotated[bool, typer.Option("--undo", help="Make it a full replica again.")] = False,
    is_dry: DryRun = False,
    is_sure: Yes = False,
) -> None:
    """Retire one replica, before its machine or pod is removed.

    A master hands over first. Afterwards no send waits for the replica. It continues to copy the
    log, so `--undo` takes a moment. `status` shows it as retired. The command is rejected if too
    few replicas would remain. To drain a whole broker group, use `tidemill broker-group drain`.

    Examples:
    * `tidemill cluster drain broker-0-1`
    * `tidemill cluster drain broker-0-1 --undo`
    """
    name, dash, number = replica.rpartition("-")
    if not (dash and name and number.isdecimal()):
        fail(f"{replica} is not a replica; give group and number, such as broker-0-1", EXIT_USAGE)
    if is_dry or (not undo and _is_asked(is_sure=is_sure)):
        group = call(context, "GET", f"/replicas/{segment(name)}")
        role = next((one["role"] for one in group["replicas"] if one["replica"] == int(number)), "")
        if not role:
            fail(f"broker group {name} has no replica {number}", EXIT_REFUSED)
        change = "become a full replica again" if undo else "retire"
        effect = f"replica {number} of broker group {name}, now {role}, would {change}"
        if is_dry:
            say(context, {"dryRun": True, "group": group}, effect)
            return
        confirm(f"{effect}. Retire it?")
    body: Json = {"replica": int(number), "undo": undo}
    done = call(context, "POST", f"/replicas/{segment(name)}:drain", body=body)
    found: Json = next((one for one in done["replicas"] if one["replica"] == int(number)), {})
    if undo and found.get("role") in {"in-sync", "master"}:
        result = "is a full replica in sync"  # It was not drained, or the drain had not begun.
    elif undo:
        result = "is a full replica again when it has caught up"
    elif found.get("role") == "retired":
        result = "is retired; it can be removed"
    elif found.get("role") == "master":
        result = "hands over; it retires when another replica is master"
    else:
        result = "retires when the other replicas no longer need it"
    say(context, done, f"replica {number} of broker group {name} {result}")


@app.command("min-in-sync")
def set_min_in_sync(
    context: typer.Context,
    name: Name,
    count: Annotated[int, typer.Argument(min=1, max=7, help="Number of replicas.")],
    is_sure: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Set how many replicas must have a message before it is acknowledged.

    With fewer replicas in sync, no message is acknowledged. With 1, a broker group continues while
    the other replicas are down, and an OK may mean one disk. On Kubernetes, set the value
    `minInSync`.

    Example: tidemill cluster min-in-sync broker-0 1
    """
    if count == 1 and not is_sure:
        check_is_sure("cluster min-in-sync", is_sure=is_sure)
        confirm(f"Acknowledge messages of {name} that only one replica has?")
    body: Json = {"minInSync": count}
    done = call(context, "POST", f"/replicas/{segment(name)}:setMinInSync", body=body)
    say(
        context,
        done,
        f"broker group {name}: {done['minInSync']} of its replicas must have a message",
    )


@app.command("forget")
def forget_group(
    context: typer.Context,
    name: Name,
    is_sure: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete the record of a broker group whose replicas have ended.

    Use it for a broker group that was removed or misspelt. The command is rejected until all
    replicas have ended or were silent for half a minute. It does not touch their stores. If the
    replicas return, choose their master with `tidemill cluster replace`.

    Example: tidemill cluster forget broker-7
    """
    check_is_sure("cluster forget", is_sure=is_sure)
    if not is_sure:
        confirm(f"Delete the record of {name}, which names its complete replicas?")
    done = call(context, "DELETE", f"/replicas/{segment(name)}")
    say(context, done, f"broker group {name} is forgotten")


@app.command("replace")
def replace_master(
    context: typer.Context,
    name: Name,
    target: Annotated[int, typer.Option("--with", min=0, help="Number of the replica.")],
    reason: Annotated[str, typer.Option("--reason", help="Why, for the history.")],
    is_sure: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Make a replica master at once, even if it misses acknowledged messages.

    The last resort if the complete replicas do not return. The messages that the new master misses
    are lost; `history` shows how many bytes of them were acknowledged. If complete replicas still
    run but are unreachable, stop them first. Otherwise, messages that they acknowledge are lost.

    Example: tidemill cluster replace broker-0 --with 2 --reason "both other disks are gone"
    """
    check_is_sure("cluster replace", is_sure=is_sure)
    if not is_sure:
        confirm(f"Make replica {target} of {name} its master? Messages that it misses are lost.")
    body: Json = {"target": target, "reason": reason}
    done = call(context, "POST", f"/replicas/{segment(name)}:replace", body=body)
    say(context, done, f"broker group {name}: replica {_master(done)} is master")


def _groups(context: typer.Context, name: str) -> tuple[Json, list[Json]]:
    if name:
        group = call(context, "GET", f"/replicas/{segment(name)}")
        return group, [group]
    answer = call(context, "GET", "/replicas")
    return answer, answer["items"]


def _is_asked(*, is_sure: bool) -> bool:
    """Whether to ask: only a person can answer, and scripts run these commands without one."""
    return not is_sure and sys.stdin.isatty()


def _master(group: Json) -> str:
    return str(group.get("master", "nobody"))


def _replicas(group: Json) -> list[tuple[object, ...]]:
    """Return a row per replica; the alarm of the group stands in the first row."""
    alarm = group.get("alarm") or group.get("notice", "")
    if not group["replicas"]:
        return [(group["name"], "", "", "", group["epoch"], "", "", alarm)]
    return [
        (
            group["name"],
            one["replica"],
            _role(one),
            one["address"],
            group["epoch"],
            f"{one['lagBytes']} B" if "lagBytes" in one else "unknown",
            span(one["silentMs"]),
            "" if number else alarm,
        )
        for number, one in enumerate(group["replicas"])
    ]


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


def _elections(group: Json) -> list[tuple[object, ...]]:
    return [
        (
            group["name"],
            one["epoch"],
            utc(one["atMs"]),
            one.get("source", ""),
            one["target"],
            _away(one),
            ", ".join(_cut(cut) for cut in one["cuts"]),
            one["reason"],
        )
        for one in group["history"]
    ]


def _away(one: Json) -> str:
    """Return the time without answers to sends; empty for the first election of a group."""
    if "awayMs" not in one or "source" not in one:
        return ""
    # A failover takes about a second, so show milliseconds.
    away_ms = one["awayMs"]
    return f"{away_ms} ms" if away_ms < 10_000 else span(away_ms)


def _cut(cut: Json) -> str:
    lost = f", {cut['confirmedBytes']} B of it LOST" if cut["confirmedBytes"] else ""
    return (
        f"replica {cut['replica']}: {cut['records']} records, {cut['bytes']} B from"
        f" {cut['offset']}{lost}"
    )
