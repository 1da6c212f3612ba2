"""`tidemill topic ...`."""

from __future__ import annotations

from typing import Annotated

import typer

from tidemill.cli.dedup_keys import (
    KeySource,
    MaxWait,
    Memory,
    RepeatMode,
    Window,
    dedup_body,
    show_dedup,
)
from tidemill.cli.equal_objects import FORCE, put, say_exists
from tidemill.cli.numbers import TopicPrefix, TopicSort, list_query, number, warn_unknown
from tidemill.cli.rest import (
    call,
    call_pages,
    check_is_sure,
    has_several,
    is_text,
    of_namespace,
    say,
    segment,
    show,
    show_table,
    warn_clients,
    warn_unreachable,
)
from tidemill.cli.topic_copies import like
from tidemill.cli.topic_options import (
    CheckAttempts,
    CheckPeriod,
    DryRun,
    FirstCheck,
    Force,
    Like,
    Name,
    Queues,
    Retention,
    RetentionAcked,
    RetentionBytes,
    Spread,
    TopicTypeName,
    Type,
    Yes,
    checks_body,
    retention_body,
)
from tidemill.cli.topic_texts import (
    change_text,
    checks_text,
    creator_text,
    is_kept_less,
    is_kept_shorter,
    retention_text,
)
from tidemill.common.clock import SystemClock
from tidemill.common.prompts import confirm, warn
from tidemill.common.rest_client import Json
from tidemill.common.times import INSTANT, age, duration_ms, instant_ms
from tidemill.message.resource_names import DEAD_LETTER_TOPIC_PREFIX

app = typer.Typer(no_args_is_help=True, help="Create, list, show and delete topics.")

UNSERVED = {TopicTypeName.LITE}


@app.command("list")
def list_topics(
    context: typer.Context,
    is_system: Annotated[
        bool, typer.Option("--system", help="Also the retry and dead-letter topics.")
    ] = False,
    sort: TopicSort = None,
    prefix: TopicPrefix = None,
) -> None:
    """List topics with their messages, and with messages per second in and out.

    The numbers are up to 5 s old. An unknown number is shown as `?`.

    Examples:
    * `tidemill topic list`
    * `tidemill topic list --sort -bytes`
    * `tidemill topic list --prefix orders. --sort -inPerSecond`
    """
    query = {"includeSystem": str(is_system).lower(), **of_namespace(context)}
    query |= list_query(sort, prefix)
    topics = call_pages(context, "/topics", "topics", **query)
    rows = [
        (
            topic["name"],
            topic["messageType"],
            topic["queues"],
            number(topic.get("messages")),
            number(topic.get("inPerSecond")),
            number(topic.get("outPerSecond")),
            number(topic.get("pendingTimers")),
        )
        for topic in topics
    ]
    columns = "TOPIC", "TYPE", "QUEUES", "MESSAGES", "IN/S", "OUT/S", "TIMERS"
    show(context, topics, columns, rows)
    warn_unknown(topics)


@app.command("create")
def create_topic(
    context: typer.Context,
    name: Name,
    kind: Type = None,
    queues: Queues = None,
    delivery_spread: Spread = None,
    retention: Retention = None,
    retention_bytes: RetentionBytes = None,
    retention_acked: RetentionAcked = None,
    first_check: FirstCheck = None,
    check_period: CheckPeriod = None,
    check_attempts: CheckAttempts = None,
    dedup_window: Window = None,
    dedup_key_from: KeySource = None,
    dedup_mode: RepeatMode = None,
    dedup_max_wait: MaxWait = None,
    dedup_memory: Memory = None,
    model: Like = None,
    is_dry: DryRun = False,
) -> None:
    """Create a topic. If a topic with these settings exists, nothing changes.

    A topic cannot be renamed. Create another one with --like, move producers and consumers to it,
    and delete the old topic when its consumers have received its messages.

    Examples:
    * `tidemill topic create orders --type FIFO --queues 4`
    * `tidemill topic create reminders --type DELAY --delivery-spread 5s`
    * `tidemill topic create orders-eu --like orders`
    """
    body: dict[str, Json] = {
        "messageType": kind.value if kind else None,
        "queues": queues,
        "deliverySpreadMs": None if delivery_spread is None else duration_ms(delivery_spread),
    }
    body["retention"] = retention_body(retention, retention_bytes, retention_acked)
    body["transaction"] = checks_body(first_check, check_period, check_attempts)
    options = dedup_window, dedup_key_from, dedup_mode, dedup_max_wait, dedup_memory
    dedup = dedup_body(*options, is_on=False)
    given = _given(body, dedup)
    if model is not None:
        given = like(context, model, given)
    known = call(context, "GET", f"/topics/{segment(name)}", may_miss=True)
    if known is not None:
        say_exists(context, "topic", name, known, given)
    else:
        _put(context, name, given, is_dry=is_dry, is_new_only=True)


@app.command("set")
def set_topic(
    context: typer.Context,
    name: Name,
    kind: Type = None,
    queues: Queues = None,
    delivery_spread: Spread = None,
    retention: Retention = None,
    retention_bytes: RetentionBytes = None,
    retention_acked: RetentionAcked = None,
    first_check: FirstCheck = None,
    check_period: CheckPeriod = None,
    check_attempts: CheckAttempts = None,
    dedup_window: Window = None,
    dedup_key_from: KeySource = None,
    dedup_mode: RepeatMode = None,
    dedup_max_wait: MaxWait = None,
    dedup_memory: Memory = None,
    is_forced: Force = False,
    is_dry: DryRun = False,
    is_sure: Yes = False,
) -> None:
    """Change a topic. Settings without an option stay.

    A shorter retention removes messages at once, so it needs a confirmation or --yes. A dead-letter
    topic has only the retention.

    Examples:
    * `tidemill topic set orders --retention 30d --retention-bytes 10GiB`
    * `tidemill topic set %DLQ%billing --retention forever`
    * `tidemill topic set payments --first-check 30s --check-period 1m --check-attempts 20`
    * `tidemill topic set orders --dedup-window 10m --dedup-key-from property`
    """
    # The consumer group decides whether a dead-letter topic may exist.
    may_miss = name.startswith(DEAD_LETTER_TOPIC_PREFIX)
    known = call(context, "GET", f"/topics/{segment(name)}", may_miss=may_miss) or {}
    body: dict[str, Json] = {
        "messageType": kind.value if kind else None,
        "queues": queues,
        "deliverySpreadMs": None if delivery_spread is None else duration_ms(delivery_spread),
    }
    body["retention"] = retention_body(retention, retention_bytes, retention_acked)
    body["transaction"] = checks_body(first_check, check_period, check_attempts)
    options = dedup_window, dedup_key_from, dedup_mode, dedup_max_wait, dedup_memory
    dedup = dedup_body(*options, is_on="dedup" in known)
    given = _given(body, dedup)
    if is_forced:
        given[FORCE] = True
    if not is_dry and not is_sure and "retention" in given:
        _confirm_retention(context, name, given)
    _put(context, name, given, is_dry=is_dry)


def _confirm_retention(context: typer.Context, name: str, given: dict[str, Json]) -> None:
    """Ask before a change that keeps messages for less time or in less space."""
    path = f"/topics/{segment(name)}"
    planned = call(context, "PUT", path, body=given, query={"dryRun": "true"})
    before = planned.get("before")
    if before is None or not is_kept_less(before, planned):
        return
    check_is_sure("topic set with a shorter retention", is_sure=False)
    loss = ""
    if (count := planned.get("expiredMessages")) is not None:
        loss = f" {count} stored messages are older."
    elif is_kept_shorter(before, planned):
        loss = " The number of older messages is unknown."
    confirm(
        f"Keep messages of topic {name} {retention_text(planned)}, no longer"
        f" {retention_text(before)}?{loss} The broker removes messages beyond it at once."
    )


def _given(body: dict[str, Json], dedup: dict[str, Json]) -> dict[str, Json]:
    """Return the given settings. `dedup` is empty, or null to turn the deduplication off."""
    given = {key: value for key, value in body.items() if value is not None and value != {}}
    return given | dedup


def _put(
    context: typer.Context,
    name: str,
    given: dict[str, Json],
    *,
    is_dry: bool,
    is_new_only: bool = False,
) -> None:
    topic = put(context, "topic", name, given, is_dry=is_dry, is_new_only=is_new_only)
    if topic is None:
        return
    before = None if topic["isNew"] else topic.get("before", topic)
    say(context, topic, f"topic {name}: {change_text(before, topic)}")
    if "warning" in topic:
        warn(topic["warning"])
    if topic["messageType"] in UNSERVED:
        warn(f"{topic['messageType']} messages are not served yet; sending them is refused")


@app.command("show")
def show_topic(context: typer.Context, name: Name) -> None:
    """Show a topic and its queues, and the levels of a PRIORITY topic.

    Each level has a row per consumer group that reads the topic. The counts include retries.

    SEALED is shown if retention waits for an archive. Messages from this offset on are kept beyond
    the retention while there is room.

    Example: tidemill topic show orders
    """
    topic = call(context, "GET", f"/topics/{segment(name)}")
    queues = topic["queueStatus"]
    columns = {"QUEUE": "queueId", "FIRST": "minOffset", "NEXT": "maxOffset"}
    if any("sealedOffset" in queue for queue in queues):
        columns["SEALED"] = "sealedOffset"
    # The name of a single broker group is redundant.
    if has_several(queues):
        columns["BROKER"] = "broker"
    rows = [
        (name, topic["messageType"], *(queue.get(field, "-") for field in columns.values()))
        for queue in queues
    ]
    show(context, topic, ("TOPIC", "TYPE", *columns), rows)
    if is_text(context):
        typer.echo(creator_text(topic))
    if is_text(context) and "levels" in topic:
        _show_levels(context, topic["levels"])
    if is_text(context) and "retention" in topic:
        typer.echo(f"Messages are kept {retention_text(topic)}.")
    if is_text(context) and "transaction" in topic:
        typer.echo(f"Half messages are checked {checks_text(topic)}.")
    has_keys = "dedup" in topic or "dedupOffPending" in topic
    if is_text(context) and has_keys:
        show_dedup(context, topic)
    warn_unreachable(topic)


def _show_levels(context: typer.Context, levels: list[Json]) -> None:
    """Print a row per level and consumer group, the highest level first."""
    typer.echo("\nLevels:")
    now_ms = SystemClock().wall_ms()
    columns = {"GROUP": "group", "READY": "ready", "BLOCKED": "blocked", "IN FLIGHT": "inFlight"}
    if not any(group["blocked"] for level in levels for group in level["groups"]):
        del columns["BLOCKED"]  # Only FIFO consumer groups have blocked messages.
    rows = [
        (
            level["level"],
            level["messages"],
            *(group.get(field, "-") for field in columns.values()),
            age(group.get("oldestReadyAtMs"), now_ms) or "-",
        )
        for level in reversed(levels)
        for group in level["groups"] or [{}]
    ]
    show_table(context, ("LEVEL", "MESSAGES", *columns, "OLDEST READY"), rows)


@app.command("delete")
def delete_topic(
    context: typer.Context, name: Name, is_dry: DryRun = False, is_sure: Yes = False
) -> None:
    """Delete a topic with its messages.

    Example: tidemill topic delete orders --yes
    """
    path = f"/topics/{segment(name)}"
    if not is_dry:
        check_is_sure("topic delete", is_sure=is_sure)
    if is_dry or not is_sure:
        planned = call(context, "DELETE", path, query={"dryRun": "true"})
        groups = ", ".join(planned["groups"]) or "nobody"
        loss = f"{planned['messages']} messages and {planned['delayedMessages']} delayed ones"
        loss += f", read by {groups}"
        if is_dry:
            say(context, planned, f"topic {name} would be deleted, with {loss}")
            warn_unreachable(planned)
            warn_clients(planned)
            return
        warn_unreachable(planned)
        warn_clients(planned)
        confirm(f"Delete topic {name} with {loss}? Delayed messages go to %DLQ%TIMER.")
    deleted = call(context, "DELETE", path)
    say(context, deleted, f"topic {name} is deleted")
    if is_sure:
        warn_clients(deleted)


@app.command("purge")
def purge_topic(
    context: typer.Context,
    name: Name,
    before: Annotated[
        str | None,
        typer.Option(metavar=INSTANT, help="Remove only messages stored before this time."),
    ] = None,
    queue: Annotated[int | None, typer.Option(help="Purge only this queue.")] = None,
    with_retries: Annotated[
        bool, typer.Option("--retries", help="Also remove the retries of its messages.")
    ] = False,
    is_dry: DryRun = False,
    is_sure: Yes = False,
) -> None:
    """Remove the messages of a topic, read or not. Delayed messages stay.

    Examples:
    * `tidemill topic purge orders --dry-run`
    * `tidemill topic purge orders --before 2027-01-01T08:00:00Z --retries --yes`
    """
    path = f"/topics/{segment(name)}:purge"
    body: dict[str, Json] = {"includeRetries": with_retries}
    if before is None:
        body["all"] = True
    else:
        body["beforeTimestampMs"] = instant_ms(before)
    if queue is not None:
        body["queue"] = queue
    if not is_dry:
        check_is_sure("topic purge", is_sure=is_sure)
    if not is_dry and not is_sure:
        planned = call(context, "POST", path, body=body, query={"dryRun": "true"})
        warn_unreachable(planned)
        confirm(f"Remove {_purged(planned)} of topic {name}?{_readers(planned)}")
    done = call(context, "POST", path, body=body, query={"dryRun": str(is_dry).lower()})
    verb = "would be removed" if is_dry else "are removed"
    say(context, done, f"{_purged(done)} of topic {name} {verb}.{_readers(done)}")
    if is_dry:
        warn_unreachable(done)


@app.command("spread")
def spread_topic(context: typer.Context, name: Name, is_dry: DryRun = False) -> None:
    """Make all active broker groups owners of the dedup keys of a topic.

    Run it after a broker group has joined, or to take the keys of a draining one. Keys that move
    are looked up at their old owners until their windows are over.

    Example: tidemill topic spread orders
    """
    path = f"/topics/{segment(name)}:spread"
    done = call(context, "POST", path, query={"dryRun": str(is_dry).lower()})
    owners = ", ".join(done["topic"]["dedup"].get("brokerGroups", [])) or "the only broker group"
    if "before" not in done:
        say(context, done, f"the dedup keys of topic {name} are owned by {owners}, unchanged")
        return
    verb = "would be" if is_dry else "are"
    moving = ", ".join(done["topic"]["dedup"].get("movingFrom", []))
    say(context, done, f"the dedup keys of topic {name} {verb} owned by {owners}; before: {moving}")


def _purged(found: Json) -> str:
    groups = found["brokerGroups"]
    messages, size = (sum(one[key] for one in groups) for key in ("messages", "bytes"))
    return f"{messages} messages ({size / (1 << 20):.1f} MiB)"


def _readers(found: Json) -> str:
    groups = ", ".join(found["groups"]) or "nobody"
    delayed = found["delayedMessages"]
    kept = f" {delayed} delayed messages stay (tidemill timer list)." if delayed else ""
    return f" Read by {groups}.{kept}"
