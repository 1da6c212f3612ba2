"""`tidemill group show`: settings, lag, locked queues, consumers, and why a group is behind."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from tidemill.cli.completion_names import complete_topic
from tidemill.cli.conflicts import conflict_text, filter_text
from tidemill.cli.group_options import Name
from tidemill.cli.messages import printable
from tidemill.cli.numbers import number
from tidemill.cli.rest import (
    call,
    connect,
    has_several,
    in_namespace,
    is_text,
    segment,
    show,
    show_table,
    warn_unreachable,
)
from tidemill.common.clock import SystemClock
from tidemill.common.prompts import warn
from tidemill.common.rest_client import Json, RestRejection, RestUnreachable
from tidemill.common.times import age, from_now, span, utc

LOCKS_SHOWN: Final = 20  # locked queues with the largest backlog; --output json shows all
CONSUMERS_SHOWN: Final = 20  # consumers; `tidemill client list` shows all
NEVER_POLLED: Final = "NEVER_POLLED"  # state of a group without a lag
WAITS_SHOWN_MAX: Final = 4  # waits of a retry policy: the first and the last


def show_group(
    context: typer.Context,
    name: Name,
    is_scaling: Annotated[
        bool, typer.Option("--scaling", help="Show the backlog as KEDA gets it, now and soon.")
    ] = False,
    topic: Annotated[
        str | None,
        typer.Option(
            help="With --scaling: only this topic; else all that the group reads.",
            callback=in_namespace,
            autocompletion=complete_topic,
        ),
    ] = None,
    horizon: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="With --scaling: count delayed messages due within these seconds. Default: 60.",
        ),
    ] = None,
    messages_per_replica: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --scaling: messages per consumer; shows the consumers needed."
        ),
    ] = None,
    ignore_in_flight: Annotated[
        bool,
        typer.Option("--ignore-in-flight", help="With --scaling: do not count messages in flight."),
    ] = False,
) -> None:
    """Show a consumer group: settings, lag, locked queues, consumers, and why it is behind.

    For a FIFO group, BLOCKED messages are delivered after the message that locks their queue is
    acked, expires, or is unlocked (`tidemill group unlock`). `tidemill delivery list` shows the
    consumer of each message. The last lines name the causes of a backlog, with a command for each.

    `--output json` merges the documents of the group, of its progress, of its clients and of its
    diagnosis.

    Examples:
    * `tidemill group show billing`
    * `tidemill group show billing --scaling --horizon 120 --messages-per-replica 100`
    """
    query = {
        "topic": topic,
        "horizonSeconds": horizon,
        "messagesPerReplica": messages_per_replica,
        "countInFlight": "false" if ignore_in_flight else None,
    }
    given = {key: str(value) for key, value in query.items() if value is not None}
    if is_scaling:
        _show_scaling(context, name, given)
        return
    if given:
        raise typer.BadParameter("--topic, --horizon and the like need --scaling")
    _show_all(context, name)


def _show_scaling(context: typer.Context, name: str, query: dict[str, str]) -> None:
    hint = call(context, "GET", f"/groups/{segment(name)}/scaling", query=query)
    rows = [(t["topic"], t["ready"], t["inFlight"], t["scheduled"]) for t in hint["topics"]]
    if len(rows) > 1:
        rows.append(("(all)", hint["ready"], hint["inFlight"], hint["scheduled"]))
    soon = f"DUE IN {hint['horizonSeconds']} S"
    show(context, hint, ("TOPIC", "READY", "IN FLIGHT", soon), rows, items=hint["topics"])
    if is_text(context):
        replicas = f": {hint['replicas']} consumers" if "replicas" in hint else ""
        typer.echo(f"KEDA gets {hint['value']}{replicas}")


def _show_all(context: typer.Context, name: str) -> None:
    path = f"/groups/{segment(name)}"
    group = call(context, "GET", path)
    progress = call(context, "GET", f"{path}/progress")
    clients = call(context, "GET", "/clients", query={"group": name}, may_be_forbidden=True)
    diagnosis = _diagnose(context, path)
    unreachable = {
        each
        for answer in (group, progress, clients or {}, diagnosis)
        for each in answer.get("unreachable", [])
    }
    answer = {**progress, **group, "findings": diagnosis["findings"]}
    if clients is not None:
        answer["clients"] = clients["clients"]
    if unreachable:
        answer["unreachable"] = sorted(unreachable)
    show(context, answer, ("GROUP", name), _settings(group, progress))
    if is_text(context):
        now_ms = SystemClock().wall_ms()
        _show_progress(context, progress, now_ms)
        _show_consumers(context, clients)
        _show_findings(diagnosis)
    warn_unreachable(answer)


def _settings(group: Json, progress: Json) -> list[tuple[str, object]]:
    state = group.get("state")
    if state == NEVER_POLLED and (progress["topics"] or group.get("filters")):
        state = "unknown: the numbers are from before the first poll"
    rows: list[tuple[str, object]] = [
        ("state", state),
        ("order", group["deliveryOrder"]),
        ("attempts", group["maxAttempts"]),
        ("retry", retry_text(group["retry"])),
        ("starts from", group["startFrom"]),
        ("priority factor", group.get("priorityFactor", "-")),
        ("in, out per second", _rates(group)),
    ]
    if "paused" in group:
        pause = group["paused"]
        reason = f": {printable(pause['reason'])}" if "reason" in pause else ""
        rows.append(("paused until", f"{utc(pause['untilMs'])} by {pause['by']}{reason}"))
    if group.get("lag") and progress["total"]["lag"]:
        left_ms = group.get("caughtUpInMs")
        rows.append(("caught up in", "never at this pace" if left_ms is None else span(left_ms)))
    rows += [("filter", filter_text(each)) for each in group.get("filters") or ()]
    rows += [("conflict", conflict_text(each)) for each in group.get("conflicts") or ()]
    return rows


def _rates(group: Json) -> str:
    return ", ".join(number(group.get(key)) for key in ("inPerSecond", "outPerSecond"))


def _show_progress(context: typer.Context, progress: Json, now_ms: int) -> None:
    typer.echo()
    parts = [*progress["topics"], {"topic": "(total)", **progress["total"]}]
    rows = [
        (
            each["topic"],
            each["lag"],
            each["ready"],
            each["blocked"],
            each["inFlight"],
            age(each.get("oldestUnackedAtMs"), now_ms),
        )
        for each in parts
    ]
    columns = "TOPIC", "LAG", "READY", "BLOCKED", "IN FLIGHT", "OLDEST UNACKED"
    show_table(context, columns, rows)
    if progress["locks"]:
        _show_locks(context, progress["locks"], now_ms)
    if progress.get("pulled"):
        typer.echo("\nPulled (offsets that the group reported):")
        pulled = [(each["topic"], each["queues"], each["behind"]) for each in progress["pulled"]]
        show_table(context, ("TOPIC", "QUEUES", "BEHIND"), pulled)


def _show_locks(context: typer.Context, locks: list[Json], now_ms: int) -> None:
    typer.echo("\nLocked queues:")
    rows = [
        (
            lock["topic"],
            lock["queue"],
            lock["waiting"],
            lock["messages"],
            lock["offset"],
            lock.get("messageId"),
            printable(lock.get("clientId", "(unknown)")),
            age(lock["sinceMs"], now_ms),
            from_now(lock["untilMs"], now_ms),
            lock["broker"],
        )
        for lock in locks[:LOCKS_SHOWN]
    ]
    columns = (
        "TOPIC",
        "QUEUE",
        "BEHIND IT",
        "MESSAGES",
        "OFFSET",
        "MESSAGE ID",
        "HELD BY",
        "SINCE",
        "ENDS",
        "BROKER",
    )
    count = len(columns) if has_several(locks) else len(columns) - 1
    show_table(context, columns[:count], [row[:count] for row in rows])
    if len(locks) > LOCKS_SHOWN:
        typer.echo(f"and {len(locks) - LOCKS_SHOWN} more: --output json shows all")


def _show_consumers(context: typer.Context, clients: Json) -> None:
    """Print the connected consumers; None: the user may not see clients."""
    if clients is None or not clients["clients"]:
        return
    typer.echo("\nConsumers:")
    rows = [
        (
            printable(each["clientId"]),
            printable(f"{each['language']} {each['version']}".strip()),
            ", ".join(proxy["name"] for proxy in each["proxies"]),
            span(each["silentMs"]),
        )
        for each in clients["clients"][:CONSUMERS_SHOWN]
    ]
    show_table(context, ("CLIENT", "LANGUAGE", "PROXY", "SILENT"), rows)
    if len(clients["clients"]) > CONSUMERS_SHOWN or clients.get("nextPageToken"):
        typer.echo("and more: tidemill client list --group")


def _diagnose(context: typer.Context, path: str) -> Json:
    """Return the diagnosis; without findings if it is not available."""
    try:
        return connect(context).call("GET", f"{path}/diagnosis")
    except (RestRejection, RestUnreachable) as error:
        warn(f"the causes of a backlog are unknown: {error}")
        return {"findings": []}


def _show_findings(diagnosis: Json) -> None:
    """Print why a group is behind; nothing if no cause is known."""
    if diagnosis["findings"]:
        typer.echo()
    for each in diagnosis["findings"]:
        typer.echo(f"{each['code']}: {printable(each['text'])}\n    {printable(each['command'])}")
    if "unknown" in diagnosis:
        warn(f"causes may be missing: {diagnosis['unknown']}")


def retry_text(retry: Json) -> str:
    """Describe a retry policy."""
    if policy := retry.get("exponential"):
        return f"{policy['initialMs']} ms x {policy['multiplier']:g} up to {policy['maxMs']} ms"
    waits = [f"{ms} ms" for ms in retry["customized"]["nextMs"]]
    if len(waits) > WAITS_SHOWN_MAX:
        return f"{', '.join(waits[: WAITS_SHOWN_MAX - 1])}, ... {waits[-1]} ({len(waits)} waits)"
    return ", ".join(waits)
