"""`tidemill broker-group history`, `transfer` and `set`: elections of masters."""

from __future__ import annotations

import time
from typing import Annotated, Final

import typer

from tidemill.cli.broker_group_options import (
    DRY_QUERY,
    AnyName,
    DryRun,
    Name,
    YesOnTerminal,
    is_asked,
)
from tidemill.cli.rest import call, check_is_sure, say, segment, show
from tidemill.common.exit_codes import EXIT_REFUSED
from tidemill.common.prompts import confirm, fail
from tidemill.common.rest_client import Json
from tidemill.common.times import span, utc

WAIT_PERIOD_S: Final = 0.3  # about the time of a transfer
COLUMNS: Final = ("BROKER GROUP", "EPOCH", "AT", "FROM", "TO", "SENDS AWAY", "CUT", "REASON")


def show_history(context: typer.Context, name: AnyName = "") -> None:
    """Show the last elections: old and new master, time and reason.

    SENDS AWAY is the time without answers to sends, from the loss of the master to the first commit
    of the next master. CUT is the part of the log of a replica that the new master did not have. No
    message in it was acknowledged, unless LOST is shown. The console has the same at `/ui/cluster`.

    Example: tidemill broker-group history broker-0
    """
    if name:
        answer = call(context, "GET", f"/replicas/{segment(name)}")
        groups = [answer]
    else:
        answer = call(context, "GET", "/replicas")
        groups = answer["items"]
    rows = [row for group in groups for row in _elections(group)]
    items = [{"brokerGroup": group["name"], **one} for group in groups for one in group["history"]]
    show(context, answer, COLUMNS, rows, items=items)


def transfer_master(
    context: typer.Context,
    name: Name,
    target: Annotated[
        int | None, typer.Option("--to", min=0, help="Number of the replica. Default: any.")
    ] = None,
    is_waiting: Annotated[
        bool, typer.Option("--wait", help="Wait for the transfer. Exit with 1 if it fails.")
    ] = False,
    is_unclean: Annotated[
        bool, typer.Option("--unclean", help="Make it master at once, even if it misses messages.")
    ] = False,
    reason: Annotated[
        str | None, typer.Option(help="With --unclean: why, for the history.")
    ] = None,
    is_dry: DryRun = False,
    is_sure: YesOnTerminal = False,
) -> None:
    """Make another replica master by a planned transfer; sends pause for a moment.

    The controller gives up a transfer that has not happened after half a minute.

    `--unclean` is the last resort if the complete replicas do not return. The messages that the new
    master misses are lost; `tidemill broker-group history` shows how many bytes of them were
    acknowledged. If complete replicas still run but are unreachable, stop them first. Otherwise,
    messages that they acknowledge are lost. It needs --to, --reason, and without a terminal --yes.

    Examples:
    * `tidemill broker-group transfer broker-0 --to 1 --wait`
    * `tidemill broker-group transfer broker-0 --dry-run`
    * `tidemill broker-group transfer broker-0 --unclean --to 2 --reason "both other disks failed"`
    """
    if is_unclean:
        if target is None or reason is None or is_waiting:
            raise typer.BadParameter("--unclean needs --to and --reason, and takes no --wait")
        _transfer_unclean(context, name, target, reason, is_dry=is_dry, is_sure=is_sure)
        return
    if reason is not None:
        raise typer.BadParameter("--reason is for --unclean")
    if is_dry or is_asked(is_sure=is_sure):
        planned = call(
            context,
            "POST",
            f"{_path(name)}:transfer",
            body=_target(target),
            query=DRY_QUERY,
            is_for_question=not is_dry,
        )
        if "transfer" in planned:
            to = f"would hand over to replica {planned['transfer']}"
        else:
            to = "would stay master"
        effect = f"broker group {name}: replica {_master(planned)} {to}; no message is lost"
        if is_dry:
            say(context, planned, effect)
            return
        confirm(f"{effect}; sends pause for a moment. Transfer the master?")
    _transfer(context, name, target, is_waiting=is_waiting)


def _transfer(context: typer.Context, name: str, target: int | None, *, is_waiting: bool) -> None:
    done = call(context, "POST", f"{_path(name)}:transfer", body=_target(target))
    asked = done.get("transfer")
    while is_waiting and "transfer" in done:
        time.sleep(WAIT_PERIOD_S)
        done = call(context, "GET", _path(name))
    if asked is None or done.get("master") == asked:
        say(context, done, f"broker group {name}: replica {_master(done)} is master")
    elif is_waiting:
        failure = f"replica {asked} has not taken over from {_master(done)}"
        fail(f"broker group {name}: {failure}", EXIT_REFUSED)
    else:
        say(context, done, f"broker group {name}: replica {asked} is asked to take over")


def _transfer_unclean(
    context: typer.Context, name: str, target: int, reason: str, *, is_dry: bool, is_sure: bool
) -> None:
    path, body = f"{_path(name)}:replace", {"target": target, "reason": reason}
    if not is_dry:
        check_is_sure("broker-group transfer --unclean", is_sure=is_sure)
    if is_dry or not is_sure:
        planned = call(
            context, "POST", path, body=body, query=DRY_QUERY, is_for_question=not is_dry
        )
        text = f"replica {target} would be master; {_loss(planned)}"
        if is_dry:
            say(context, planned, f"broker group {name}: {text}")
            return
        confirm(f"Broker group {name}: {text}. Make it master?")
    done = call(context, "POST", path, body=body)
    say(context, done, f"broker group {name}: replica {_master(done)} is master")


def set_broker_group(
    context: typer.Context,
    name: Name,
    min_in_sync: Annotated[
        int | None,
        typer.Option(
            min=1, max=7, help="Replicas that must have a message before it is acknowledged."
        ),
    ] = None,
    is_dry: DryRun = False,
    is_sure: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Change a broker group: how many replicas must have a message before it is acknowledged.

    With fewer replicas in sync, no message is acknowledged. With 1, a broker group continues while
    the other replicas are down, and an OK may mean one disk. On Kubernetes, set the value
    `minInSync`.

    Example: tidemill broker-group set broker-0 --min-in-sync 1
    """
    if min_in_sync is None:
        raise typer.BadParameter("give --min-in-sync")
    path, body = f"{_path(name)}:setMinInSync", {"minInSync": min_in_sync}
    if is_dry:
        planned = call(context, "POST", path, body=body, query=DRY_QUERY)
        text = f"{planned['minInSync']} of its replicas would have to have a message"
        say(context, planned, f"broker group {name}: {text}; no message is lost")
        return
    if min_in_sync == 1 and not is_sure:
        check_is_sure("broker-group set --min-in-sync 1", is_sure=is_sure)
        confirm(f"Acknowledge messages of {name} that only one replica has?")
    done = call(context, "POST", path, body=body)
    text = f"{done['minInSync']} of its replicas must have a message"
    say(context, done, f"broker group {name}: {text}")


def _path(name: str) -> str:
    return f"/replicas/{segment(name)}"


def _target(target: int | None) -> Json:
    return {} if target is None else {"target": target}


def _loss(planned: Json) -> str:
    """Return what a dry run of an unclean transfer would lose."""
    if "lostBytes" not in planned:
        size = f"their size is unknown: {planned['unknown']}"
        return f"the messages that it misses would be lost; {size}"
    if not planned["lostBytes"]:
        return "by the last heartbeats it misses no acknowledged message"
    return f"{planned['lostBytes']} B of acknowledged messages would be lost"


def _master(group: Json) -> str:
    return str(group.get("master", "nobody"))


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
