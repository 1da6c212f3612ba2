"""`tidemill cluster ...`: replicas, masters and elections."""

from __future__ import annotations

import time
from typing import Annotated, Final

import typer

from tidemill.cli.rest import call, check_is_sure, say, segment, show
from tidemill.common.prompts import EXIT_REFUSED, EXIT_USAGE, confirm, fail
from tidemill.common.rest_client import Json
from tidemill.common.times import span, utc

app = typer.Typer(
    no_args_is_help=True,
    help="""Show the replicas of broker groups, and who is master; move it.

A broker group has several replicas of one log. One of them is the master; those that are in sync
have all that was acknowledged, and one of them takes over when the master fails.

* `tidemill cluster status`
* `tidemill cluster history broker-0`
* `tidemill cluster transfer broker-0 --to 1`
* `tidemill cluster drain broker-0-1`
""",
)

WAIT_PERIOD_S: Final = 0.3  # a transfer takes about as long

STATUS = ("BROKER GROUP", "REPLICA", "ROLE", "ADDRESS", "EPOCH", "LAG", "SILENT", "ALARM")
HISTORY = ("BROKER GROUP", "EPOCH", "AT", "FROM", "TO", "SENDS AWAY", "CUT", "REASON")

Name = Annotated[str, typer.Argument(help="Name of the broker group, as `status` shows it.")]
AnyName = Annotated[str, typer.Argument(help="Name of a broker group; without: all of them.")]


@app.command("status")
def show_status(context: typer.Context, name: AnyName = "") -> None:
    """Show all replicas: who is master, who is in sync, how far the others are behind.

    Examples:
    * `tidemill cluster status`
    * `tidemill cluster status broker-0 -o json`
    """
    answer, groups = _groups(context, name)
    show(context, answer, STATUS, [row for group in groups for row in _replicas(group)])


@app.command("history")
def show_history(context: typer.Context, name: AnyName = "") -> None:
    """Show the last elections: who took over from whom, when and why.

    SENDS AWAY is how long nobody answered sends, from the loss of the master to the first commit of
    the next one. CUT is what a replica had that the new master did not: nobody was told that any of
    it is stored, unless LOST stands there. The REST API has a page of it, at `/history`.

    Example: tidemill cluster history broker-0
    """
    answer, groups = _groups(context, name)
    show(context, answer, HISTORY, [row for group in groups for row in _elections(group)])


@app.command("transfer")
def transfer_master(
    context: typer.Context,
    name: Name,
    target: Annotated[
        int | None, typer.Option("--to", min=0, help="Number of the replica; without: any.")
    ] = None,
    is_waiting: Annotated[
        bool, typer.Option("--wait", help="Until it is done; status 1 where it is not.")
    ] = False,
) -> None:
    """Let another replica be master, by a planned transfer: sends pause for a moment.

    It is asked for, and given up after half a minute where it does not come about.

    Example: tidemill cluster transfer broker-0 --to 1 --wait
    """
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
    undo: Annotated[bool, typer.Option("--undo", help="Let it count again.")] = False,
) -> None:
    """Empty one replica of its duties, before its machine or its pod is taken away.

    It hands over where it is master, and nobody waits for it any more. It goes on copying, so that
    `--undo` brings it back in a moment. `status` shows it as retired when it is done. Refused where
    too few would be left. All of a group is drained by `tidemill broker-group drain`.

    Examples:
    * `tidemill cluster drain broker-0-1`
    * `tidemill cluster drain broker-0-1 --undo`
    """
    name, dash, number = replica.rpartition("-")
    if not (dash and name and number.isdecimal()):
        fail(f"{replica} is no replica: say group and number, like broker-0-1", EXIT_USAGE)
    body: Json = {"replica": int(number), "undo": undo}
    done = call(context, "POST", f"/replicas/{segment(name)}:drain", body=body)
    found: Json = next((one for one in done["replicas"] if one["replica"] == int(number)), {})
    if undo:
        said = "counts again, when it has caught up"
    elif found.get("role") == "retired":
        said = "is retired: nothing waits for it, and it may go"
    elif found.get("role") == "master":
        said = "hands over: it is retired when another replica is master"
    else:
        said = "is retired as soon as the others can do without it"
    say(context, done, f"replica {number} of broker group {name} {said}")


@app.command("min-in-sync")
def set_min_in_sync(
    context: typer.Context,
    name: Name,
    count: Annotated[int, typer.Argument(min=1, max=7, help="How many replicas.")],
    is_sure: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Say how many replicas must have a message before it is acknowledged.

    With fewer in sync nothing is. With 1 a group goes on while the other replicas are gone, and an
    OK may be of a message that only its master has. On Kubernetes the values say it: `minInSync`.

    Example: tidemill cluster min-in-sync broker-0 1
    """
    if count == 1 and not is_sure:
        check_is_sure("cluster min-in-sync", is_sure=is_sure)
        confirm(f"Let {name} acknowledge messages that only one replica has?")
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
    """Take away what controllers know of a broker group whose replicas are gone.

    For a group that was removed, and for one that a misspelt name has made. Refused until all of
    its replicas have ended, or are silent for half a minute. Its stores are not touched. Replicas
    that come back all the same are led again when `tidemill cluster replace` says by whom.

    Example: tidemill cluster forget broker-7
    """
    check_is_sure("cluster forget", is_sure=is_sure)
    if not is_sure:
        confirm(f"Forget which replica of {name} has everything?")
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
    """Make a replica master at once, also where it may lack what was acknowledged.

    The last resort, when the replicas that have everything do not come back. What it lacks is lost,
    and `history` says how much of that was acknowledged. Where they run on somewhere out of
    reach, end them first: until they hear of this they go on acknowledging, which is lost as well.

    Example: tidemill cluster replace broker-0 --with 2 --reason "both other disks are gone"
    """
    check_is_sure("cluster replace", is_sure=is_sure)
    if not is_sure:
        confirm(f"Make replica {target} of {name} its master? Messages that it lacks are lost.")
    body: Json = {"target": target, "reason": reason}
    done = call(context, "POST", f"/replicas/{segment(name)}:replace", body=body)
    say(context, done, f"broker group {name}: replica {_master(done)} is master")


def _groups(context: typer.Context, name: str) -> tuple[Json, list[Json]]:
    if name:
        group = call(context, "GET", f"/replicas/{segment(name)}")
        return group, [group]
    answer = call(context, "GET", "/replicas")
    return answer, answer["items"]


def _master(group: Json) -> str:
    return str(group.get("master", "nobody"))


def _replicas(group: Json) -> list[tuple[object, ...]]:
    """Return a row for each replica; what concerns the group stands in the first."""
    told = group.get("alarm") or group.get("notice", "")
    if not group["replicas"]:
        return [(group["name"], "", "", "", group["epoch"], "", "", told)]
    return [
        (
            group["name"],
            one["replica"],
            _role(one),
            one["address"],
            group["epoch"],
            f"{one['lagBytes']} B" if "lagBytes" in one else "unknown",
            span(one["silentMs"]),
            "" if number else told,
        )
        for number, one in enumerate(group["replicas"])
    ]


def _role(one: Json) -> str:
    notes = ["unclean"] if one["unclean"] else []
    if "retired" in one and one["role"] != "retired":
        notes.append("to be retired")
    if one["diverged"]:
        notes.append("DIVERGED")
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
    """Return how long sends were away; of a group that was founded they were not."""
    if "awayMs" not in one or "source" not in one:
        return ""
    # A failover takes less than a second or two: in seconds it would be nothing.
    away_ms = one["awayMs"]
    return f"{away_ms} ms" if away_ms < 10_000 else span(away_ms)


def _cut(cut: Json) -> str:
    lost = f", {cut['confirmedBytes']} B of it LOST" if cut["confirmedBytes"] else ""
    return (
        f"replica {cut['replica']}: {cut['records']} records, {cut['bytes']} B from"
        f" {cut['offset']}{lost}"
    )
