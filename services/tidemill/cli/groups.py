"""`tidemill group ...`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from tidemill.cli.messages import printable
from tidemill.cli.rest import (
    Json,
    OutputFormat,
    call,
    call_pages,
    options_of,
    say,
    segment,
    show,
    show_table,
)
from tidemill.cli.times import age, from_now
from tidemill.common.clock import SystemClock

app = typer.Typer(
    no_args_is_help=True, help="Create, list, show, reset, release and delete groups."
)

LOCKS_SHOWN = 20  # those with most behind them; --output json has all

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
def show_progress(context: typer.Context, name: Name) -> None:
    """Show how far a group is: what is ready, in flight, and waiting longest.

    Of a FIFO group also which queues are locked: BLOCKED goes to nobody before the message that
    locks its queue is acked, runs out, or is released (`tidemill group release`).

    Example: tidemill group progress billing
    """
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


def _show_locks(locks: list[Json], now_ms: int) -> None:
    typer.echo("\nLocked queues:")
    rows = [
        (
            lock["topic"], lock["queue"], lock["waiting"], lock["messages"], lock["offset"],
            lock.get("messageId"), printable(lock.get("clientId", "(not known)")),
            age(lock["sinceMs"], now_ms), from_now(lock["untilMs"], now_ms),
        )
        for lock in locks[:LOCKS_SHOWN]
    ]  # fmt: skip
    columns = (
        "TOPIC", "QUEUE", "BEHIND IT", "MESSAGES", "OFFSET", "MESSAGE ID", "HELD BY", "SINCE",
        "ENDS",
    )  # fmt: skip
    show_table(columns, rows)
    if len(locks) > LOCKS_SHOWN:
        typer.echo(f"and {len(locks) - LOCKS_SHOWN} more: --output json shows all")


@app.command("release")
def release_lock(
    context: typer.Context,
    name: Name,
    topic: Annotated[str, typer.Option(help="Topic of the locked queue.")],
    queue: Annotated[int, typer.Option(min=0, help="Number of the locked queue.")],
    is_sure: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Take what locks a queue of a FIFO group from its consumer: the next one gets it at once.

    Example: tidemill group release billing --topic orders --queue 3
    """
    if not is_sure:
        typer.confirm(
            f"Let another consumer of {name} have what locks queue {queue} of {topic}? A consumer "
            f"that still works on it will do so twice.",
            abort=True,
            err=True,
        )
    body = {"topic": topic, "queue": queue}
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
    timestamp_ms: Annotated[
        int | None, typer.Option(help="The first message stored at or after this time.")
    ] = None,
    offset: Annotated[int | None, typer.Option(help="The same offset in every queue.")] = None,
) -> None:
    """Let a group go on from another place of a topic.

    Example: tidemill group reset billing --topic orders --to earliest
    """
    body: dict[str, Json] = {"topic": topic}
    if to is not None:
        body["to"] = to.value
    if timestamp_ms is not None:
        body["timestampMs"] = timestamp_ms
    if offset is not None:
        body["offset"] = offset
    done = call(context, "POST", f"/groups/{segment(name)}:resetOffset", body=body)
    rows = [(q["queueId"], q["maxOffset"]) for q in done["queues"]]
    show(context, done, ("QUEUE", "GOES ON AT"), rows)


@app.command("delete")
def delete_group(
    context: typer.Context,
    name: Name,
    is_sure: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a consumer group with its progress; its dead letters stay.

    Example: tidemill group delete billing --yes
    """
    if not is_sure:
        typer.confirm(f"Delete group {name} and its progress?", abort=True, err=True)
    call(context, "DELETE", f"/groups/{segment(name)}")
    say(context, {}, f"group {name} is deleted")


def _retry(retry: Json) -> str:
    if policy := retry.get("exponential"):
        return f"{policy['initialMs']} ms x {policy['multiplier']:g} up to {policy['maxMs']} ms"
    return ", ".join(f"{ms} ms" for ms in retry["customized"]["nextMs"])
