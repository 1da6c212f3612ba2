"""`tidemill group ...`.

The file is long because each option of a command is a parameter with its help.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from tidemill.cli import progress_watch
from tidemill.cli.completion_names import complete_group, complete_topic
from tidemill.cli.conflicts import conflict_text, filter_text
from tidemill.cli.messages import printable
from tidemill.cli.numbers import GroupSort, number, sort_of, warn_unknown
from tidemill.cli.rest import (
    OutputFormat,
    call,
    call_pages,
    check_is_sure,
    connect,
    has_several,
    in_namespace,
    of_namespace,
    options_of,
    say,
    segment,
    show,
    show_table,
    warn_clients,
    warn_unreachable,
)
from tidemill.common.clock import SystemClock
from tidemill.common.exit_codes import EXIT_REFUSED
from tidemill.common.prompts import confirm, fail, warn
from tidemill.common.rest_client import Json, RestRejection, RestUnreachable
from tidemill.common.times import INSTANT, age, duration_ms, from_now, instant_ms, utc

app = typer.Typer(
    no_args_is_help=True,
    help="Create, list, show, diagnose, pause, resume, reset, release, forget and delete groups.",
)

LOCKS_SHOWN = 20  # locked queues with the largest backlog; --output json shows all
WAITS_SHOWN_MAX = 4  # waits of a retry policy: the first and the last; --output json shows all
STRICT_FACTOR = 100  # priority factor without a share for low levels
NEVER_POLLED = "NEVER_POLLED"  # state of a group without a lag
QUEUES_SHOWN_MAX = 8  # queues in the question before a reset

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the effect and change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Name = Annotated[
    str,
    typer.Argument(
        help="Name of the consumer group.", callback=in_namespace, autocompletion=complete_group
    ),
]


PriorityFactor = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=STRICT_FACTOR,
        help="Percentage of messages of a PRIORITY topic by priority; the others are the oldest of"
        " lower levels. New group: 90.",
    ),
]


class Order(StrEnum):
    """Delivery order of a consumer group."""

    CONCURRENT = "CONCURRENT"
    FIFO = "FIFO"


class TopicEnd(StrEnum):
    """An end of a topic."""

    EARLIEST = "earliest"
    LATEST = "latest"


@app.command("list")
def list_groups(context: typer.Context, sort: GroupSort = None) -> None:
    """List consumer groups with their state, lag, consumers and dead letters.

    The numbers are up to 5 s old. An unknown number is shown as `?`. `tidemill group show` has the
    settings.

    Examples:
    * `tidemill group list`
    * `tidemill group list --sort=-lag`
    """
    groups = call_pages(context, "/groups", "groups", **of_namespace(context), **sort_of(sort))
    now_ms = SystemClock().wall_ms()
    rows = [
        (
            g["name"],
            g["deliveryOrder"],
            g.get("state", "?"),
            "-" if g.get("state") == NEVER_POLLED else number(g.get("lag")),
            age(g.get("oldestUnackedAtMs"), now_ms) if g.get("lag") is not None else "-",
            number(g.get("inPerSecond")),
            number(g.get("outPerSecond")),
            number(g.get("consumers")),
            number(g.get("deadLetters")),
        )
        for g in groups
    ]
    columns = "GROUP", "ORDER", "STATE", "LAG", "OLDEST", "IN/S", "OUT/S", "CONSUMERS", "DEAD"
    show(context, groups, columns, rows)
    warn_unknown(groups)


@app.command("create")
def create_group(
    context: typer.Context,
    name: Name,
    order: Annotated[
        Order | None,
        typer.Option(
            case_sensitive=False, help="Delivery order; FIFO: one batch per queue at a time."
        ),
    ] = None,
    max_attempts: Annotated[
        int | None,
        typer.Option(help="Deliveries before a message is a dead letter. New group: 17."),
    ] = None,
    retry_ms: Annotated[
        list[int] | None,
        typer.Option(
            help="Wait before a retry, in ms. Repeat the option for the next retries. New group: 16"
            " waits from 10 s to 2 h."
        ),
    ] = None,
    start_from: Annotated[
        TopicEnd | None,
        typer.Option(help="Start of a group that has read nothing yet. Default: earliest."),
    ] = None,
    priority_factor: PriorityFactor = None,
    is_dry: DryRun = False,
    is_sure: Yes = False,
) -> None:
    """Create or change a consumer group; ask before attempts are reduced.

    A message that has used up the new number of attempts becomes a dead letter when it is due.

    Examples:
    * `tidemill group create billing --order FIFO --max-attempts 5`
    * `tidemill group create billing --max-attempts 3 --dry-run`
    """
    body = {
        "deliveryOrder": order.value if order else None,
        "maxAttempts": max_attempts,
        "retry": {"customized": {"nextMs": retry_ms}} if retry_ms else None,
        "startFrom": start_from.value if start_from else None,
        "priorityFactor": priority_factor,
    }
    given = {key: value for key, value in body.items() if value is not None}
    path = f"/groups/{segment(name)}"
    # The home alone answers, so other broker groups may be down.
    known = call(context, "GET", path, may_miss=True) if is_dry or max_attempts else None
    if is_dry:
        planned = (known or {"maxAttempts": "default", "deliveryOrder": "CONCURRENT"}) | given
        answer = {"dryRun": True, "isNew": known is None, "given": given}
        say(context, answer, f"group {name} would be: {change_of(known, planned)}")
        return
    if known is not None and max_attempts is not None and max_attempts < known["maxAttempts"]:
        check_is_sure("group create with fewer attempts", is_sure=is_sure)
        if not is_sure:
            confirm(
                f"Reduce the attempts of group {name} from {known['maxAttempts']} to"
                f" {max_attempts}? A message that has used them up becomes a dead letter when it is"
                f" due."
            )
    _put(context, name, given)


@app.command("set")
def set_group(context: typer.Context, name: Name, priority_factor: PriorityFactor = None) -> None:
    """Change a consumer group. Settings without an option stay.

    Example: tidemill group set billing --priority-factor 90
    """
    call(context, "GET", f"/groups/{segment(name)}")  # Ends the command if it is missing.
    _put(context, name, {} if priority_factor is None else {"priorityFactor": priority_factor})


def _put(context: typer.Context, name: str, given: Json) -> None:
    group = call(context, "PUT", f"/groups/{segment(name)}", body=given)
    before = None if group["isNew"] else group.get("before", group)
    say(context, group, f"group {name}: {change_of(before, group)}")
    if group.get("priorityFactor") == STRICT_FACTOR:
        warn(f"with factor {STRICT_FACTOR}, messages of low priority can wait without end")


def change_of(before: Json, group: Json) -> str:
    """Describe a consumer group, with old values where they differ."""
    if before is None:
        return f"new: {group['deliveryOrder']}, {group['maxAttempts']} attempts"
    attempts = f"{group['maxAttempts']} attempts"
    if before["maxAttempts"] != group["maxAttempts"]:
        attempts = f"{before['maxAttempts']} -> {attempts}"
    retry = ""
    if before["retry"] != group["retry"]:
        retry = f", retry {_retry(before['retry'])} -> {_retry(group['retry'])}"
    factor = ""
    if before.get("priorityFactor") != group.get("priorityFactor"):
        factor = f", priority factor {before['priorityFactor']} -> {group['priorityFactor']}"
    word = "changed" if "->" in attempts + retry + factor else "is there, unchanged"
    return f"{word}: {group['deliveryOrder']}, {attempts}{retry}{factor}"


@app.command("pause")
def pause_group(
    context: typer.Context,
    name: Name,
    duration: Annotated[
        str, typer.Option("--for", metavar="DURATION", help="Time of the pause, at most 30d.")
    ] = "1d",
    reason: Annotated[str, typer.Option(help="Reason, for other operators.")] = "",
    is_dry: DryRun = False,
) -> None:
    """Stop the delivery of messages to a consumer group for some time.

    Push and simple consumers stay connected and receive nothing; pull consumers go on. Consumers
    may still ack what they have. Messages wait, and count in the lag. A second pause changes the
    end. All broker groups need feature level 5.

    Examples:
    * `tidemill group pause billing --for 2h --reason "database moves"`
    * `tidemill group resume billing`
    """
    now_ms = SystemClock().wall_ms()
    end_ms = now_ms + duration_ms(duration)
    body = {"untilMs": end_ms, "reason": reason}
    group = _act(context, name, "pause", body, is_dry=is_dry)
    until_ms = group["paused"]["untilMs"] if "paused" in group else end_ms
    verb = "would be" if is_dry else "is"
    sentence = f"group {name} {verb} paused until {utc(until_ms)} ({from_now(until_ms, now_ms)})"
    say(context, group, sentence)


@app.command("resume")
def resume_group(context: typer.Context, name: Name, is_dry: DryRun = False) -> None:
    """End the pause of a consumer group at once.

    Example: tidemill group resume billing
    """
    group = _act(context, name, "resume", None, is_dry=is_dry)
    say(context, group, f"group {name} {'would receive' if is_dry else 'receives'} messages")


def _act(context: typer.Context, name: str, verb: str, body: Json, *, is_dry: bool) -> Json:
    query = {"dryRun": "true"} if is_dry else {}
    return call(context, "POST", f"/groups/{segment(name)}:{verb}", body=body, query=query)


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
        ("priority factor", group.get("priorityFactor", "-")),
    ]
    if "paused" in group:
        pause = group["paused"]
        reason = f": {printable(pause['reason'])}" if "reason" in pause else ""
        rows.append(("paused until", f"{utc(pause['untilMs'])} by {pause['by']}{reason}"))
    rows += [("filter", filter_text(each)) for each in group.get("filters") or ()]
    rows += [("conflict", conflict_text(each)) for each in group.get("conflicts") or ()]
    show(context, group, ("GROUP", name), rows)
    warn_unreachable(group)
    if options_of(context).output is not OutputFormat.JSON:
        try:
            _print_findings(connect(context).call("GET", f"/groups/{segment(name)}/diagnosis"))
        except (RestRejection, RestUnreachable) as error:
            warn(f"the causes of a backlog are unknown: {error}")


def _print_findings(diagnosis: Json) -> None:
    """Print why a group is behind; nothing if no cause is known."""
    for each in diagnosis["findings"]:
        typer.echo(f"{each['code']}: {printable(each['text'])}\n    {printable(each['command'])}")
    if "unknown" in diagnosis:
        warn(f"causes may be missing: {diagnosis['unknown']}")


@app.command("diagnose")
def diagnose_group(context: typer.Context, name: Name) -> None:
    """Explain why a consumer group is behind, with a command for each cause.

    It looks for pauses, missing, silent and slow consumers, locked queues, failures, different
    filters, and messages that retention will remove soon. The rates are those of the last seconds.

    Example: tidemill group diagnose billing
    """
    found = call(context, "GET", f"/groups/{segment(name)}/diagnosis")
    if options_of(context).output is OutputFormat.JSON:
        say(context, found, "")
        return
    if not found["findings"]:
        typer.echo(f"group {name}: no cause of a backlog is known")
    _print_findings(found)
    warn_unreachable(found)


@app.command("scale-hint")
def scale_hint(
    context: typer.Context,
    name: Name,
    topic: Annotated[
        str | None,
        typer.Option(
            help="Only this topic; else all that the group reads.",
            callback=in_namespace,
            autocompletion=complete_topic,
        ),
    ] = None,
    horizon: Annotated[
        int | None,
        typer.Option(min=0, help="Count delayed messages due within these seconds. Default: 60."),
    ] = None,
    messages_per_replica: Annotated[
        int | None, typer.Option(min=1, help="Messages per consumer; shows the consumers needed.")
    ] = None,
    ignore_in_flight: Annotated[
        bool, typer.Option("--ignore-in-flight", help="Do not count messages in flight.")
    ] = False,
) -> None:
    """Show the backlog of a consumer group, now and soon, as KEDA gets it.

    Example: tidemill group scale-hint billing --horizon 120 --messages-per-replica 100
    """
    query = {
        "topic": topic,
        "horizonSeconds": horizon,
        "messagesPerReplica": messages_per_replica,
        "countInFlight": "false" if ignore_in_flight else None,
    }
    given = {key: str(value) for key, value in query.items() if value is not None}
    hint = call(context, "GET", f"/groups/{segment(name)}/scaling", query=given)
    rows = [(t["topic"], t["ready"], t["inFlight"], t["scheduled"]) for t in hint["topics"]]
    if len(rows) > 1:
        rows.append(("(all)", hint["ready"], hint["inFlight"], hint["scheduled"]))
    soon = f"DUE IN {hint['horizonSeconds']} S"
    show(context, hint, ("TOPIC", "READY", "IN FLIGHT", soon), rows)
    if options_of(context).output is not OutputFormat.JSON:
        replicas = f": {hint['replicas']} consumers" if "replicas" in hint else ""
        typer.echo(f"KEDA gets {hint['value']}{replicas}")


@app.command("progress")
def show_progress(
    context: typer.Context,
    name: Name,
    is_watched: Annotated[
        bool,
        typer.Option(
            "--watch",
            "-w",
            help="Repeat every 2 s until Ctrl-C, with messages in and out per second and the time"
            " until the group has caught up.",
        ),
    ] = False,
) -> None:
    """Show the progress of a consumer group: messages ready and in flight, and the oldest one.

    For a FIFO group, also show its locked queues. BLOCKED messages are delivered after the message
    that locks their queue is acked, expires, or is released (`tidemill group release`). `tidemill
    delivery ls` shows the consumer of each message.

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
            p["topic"],
            p["lag"],
            p["ready"],
            p["blocked"],
            p["inFlight"],
            age(p.get("oldestUnackedAtMs"), now_ms),
        )
        for p in parts
    ]
    columns = "TOPIC", "LAG", "READY", "BLOCKED", "IN FLIGHT", "OLDEST UNACKED"
    show(context, progress, columns, rows)
    if progress["locks"] and options_of(context).output is OutputFormat.TABLE:
        _show_locks(progress["locks"], now_ms)
    if progress.get("pulled") and options_of(context).output is OutputFormat.TABLE:
        typer.echo("\nPulled (offsets that the group reported):")
        pulled = [(p["topic"], p["queues"], p["behind"]) for p in progress["pulled"]]
        show_table(("TOPIC", "QUEUES", "BEHIND"), pulled)
    warn_unreachable(progress)


def _show_locks(locks: list[Json], now_ms: int) -> None:
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
    show_table(columns[:count], [row[:count] for row in rows])
    if len(locks) > LOCKS_SHOWN:
        typer.echo(f"and {len(locks) - LOCKS_SHOWN} more: --output json shows all")


@app.command("release")
def release_lock(
    context: typer.Context,
    name: Name,
    topic: Annotated[
        str,
        typer.Option(
            help="Topic of the locked queue.", callback=in_namespace, autocompletion=complete_topic
        ),
    ],
    queue: Annotated[int, typer.Option(min=0, help="Number of the locked queue.")],
    broker: Annotated[
        str | None,
        typer.Option(
            help="Broker group of the queue, if several have a locked queue of this number."
        ),
    ] = None,
    is_dry: DryRun = False,
    is_sure: Yes = False,
) -> None:
    """Unlock a queue of a FIFO group: another consumer gets its messages at once.

    Examples:
    * `tidemill group release billing --topic orders --queue 3 --dry-run`
    * `tidemill group release billing --topic orders --queue 3`
    """
    if is_dry:
        progress = call(context, "GET", f"/groups/{segment(name)}/progress")
        locks = [
            lock
            for lock in progress["locks"]
            if (lock["topic"], lock["queue"]) == (topic, queue) and broker in {None, lock["broker"]}
        ]
        if not locks:
            fail(f"queue {queue} of {topic} is not locked", EXIT_REFUSED)
        say(context, locks, "\n".join(f"would be released: {_lock_words(lock)}" for lock in locks))
        warn_unreachable(progress)
        return
    check_is_sure("group release", is_sure=is_sure)
    if not is_sure:
        confirm(
            f"Release queue {queue} of {topic} to another consumer of {name}? Messages that the"
            f" consumer still works on are then processed twice."
        )
    body = {"topic": topic, "queue": queue} | ({"broker": broker} if broker else {})
    done = call(context, "POST", f"/groups/{segment(name)}:releaseLock", body=body)
    say(context, done, f"queue {queue} of {topic} is released: {_lock_words(done['released'])}")


def _lock_words(lock: Json) -> str:
    holder = printable(lock.get("clientId", "(unknown)"))
    return (
        f"{lock['messages']} messages from offset {lock['offset']}, held by {holder}, and"
        f" {lock['waiting']} behind them"
    )


@app.command("reset")
def reset_group(
    context: typer.Context,
    name: Name,
    topic: Annotated[
        str,
        typer.Option(
            help="Topic of the reset.", callback=in_namespace, autocompletion=complete_topic
        ),
    ],
    to: Annotated[TopicEnd | None, typer.Option(help="An end of the topic.")] = None,
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
    """Move the position of a consumer group in a topic.

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
        confirm(f"Move the position of group {name} in topic {topic}?")
    done = call(context, "POST", path, body=body | {"dryRun": is_dry})
    queues = done["queues"]
    rows = [(q["queueId"], q.get("fromOffset"), q["toOffset"], q["broker"]) for q in queues]
    columns = ("QUEUE", "FROM", "WOULD MOVE TO" if is_dry else "MOVED TO", "BROKER")
    count = len(columns) if has_several(queues) else len(columns) - 1
    show(context, done, columns[:count], [row[:count] for row in rows])


@app.command("forget")
def forget_pulled(
    context: typer.Context,
    name: Name,
    topic: Annotated[
        str,
        typer.Option(
            help="Topic that the group no longer pulls.",
            callback=in_namespace,
            autocompletion=complete_topic,
        ),
    ],
    is_dry: DryRun = False,
    is_sure: Yes = False,
) -> None:
    """Forget the pull offsets of a consumer group in a topic that is no longer archived.

    If archive_gate_group names this group, brokers then apply the retention to the topic again.
    First remove the topic from `tidemill pipeline archive --gate`, because its next run would
    report the offsets again. Archived messages stay, and pop consumers are not affected.

    Examples:
    * `tidemill group forget archive --topic orders --dry-run`
    * `tidemill group forget archive --topic orders`
    """
    path = f"/groups/{segment(name)}:forgetPullOffsets"
    body: dict[str, Json] = {"topic": topic}
    if not is_dry:
        check_is_sure("group forget", is_sure=is_sure)
    if is_dry or not is_sure:
        planned = call(context, "POST", path, body=body | {"dryRun": True})
        if is_dry:
            say(context, planned, f"would be forgotten: {_forgotten_words(planned)}")
            return
        confirm(f"Forget {_forgotten_words(planned)}?")
    done = call(context, "POST", path, body=body)
    say(context, done, f"forgotten: {_forgotten_words(done)}")


def _forgotten_words(answer: Json) -> str:
    queues = answer["queues"]
    if not queues:
        return f"nothing: {answer['group']} has no pull offsets in {answer['topic']}"
    behind = sum(queue["behind"] for queue in queues)
    return (
        f"pull offsets of {answer['group']} in {len(queues)} queues of {answer['topic']}, with"
        f" {behind} messages behind them"
    )


@app.command("delete")
def delete_group(
    context: typer.Context, name: Name, is_dry: DryRun = False, is_sure: Yes = False
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
            warn_clients(planned)
            return
        warn_unreachable(planned)
        warn_clients(planned)
        confirm(f"Delete group {name} and {loss}?")
    deleted = call(context, "DELETE", path)
    say(context, deleted, f"group {name} is deleted")
    if is_sure:
        warn_clients(deleted)


def _say_plan(queues: list[Json]) -> None:
    is_several = has_several(queues)
    for queue in queues[:QUEUES_SHOWN_MAX]:
        begin = queue.get("fromOffset", "the start offset of the group")
        where = f"queue {queue['queueId']}" + (f" of {queue['broker']}" if is_several else "")
        typer.echo(f"{where}: from {begin} to {queue['toOffset']}", err=True)
    if len(queues) > QUEUES_SHOWN_MAX:
        typer.echo(f"and {len(queues) - QUEUES_SHOWN_MAX} queues more", err=True)


def _retry(retry: Json) -> str:
    if policy := retry.get("exponential"):
        return f"{policy['initialMs']} ms x {policy['multiplier']:g} up to {policy['maxMs']} ms"
    waits = [f"{ms} ms" for ms in retry["customized"]["nextMs"]]
    if len(waits) > WAITS_SHOWN_MAX:
        return f"{', '.join(waits[: WAITS_SHOWN_MAX - 1])}, ... {waits[-1]} ({len(waits)} waits)"
    return ", ".join(waits)
