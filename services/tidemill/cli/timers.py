"""`tidemill timer ...`."""

from __future__ import annotations

from typing import Annotated

import typer

from tidemill.cli import timer_histogram
from tidemill.cli.completion_names import complete_topic
from tidemill.cli.pages import read_pages
from tidemill.cli.rest import (
    call,
    check_filled,
    check_is_sure,
    has_several,
    in_namespace,
    say,
    show,
    warn_unreachable,
    without_namespace,
)
from tidemill.cli.timer_changes import (
    CANCEL,
    FIRE,
    RESCHEDULE,
    TimerSelection,
    change_timers,
    ids_of,
)
from tidemill.common.clock import SystemClock
from tidemill.common.exit_codes import EXIT_REFUSED
from tidemill.common.prompts import confirm
from tidemill.common.rest_client import Json
from tidemill.common.times import DURATION, INSTANT, duration_ms, from_now, instant_ms, utc
from tidemill.message.resource_names import TIMER_DEAD_LETTER_TOPIC

app = typer.Typer(
    no_args_is_help=True,
    help="List, show, cancel, reschedule and fire delayed messages before they are due.",
)
app.command("histogram")(timer_histogram.show_histogram)

TimerId = Annotated[
    int,
    typer.Argument(
        min=0,
        metavar="TIMER",
        help="Number of the timer, as `message send` and `timer list` show it.",
        callback=without_namespace,
    ),
]


def _without_namespace(context: typer.Context, value: list[str] | None) -> list[str] | None:
    return without_namespace(context, value) if value else value


TimerIds = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TIMER",
        help="Number of the timer, or up to 1,000 ids such as broker-0:17.",
        callback=_without_namespace,
    ),
]
FilterTopic = Annotated[
    str | None,
    typer.Option(
        "--topic",
        help="All pending timers of this topic.",
        callback=in_namespace,
        autocompletion=complete_topic,
    ),
]
FilterKey = Annotated[
    str | None,
    typer.Option("--key", help="All pending timers with this message key.", callback=check_filled),
]
FilterTag = Annotated[
    str | None, typer.Option("--tag", help="Only messages with this tag.", callback=check_filled)
]
FilterFrom = Annotated[
    str | None,
    typer.Option(
        "--from", metavar=INSTANT, help="Only timers due at or after it.", callback=check_filled
    ),
]
FilterTo = Annotated[
    str | None,
    typer.Option("--to", metavar=INSTANT, help="Only timers due before it.", callback=check_filled),
]
MaxCount = Annotated[
    int | None,
    typer.Option(
        "--max",
        min=1,
        max=1_000_000,
        help="Change nothing if more timers match. Default: as many as the dry run finds.",
    ),
]
At = Annotated[str | None, typer.Option(metavar=INSTANT, help="Deliver at this time, not earlier.")]
Delay = Annotated[str | None, typer.Option(metavar=DURATION, help="Delay from now, such as 1h30m.")]
Later = Annotated[
    str | None, typer.Option(metavar=DURATION, help="Later than each timer is due now.")
]
Earlier = Annotated[
    str | None, typer.Option(metavar=DURATION, help="Earlier than each timer is due now.")
]
Spread = Annotated[
    str | None, typer.Option(metavar=DURATION, help="Spread the due times over this time.")
]
Expect = Annotated[
    str | None,
    typer.Option(
        metavar=INSTANT,
        help="Of a single timer: fail if it is due at another time, because somebody has moved it.",
    ),
]
Rate = Annotated[
    int | None, typer.Option(min=1, max=10_000, help="Most timers per second. Default: 2,500.")
]
Wait = Annotated[bool, typer.Option("--wait", help="Wait for the end of the operation.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the effect and change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

Broker = Annotated[
    str | None,
    typer.Option(help="Broker group of the timer. Each broker group numbers its own timers."),
]

COLUMNS = ("TIMER", "DUE", "IN", "TOPIC", "QUEUE", "MESSAGE ID", "TAG", "KEYS", "BROKER")


@app.command("list")
def list_timers(
    context: typer.Context,
    topic: Annotated[
        str | None,
        typer.Option(help="Only this topic.", callback=in_namespace, autocompletion=complete_topic),
    ] = None,
    due_from: Annotated[
        str | None, typer.Option(metavar=INSTANT, help="Earliest due time.")
    ] = None,
    due_to: Annotated[
        str | None, typer.Option(metavar=INSTANT, help="Due before this time.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="Only messages with this key.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of timers.")] = 100,
) -> None:
    """List pending timers, the earliest first.

    Examples:
    * `tidemill timer list --topic orders`
    * `tidemill timer list --due-to 2027-01-01T00:00:00Z --limit 1000 -o json`
    """
    query = {
        "topic": topic,
        "dueFrom": None if due_from is None else str(instant_ms(due_from)),
        "dueTo": None if due_to is None else str(instant_ms(due_to)),
        "key": key,
    }
    pages = read_pages(context, "timers", {k: v for k, v in query.items() if v is not None}, limit)
    timers, has_more, unreachable = pages
    now_ms = SystemClock().wall_ms()
    count = len(COLUMNS) if has_several(timers) else len(COLUMNS) - 1
    show(context, timers, COLUMNS[:count], [_row(timer, now_ms)[:count] for timer in timers])
    warn_unreachable({"unreachable": unreachable})
    if has_more:
        typer.echo(f"there are more than these {limit}; see --limit", err=True)


@app.command("show")
def show_timer(context: typer.Context, timer: TimerId, broker: Broker = None) -> None:
    """Show a delayed message, also one that was delivered or cancelled not long ago.

    Example: tidemill timer show 17
    """
    shown = call(context, "GET", f"/timers/{timer}", query=_at(broker))
    now_ms = SystemClock().wall_ms()
    rows = [
        ("state", _state(shown)),
        ("topic", shown.get("topic", "(deleted)")),
        ("queue", shown["queueId"]),
        ("due", f"{utc(shown['dueAtMs'])} ({from_now(shown['dueAtMs'], now_ms)})"),
        ("scheduled", utc(shown["scheduledAtMs"])),
        ("bytes", shown["size"]),
        ("message id", shown.get("messageId")),
        ("tag", shown.get("tag")),
        ("keys", " ".join(shown["keys"])),
        ("sent by", shown.get("bornHost")),
    ]
    show(context, shown, ("TIMER", str(timer)), rows)


def _state(shown: Json) -> str:
    if shown["state"] == "DROPPED":
        return f"DROPPED: its message is on {TIMER_DEAD_LETTER_TOPIC}, with the reason"
    if shown["state"] == "PENDING" and "topic" not in shown:
        return f"PENDING: its topic is deleted, so it goes to {TIMER_DEAD_LETTER_TOPIC}"
    return str(shown["state"])


@app.command("cancel")
def cancel_timer(
    context: typer.Context,
    timers: TimerIds = None,
    broker: Broker = None,
    topic: FilterTopic = None,
    key: FilterKey = None,
    tag: FilterTag = None,
    due_from: FilterFrom = None,
    due_to: FilterTo = None,
    max_count: MaxCount = None,
    rate: Rate = None,
    waits: Wait = False,
    is_dry: DryRun = False,
    is_sure: Yes = False,
) -> None:
    """Cancel delayed messages: they are never delivered.

    A repeated cancel changes nothing, says so and exits with 1, and so does a cancel after the
    delivery. With --topic or --key, an
    operation cancels all pending timers that match, in the background.

    Examples:
    * `tidemill timer cancel 17`
    * `tidemill timer cancel broker-0:17 broker-0:18 --yes`
    * `tidemill timer cancel --topic orders --from 2027-01-01 --to 2027-01-02 --dry-run`
    """
    wanted = _filter(topic, key, tag, due_from, due_to)
    timer, chosen = _selected(timers, broker, wanted, max_count, rate, waits)
    if timer is None:
        change_timers(context, CANCEL, chosen, {}, is_dry=is_dry, is_sure=is_sure)
        return
    path = f"/timers/{timer}:cancel"
    if not is_dry:
        check_is_sure("timer cancel", is_sure=is_sure)
    if is_dry or not is_sure:
        planned = call(context, "POST", path, query={"dryRun": "true", **_at(broker)})
        if is_dry:
            say(context, planned, f"timer {timer} would be cancelled: {_message_of(planned)}")
            return
        confirm(f"Cancel timer {timer}: {_message_of(planned)}? It is never delivered then.")
    cancelled = call(context, "POST", path, query=_at(broker))
    if cancelled.get("outcome") == "ALREADY_CANCELLED":
        say(context, cancelled, f"timer {timer} was cancelled before (ALREADY_CANCELLED)")
        raise typer.Exit(EXIT_REFUSED)
    say(context, cancelled, f"timer {timer} is cancelled")


def _single(timers: list[str] | None, chosen: TimerSelection) -> int | None:
    """Return the number of a single timer; None for ids with a broker group, and for a filter."""
    if not timers or len(timers) > 1 or not timers[0].isascii() or not timers[0].isdecimal():
        return None
    chosen._replace(ids=timers).check()
    return int(timers[0])


def _selected(
    timers: list[str] | None,
    broker: str | None,
    wanted: dict[str, Json],
    max_count: int | None,
    rate: int | None,
    waits: bool,  # as the command has it
) -> tuple[int | None, TimerSelection]:
    """Return the number of a single timer, or the timers of a bulk change."""
    chosen = TimerSelection([], wanted, max_count, rate, waits)
    timer = _single(timers, chosen)
    if timer is None:
        chosen = chosen._replace(ids=ids_of(timers or [], broker))
        chosen.check()
    return timer, chosen


def _filter(
    topic: str | None, key: str | None, tag: str | None, due_from: str | None, due_to: str | None
) -> dict[str, Json]:
    fields = {
        "topic": topic,
        "key": key,
        "tag": tag,
        "dueFromMs": None if due_from is None else instant_ms(due_from),
        "dueToMs": None if due_to is None else instant_ms(due_to),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _at(broker: str | None) -> dict[str, str]:
    return {"broker": broker} if broker else {}


def _message_of(timer: Json) -> str:
    """Return in one line which message waits for its time."""
    due = f"{utc(timer['dueAtMs'])} ({from_now(timer['dueAtMs'], SystemClock().wall_ms())})"
    topic = timer.get("topic", "(deleted)")
    return f"message {timer.get('messageId', '(not known)')} of topic {topic}, due {due}"


@app.command("reschedule")
def reschedule_timer(
    context: typer.Context,
    timers: TimerIds = None,
    at: At = None,
    delay: Delay = None,
    later: Later = None,
    earlier: Earlier = None,
    spread: Spread = None,
    expect: Expect = None,
    broker: Broker = None,
    topic: FilterTopic = None,
    key: FilterKey = None,
    tag: FilterTag = None,
    due_from: FilterFrom = None,
    due_to: FilterTo = None,
    max_count: MaxCount = None,
    rate: Rate = None,
    waits: Wait = False,
    is_dry: DryRun = False,
    is_sure: Yes = False,
) -> None:
    """Deliver delayed messages at another time, earlier or later.

    With --topic or --key, an operation moves all pending timers that match, in the background.

    Examples:
    * `tidemill timer reschedule 17 --delay 10m`
    * `tidemill timer reschedule 17 --at 2027-01-01T08:00:00Z --expect 2026-12-31T08:00:00Z`
    * `tidemill timer reschedule --topic orders --later 10m --spread 1m`
    """
    if sum(one is not None for one in (at, delay, later, earlier)) != 1:
        raise typer.BadParameter("give one of --at, --delay, --later and --earlier")
    wanted = _filter(topic, key, tag, due_from, due_to)
    timer, chosen = _selected(timers, broker, wanted, max_count, rate, waits)
    fields = {
        "dueAtMs": None if at is None else instant_ms(at),
        "delayMs": None if delay is None else duration_ms(delay),
    }
    if timer is not None and later is None and earlier is None and spread is None:
        fields["expectedDueAtMs"] = None if expect is None else instant_ms(expect)
        given = {name: value for name, value in fields.items() if value is not None}
        when = f"at {utc(given['dueAtMs'])}" if "dueAtMs" in given else f"{delay} from now"
        _reschedule_one(context, timer, given, when, broker, is_dry=is_dry, is_sure=is_sure)
        return
    if expect is not None:
        raise typer.BadParameter("--expect needs a single timer with --at or --delay")
    if later is not None or earlier is not None:
        fields["shiftMs"] = duration_ms(later) if later is not None else -duration_ms(earlier or "")
    fields["spreadMs"] = None if spread is None else duration_ms(spread)
    given = {name: value for name, value in fields.items() if value is not None}
    if timer is not None:
        chosen = chosen._replace(ids=ids_of(timers or [], broker))
    change_timers(context, RESCHEDULE, chosen, given, is_dry=is_dry, is_sure=is_sure)


def _reschedule_one(
    context: typer.Context,
    timer: int,
    given: dict[str, int],
    when: str,
    broker: str | None,
    *,
    is_dry: bool,
    is_sure: bool,
) -> None:
    path = f"/timers/{timer}:reschedule"
    if not is_dry:
        check_is_sure("timer reschedule", is_sure=is_sure)
    if is_dry or not is_sure:
        query = {"dryRun": "true", **_at(broker)}
        planned = call(context, "POST", path, body=given, query=query)
        if is_dry:
            say(context, planned, f"timer {timer} would be due {when}: {_message_of(planned)}")
            return
        confirm(f"Let timer {timer} be due {when}: {_message_of(planned)}?")
    moved = call(context, "POST", path, body=given, query=_at(broker))
    say(context, moved, f"timer {timer} is due at {utc(moved['dueAtMs'])}")


@app.command("fire")
def fire_timer(
    context: typer.Context,
    timers: TimerIds = None,
    broker: Broker = None,
    topic: FilterTopic = None,
    key: FilterKey = None,
    tag: FilterTag = None,
    due_from: FilterFrom = None,
    due_to: FilterTo = None,
    max_count: MaxCount = None,
    rate: Rate = None,
    waits: Wait = False,
    is_dry: DryRun = False,
    is_sure: Yes = False,
) -> None:
    """Deliver delayed messages now.

    With --topic or --key, an operation delivers all pending timers that match, in the background.

    Examples:
    * `tidemill timer fire 17 --dry-run`
    * `tidemill timer fire --key order-17 --rate 100`
    """
    wanted = _filter(topic, key, tag, due_from, due_to)
    timer, chosen = _selected(timers, broker, wanted, max_count, rate, waits)
    if timer is None:
        change_timers(context, FIRE, chosen, {}, is_dry=is_dry, is_sure=is_sure)
        return
    if not is_dry:
        check_is_sure("timer fire", is_sure=is_sure)
    if is_dry or not is_sure:
        query = {"dryRun": "true", **_at(broker)}
        planned = call(context, "POST", f"/timers/{timer}:fire", query=query)
        if is_dry:
            say(context, planned, f"timer {timer} would be fired: {_message_of(planned)}")
            return
        confirm(f"Deliver timer {timer} now: {_message_of(planned)}?")
    fired = call(context, "POST", f"/timers/{timer}:fire", query=_at(broker))
    say(context, fired, f"timer {timer} is fired")


def _row(timer: Json, now_ms: int) -> tuple[object, ...]:
    state = "" if timer["state"] == "PENDING" else f" ({timer['state'].lower()})"
    return (
        timer["timerId"],
        utc(timer["dueAtMs"]),
        from_now(timer["dueAtMs"], now_ms).removeprefix("in ") + state,
        timer.get("topic", "(deleted)"),
        timer["queueId"],
        timer.get("messageId"),
        timer.get("tag"),
        " ".join(timer["keys"]),
        timer["broker"],
    )
