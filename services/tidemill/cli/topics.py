"""`tidemill topic ...`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from tidemill.cli.completion_names import complete_topic
from tidemill.cli.dedup_keys import (
    KeySource,
    MaxWait,
    Memory,
    RepeatMode,
    Window,
    dedup_body,
    show_dedup,
)
from tidemill.cli.equal_objects import say_exists
from tidemill.cli.numbers import TopicSort, number, sort_of, warn_unknown
from tidemill.cli.rest import (
    call,
    call_pages,
    check_is_sure,
    has_several,
    in_namespace,
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
from tidemill.cli.topic_texts import change_text, checks_text, retention_text
from tidemill.common.clock import SystemClock
from tidemill.common.prompts import confirm, warn
from tidemill.common.rest_client import Json
from tidemill.common.sizes import SIZE, size_bytes
from tidemill.common.times import DURATION, INSTANT, age, duration_ms, instant_ms
from tidemill.message.resource_names import DEAD_LETTER_TOPIC_PREFIX

FOREVER, DEFAULT = "forever", "default"  # values of --retention

app = typer.Typer(no_args_is_help=True, help="Create, list, show and delete topics.")

Name = Annotated[
    str,
    typer.Argument(help="Name of the topic.", callback=in_namespace, autocompletion=complete_topic),
]
Queues = Annotated[
    int | None,
    typer.Option(help="Number of queues, which bounds how far FIFO spreads; 8 by default."),
]


class TopicTypeName(StrEnum):
    """Which messages a topic takes."""

    NORMAL = "NORMAL"
    FIFO = "FIFO"
    DELAY = "DELAY"
    TRANSACTION = "TRANSACTION"
    PRIORITY = "PRIORITY"
    LITE = "LITE"
    MIXED = "MIXED"


Type = Annotated[
    TopicTypeName | None,
    typer.Option(
        "--type",
        case_sensitive=False,
        help="Messages it takes; a new topic is MIXED by default: NORMAL, FIFO and DELAY.",
    ),
]


class Acked(StrEnum):
    """What happens with messages that all consumer groups have settled."""

    KEEP = "keep"
    FREE = "free"


Spread = Annotated[
    str | None,
    typer.Option(
        metavar=DURATION,
        help="Maximum extra delay of a delayed message if its second is full; 0s: none.",
    ),
]
Retention = Annotated[
    str | None,
    typer.Option(
        metavar=f"{DURATION}|{FOREVER}|{DEFAULT}",
        help=f"Time to keep messages, 1m to 400d; {FOREVER}; {DEFAULT}: as the broker.",
    ),
]
RetentionBytes = Annotated[
    str | None,
    typer.Option(
        metavar=f"{SIZE}|{DEFAULT}",
        help=f"Size of the messages to keep per broker group, from 1MiB; {DEFAULT}: no limit.",
    ),
]
RetentionAcked = Annotated[
    Acked | None,
    typer.Option(
        help="free: remove messages that all consumer groups have settled."
        f" Default: {Acked.KEEP.value}."
    ),
]
FirstCheck = Annotated[
    str | None,
    typer.Option(
        metavar=DURATION, help="Time from a half message to its first check, 1s to 1h. Default: 6s."
    ),
]
CheckPeriod = Annotated[
    str | None,
    typer.Option(
        metavar=DURATION,
        help="Time between two checks, and from the last one to the expiry, 1s to 1h."
        " Default: 30s.",
    ),
]
CheckAttempts = Annotated[
    int | None,
    typer.Option(min=1, max=100, help="Checks of a half message before it expires. Default: 15."),
]
Force = Annotated[
    bool, typer.Option("--force", help="Change the type even of a topic with messages.")
]
Like = Annotated[
    str | None,
    typer.Option(
        "--like",
        metavar="TOPIC",
        help="Take the settings of this topic, without its messages. Other options precede them.",
        callback=in_namespace,
        autocompletion=complete_topic,
    ),
]

UNSERVED = {TopicTypeName.LITE}


@app.command("list")
def list_topics(
    context: typer.Context,
    is_system: Annotated[
        bool, typer.Option("--system", help="Also the retry and dead-letter topics.")
    ] = False,
    sort: TopicSort = None,
) -> None:
    """List topics with their messages, and with messages per second in and out.

    The numbers are up to 5 s old. An unknown number is shown as `?`.

    Examples:
    * `tidemill topic list`
    * `tidemill topic list --sort=-inPerSecond`
    """
    query = {"includeSystem": str(is_system).lower(), **of_namespace(context), **sort_of(sort)}
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
    body["retention"] = _retention_body(retention, retention_bytes, retention_acked)
    body["transaction"] = _checks_body(first_check, check_period, check_attempts)
    options = dedup_window, dedup_key_from, dedup_mode, dedup_max_wait, dedup_memory
    dedup = dedup_body(*options, is_on=False)
    given = _given(body, dedup)
    if model is not None:
        given = like(context, model, given)
    known = call(context, "GET", f"/topics/{segment(name)}", may_miss=True)
    if known is not None:
        say_exists(context, "topic", name, known, given)
    else:
        _put(context, name, given)


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
) -> None:
    """Change a topic. Settings without an option stay.

    A shorter retention removes messages at once. A dead-letter topic has only the retention.

    Examples:
    * `tidemill topic set orders --retention 30d --retention-bytes 10GiB`
    * `tidemill topic set %DLQ%billing --retention forever`
    * `tidemill topic set payments --first-check 30s --check-period 1m --check-attempts 20`
    * `tidemill topic set orders --dedup-window 10m --dedup-key-from property`
    """
    is_on = False
    if not name.startswith(DEAD_LETTER_TOPIC_PREFIX):  # Its group decides whether it may exist.
        # Ends the command if it is missing.
        is_on = "dedup" in call(context, "GET", f"/topics/{segment(name)}")
    body: dict[str, Json] = {
        "messageType": kind.value if kind else None,
        "queues": queues,
        "deliverySpreadMs": None if delivery_spread is None else duration_ms(delivery_spread),
    }
    body["retention"] = _retention_body(retention, retention_bytes, retention_acked)
    body["transaction"] = _checks_body(first_check, check_period, check_attempts)
    options = dedup_window, dedup_key_from, dedup_mode, dedup_max_wait, dedup_memory
    dedup = dedup_body(*options, is_on=is_on)
    given = _given(body, dedup)
    if is_forced:
        given["force"] = True
    _put(context, name, given)


def _given(body: dict[str, Json], dedup: dict[str, Json]) -> dict[str, Json]:
    """Return the given settings. `dedup` is empty, or null to turn the deduplication off."""
    given = {key: value for key, value in body.items() if value is not None and value != {}}
    return given | dedup


def _put(context: typer.Context, name: str, given: dict[str, Json]) -> None:
    topic = call(context, "PUT", f"/topics/{segment(name)}", body=given)
    before = None if topic["isNew"] else topic.get("before", topic)
    say(context, topic, f"topic {name}: {change_text(before, topic)}")
    if "warning" in topic:
        warn(topic["warning"])
    if topic["messageType"] in UNSERVED:
        warn(f"{topic['messageType']} messages are not served yet; sending them is refused")


def _retention_body(ms: str | None, size: str | None, acked: Acked | None) -> dict[str, Json]:
    """Return the retention as REST expects it. null: the default of the broker."""
    body: dict[str, Json] = {}
    if ms is not None:
        body["ms"] = {FOREVER: -1, DEFAULT: None}.get(ms, 0)
        if ms not in {FOREVER, DEFAULT}:
            body["ms"] = duration_ms(ms)
    if size is not None:
        body["bytes"] = None if size == DEFAULT else size_bytes(size)
    if acked is not None:
        body["acked"] = acked.value
    return body


def _checks_body(
    first_check: str | None, period: str | None, attempts: int | None
) -> dict[str, Json]:
    """Return the given settings of the checks of half messages as REST expects them."""
    body: dict[str, Json] = {
        "firstCheckMs": None if first_check is None else duration_ms(first_check),
        "periodMs": None if period is None else duration_ms(period),
        "attempts": attempts,
    }
    return {key: value for key, value in body.items() if value is not None}


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
    context: typer.Context,
    name: Name,
    is_dry: Annotated[
        bool, typer.Option("--dry-run", help="Show the effect and change nothing.")
    ] = False,
    is_sure: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
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
    is_dry: Annotated[
        bool, typer.Option("--dry-run", help="Show the effect and change nothing.")
    ] = False,
    is_sure: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
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
def spread_topic(
    context: typer.Context,
    name: Name,
    is_dry: Annotated[
        bool, typer.Option("--dry-run", help="Show the effect and change nothing.")
    ] = False,
) -> None:
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
