"""`tidemill group ...`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from tidemill.cli import progress_watch
from tidemill.cli.messages import printable
from tidemill.cli.rest import (
    Json,
    OutputFormat,
    call,
    call_pages,
    check_is_sure,
    confirm,
    has_several,
    options_of,
    say,
    segment,
    show,
    show_table,
    warn_unreachable,
)
from tidemill.cli.times import INSTANT, age, from_now, instant_ms
from tidemill.common.clock import SystemClock

app = typer.Typer(
    no_args_is_help=True, help="Create, list, show, reset, release and delete groups."
)

LOCKS_SHOWN = 20  # those with most behind them; --output json has all

QUEUES_SHOWN_MAX = 8  # before a reset: enough to see what it does

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what it would do, and do nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Name = Annotated[str, typer.Argument(help="Name of the consumer group.")]


class Order(StrEnum):
    """How a group gets the messages of a queue."""

    CONCURRENT = "CONCURRENT"
    FIFO = "FIFO"


class Place(StrEnum):
    """An end of a topic."""

    EARLIEST = "earliest"
    LATEST = "latest"


@app.command("list")
def list_groups(context: typer.Context) -> None:
    """List all consumer groups.

    Example: tidemill group list
    """
    groups = call_pages(context, "/groups", "groups")
    rows = [(g["name"], g["deliveryOrder"], g["maxAttempts"], _retry(g["retry"])) for g in groups]
    show(context, groups, ("GROUP", "ORDER", "ATTEMPTS", "RETRY"), rows)


@app.command("create")
def create_group(
    context: typer.Context,
    name: Name,
    order: Annotated[
        Order | None, typer.Option(case_sensitive=False, help="FIFO: one batch a queue at a time.")
    ] = None,
    max_attempts: Annotated[
        int | None, typer.Option(help="Deliveries before a message is a dead letter.")
    ] = None,
    retry_ms: Annotated[
        list[int] | None, typer.Option(help="Wait before each retry; repeat for the next ones.")
    ] = None,
    start_from: Annotated[
        Place | None, typer.Option(help="Where a new group begins; the earliest by default.")
    ] = None,
) -> None:
    """Create a consumer group, or change one.

    Example: tidemill group create billing --order FIFO --max-attempts 5
    """
    body = {
        "deliveryOrder": order.value if order else None,
        "maxAttempts": max_attempts,
        "retry": {"customized": {"nextMs": retry_ms}} if retry_ms else None,
        "startFrom": start_from.value if start_from else None,
    }
    given = {key: value for key, value in body.items() if value is not None}
    group = call(context, "PUT", f"/groups/{segment(name)}", body=given)
    say(
        context,
        group,
        f"group {name}: {group['deliveryOrder']}, {group['maxAttempts']} attempts",
    )


@app.command("show")
def show_group(context: typer.Context, name: Name) -> None:
    """Show a consumer group.

    Example: tidemill group show billing
    """
    group = call(context, "GET", f"/groups/{segment(name)}")
    rows = [
        ("order", group["deliveryOrder"]),
        ("attempts", group["maxAttempts"]),
        ("retry", _retry(group["retry"])),
        ("starts from", group["startFrom"]),
    ]
    show(context, group, ("GROUP", name), rows)


@app.command("progress")
def show_progress(
    context: typer.Context,
    name: Name,
    is_watched: Annotated[
        bool,
        typer.Option(
            "--watch", "-w",
            help="Look again every 2 s until Ctrl-C, with messages in and out a second, and when"
            " the lag is gone at this pace.",
        ),
    ] = False,
) -> None:  # fmt: skip
    """Show how far a group is: what is ready, in flight, and waiting longest.

    Of a FIFO group also which queues are locked: BLOCKED goes to nobody before the message that
    locks its queue is acked, runs out, or is released (`tidemill group release`).

    Examples:
    * `tidemill group progress billing`
    * `tidemill group progress billing --watch`
    """
    if is_watched:
        progress_watch.run(context, name)
        return
    progress = call(context, "GET", f"/groups/{segment(name)}/progress")
    now_ms = SystemClock().wall_ms()
    parts = [*progress["topics"], {"topic": "(total)", **progress["total"]}]
    rows = [
        (
            p["topic"], p["lag"], p["ready"], p["blocked"], p["inFlight"],
            age(p.get("oldestUnackedAtMs"), now_ms),
        )
        for p in parts
    ]  # fmt: skip
    columns = "TOPIC", "LAG", "READY", "BLOCKED", "IN FLIGHT", "OLDEST UNACKED"
    show(context, progress, columns, rows)
    if progress["locks"] and options_of(context).output is OutputFormat.TABLE:
        _show_locks(progress["locks"], now_ms)
    warn_unreachable(progress)


def _show_locks(locks: list[Json], now_ms: int) -> None:
    typer.echo("\nLocked queues:")
    rows = [
        (
            lock["topic"], lock["queue"], lock["waiting"], lock["messages"], lock["offset"],
            lock.get("messageId"), printable(lock.get("clientId", "(not known)")),
            age(lock["sinceMs"], now_ms), from_now(lock["untilMs"], now_ms), lock["broker"],
        )
        for lock in locks[:LOCKS_SHOWN]
    ]  # fmt: skip
    columns = (
        "TOPIC", "QUEUE", "BEHIND IT", "MESSAGES", "OFFSET", "MESSAGE ID", "HELD BY", "SINCE",
        "ENDS", "BROKER",
    )  # fmt: skip
    count = len(columns) if has_several(locks) else len(columns) - 1
    show_table(columns[:count], [row[:count] for row in rows])
    if len(locks) > LOCKS_SHOWN:
        typer.echo(f"and {len(locks) - LOCKS_SHOWN} more: --output json shows all")


@app.command("release")
def release_lock(
    context: typer.Context,
    name: Name,
    topic: Annotated[str, typer.Option(help="Topic of the locked queue.")],
    queue: Annotated[int, typer.Option(min=0, help="Number of the locked queue.")],
    broker: Annotated[
        str | None,
        typer.Option(
            help="Broker group that has it, where several have one of that number locked."
        ),
    ] = None,
    is_sure: Yes = False,
) -> None:
    """Take what locks a queue of a FIFO group from its consumer: the next one gets it at once.

    Example: tidemill group release billing --topic orders --queue 3
    """
    check_is_sure("group release", is_sure=is_sure)
    if not is_sure:
        confirm(
            f"Let another consumer of {name} have what locks queue {queue} of {topic}? What its "
            f"consumer still works on is done twice then."
        )
    body = {"topic": topic, "queue": queue} | ({"broker": broker} if broker else {})
    done = call(context, "POST", f"/groups/{segment(name)}:releaseLock", body=body)
    released = done["released"]
    holder = printable(released.get("clientId", "(not known)"))
    say(
        context,
        done,
        f"queue {queue} of {topic} is released: {released['messages']} messages from offset "
        f"{released['offset']}, held by {holder}, and {released['waiting']} behind them",
    )


@app.command("reset")
def reset_group(
    context: typer.Context,
    name: Name,
    topic: Annotated[str, typer.Option(help="Topic in which the group goes on elsewhere.")],
    to: Annotated[Place | None, typer.Option(help="An end of the topic.")] = None,
    at: Annotated[
        str | None,
        typer.Option(metavar=INSTANT, help="The first message stored at this time or later."),
    ] = None,
    timestamp_ms: Annotated[
        int | None, typer.Option(help="The same, as Unix time in milliseconds.")
    ] = None,
    offset: Annotated[int | None, typer.Option(help="The same offset in every queue.")] = None,
    is_dry: DryRun = False,
    is_sure: Yes = False,
) -> None:
    """Let a group go on from another place of a topic.

    Examples:
    * `tidemill group reset billing --topic orders --to earliest --dry-run`
    * `tidemill group reset billing --topic orders --at 2027-01-01T08:00:00Z`
    """
    if sum(target is not None for target in (to, at, timestamp_ms, offset)) != 1:
        raise typer.BadParameter("give exactly one of --to, --at, --timestamp-ms and --offset")
    body: dict[str, Json] = {"topic": topic}
    if to is not None:
        body["to"] = to.value
    if timestamp_ms is not None:
        body["timestampMs"] = timestamp_ms
    if at is not None:
        body["timestampMs"] = instant_ms(at)
    if offset is not None:
        body["offset"] = offset
    path = f"/groups/{segment(name)}:resetOffset"
    if not is_dry:
        check_is_sure("group reset", is_sure=is_sure)
    if not is_dry and not is_sure:
        planned = call(context, "POST", path, body=body | {"dryRun": True})
        _say_plan(planned["queues"])
        confirm(f"Let group {name} go on there in topic {topic}?")
    done = call(context, "POST", path, body=body | {"dryRun": is_dry})
    queues = done["queues"]
    rows = [(q["queueId"], q.get("fromOffset"), q["toOffset"], q["broker"]) for q in queues]
    columns = ("QUEUE", "FROM", "WOULD GO ON AT" if is_dry else "GOES ON AT", "BROKER")
    count = len(columns) if has_several(queues) else len(columns) - 1
    show(context, done, columns[:count], [row[:count] for row in rows])


@app.command("delete")
def delete_group(
    context: typer.Context,
    name: Name,
    is_dry: DryRun = False,
    is_sure: Yes = False,
) -> None:
    """Delete a consumer group with its progress; its dead letters stay.

    Example: tidemill group delete billing --yes
    """
    path = f"/groups/{segment(name)}"
    if not is_dry:
        check_is_sure("group delete", is_sure=is_sure)
    if is_dry or not is_sure:
        planned = call(context, "DELETE", path, query={"dryRun": "true"})
        loss = (
            f"its progress in {len(planned['topics'])} topics ({planned['lag']} messages unacked)"
        )
        if is_dry:
            say(context, planned, f"group {name} would be deleted, with {loss}")
            warn_unreachable(planned)
            return
        warn_unreachable(planned)
        confirm(f"Delete group {name} and {loss}?")
    call(context, "DELETE", path)
    say(context, {}, f"group {name} is deleted")


def _say_plan(queues: list[Json]) -> None:
    is_several = has_several(queues)
    for queue in queues[:QUEUES_SHOWN_MAX]:
        begin = queue.get("fromOffset", "the beginning of its reading")
        where = f"queue {queue['queueId']}" + (f" of {queue['broker']}" if is_several else "")
        typer.echo(f"{where}: from {begin} to {queue['toOffset']}", err=True)
    if len(queues) > QUEUES_SHOWN_MAX:
        typer.echo(f"and {len(queues) - QUEUES_SHOWN_MAX} queues more", err=True)


def _retry(retry: Json) -> str:
    if policy := retry.get("exponential"):
        return f"{policy['initialMs']} ms x {policy['multiplier']:g} up to {policy['maxMs']} ms"
    return ", ".join(f"{ms} ms" for ms in retry["customized"]["nextMs"])
