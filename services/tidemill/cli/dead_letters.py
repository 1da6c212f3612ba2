"""`tidemill dead-letter ...`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tidemill.cli.completion_names import complete_group, complete_topic
from tidemill.cli.dead_letter_changes import (
    COLUMNS,
    OUTCOME_WORDS,
    BulkChange,
    row_of,
    settle,
    warn_about,
    words,
)
from tidemill.cli.messages import file_base64, named_values, printable
from tidemill.cli.pages import read_pages
from tidemill.cli.rest import (
    call,
    check_filled,
    check_is_sure,
    in_namespace,
    is_text,
    options_of,
    say,
    segment,
    show,
    show_table,
    warn_unreachable,
)
from tidemill.common.clock import SystemClock
from tidemill.common.exit_codes import EXIT_REFUSED
from tidemill.common.prompts import confirm, warn
from tidemill.common.rest_client import Json
from tidemill.common.times import INSTANT, from_now, instant_ms, utc
from tidemill.message.namespaces import namespace_of

app = typer.Typer(
    no_args_is_help=True,
    help="List, show, replay, discard and copy dead letters: messages that a consumer group has"
    " failed for the last time. A replay gives a message to its consumer group again, and to no"
    " other one.",
)


class LetterStateName(StrEnum):
    """The states of a dead letter."""

    OPEN = "open"
    REPLAYED = "replayed"
    DISCARDED = "discarded"


class LetterReasonName(StrEnum):
    """Why a message is a dead letter."""

    ATTEMPTS_EXHAUSTED = "attempts-exhausted"
    FORWARDED_BY_CLIENT = "forwarded-by-client"
    DAMAGED = "damaged"


Group = Annotated[
    str,
    typer.Argument(
        help="Name of the consumer group.", callback=in_namespace, autocompletion=complete_group
    ),
]
Id = Annotated[
    str, typer.Argument(metavar="ID", help="Id of the dead letter, as `dead-letter list` shows it.")
]
Ids = Annotated[
    list[str] | None,
    typer.Argument(metavar="ID", help="Ids of up to 1,000 dead letters, as the list shows them."),
]
All = Annotated[bool, typer.Option("--all", help="All open dead letters of the group.")]
FilterTopic = Annotated[
    str | None,
    typer.Option(
        "--topic",
        help="All open ones of this topic.",
        callback=in_namespace,
        autocompletion=complete_topic,
    ),
]
FilterReason = Annotated[
    LetterReasonName | None,
    typer.Option("--reason", case_sensitive=False, help="All open ones with this reason."),
]
FilterTag = Annotated[
    str | None, typer.Option("--tag", help="All open ones with this tag.", callback=check_filled)
]
FilterFrom = Annotated[
    str | None,
    typer.Option(
        "--from", metavar=INSTANT, help="All open ones from this time on.", callback=check_filled
    ),
]
FilterTo = Annotated[
    str | None,
    typer.Option(
        "--to", metavar=INSTANT, help="All open ones before this time.", callback=check_filled
    ),
]
Rate = Annotated[
    int | None,
    typer.Option(min=1, max=10_000, help="Dead letters per second, at most. Default: 2,000."),
]
Wait = Annotated[bool, typer.Option("--wait", help="Wait for the end. Exit with 1 if it fails.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the effect and change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@app.command("list")
def list_dead_letters(
    context: typer.Context,
    group: Annotated[
        str | None,
        typer.Option(
            help="Only this consumer group.", callback=in_namespace, autocompletion=complete_group
        ),
    ] = None,
    topic: Annotated[
        str | None,
        typer.Option(
            help="Only messages of this topic.",
            callback=in_namespace,
            autocompletion=complete_topic,
        ),
    ] = None,
    reason: Annotated[
        LetterReasonName | None, typer.Option(case_sensitive=False, help="Only with this reason.")
    ] = None,
    tag: Annotated[str | None, typer.Option(help="Only messages with this tag.")] = None,
    state: Annotated[
        LetterStateName | None,
        typer.Option(case_sensitive=False, help="Only in this state. Default: all."),
    ] = None,
    dead_from: Annotated[
        str | None, typer.Option("--from", metavar=INSTANT, help="Dead at or after this time.")
    ] = None,
    dead_to: Annotated[
        str | None, typer.Option("--to", metavar=INSTANT, help="Dead before this time.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of dead letters.")] = 100,
) -> None:
    """List dead letters, the newest first.

    Examples:
    * `tidemill dead-letter list --group billing --state open`
    * `tidemill dead-letter list --topic orders --reason attempts-exhausted --limit 1000 -o json`
    """
    query = {
        "group": group,
        "topic": topic,
        "reason": reason.name if reason else None,
        "tag": tag,
        "state": state.name if state else None,
        "fromMs": None if dead_from is None else str(instant_ms(dead_from)),
        "toMs": None if dead_to is None else str(instant_ms(dead_to)),
    }
    given = {name: value for name, value in query.items() if value is not None}
    found, has_more, unreachable = read_pages(
        context, "deadLetters", given, limit, path="dead-letters", named_by="group"
    )
    show(context, found, COLUMNS, [row_of(one) for one in found])
    warn_unreachable({"unreachable": unreachable})
    if has_more:
        typer.echo(f"there are more than these {limit}; see --limit", err=True)


@app.command("summary")
def summarize_dead_letters(context: typer.Context) -> None:
    """Count the dead letters of all consumer groups: by group, and open ones by topic and reason.

    Example: tidemill dead-letter summary
    """
    namespace = options_of(context).namespace
    found = call(context, "GET", "/dead-letters/summary")
    if namespace:  # Reasons are not counted by namespace.
        found["groups"] = [
            one for one in found["groups"] if namespace_of(one["group"]) == namespace
        ]
        found["topics"] = [
            one for one in found["topics"] if namespace_of(one["topic"]) == namespace
        ]
        found["reasons"] = []
    now_ms = SystemClock().wall_ms()
    columns = ("GROUP", "OPEN", "REPLAYED", "DISCARDED", "OLDEST OPEN", "DELETED FROM")
    rows = [
        (
            one["group"],
            one["open"],
            one["replayed"],
            one["discarded"],
            _instant(one.get("oldestOpenAtMs"), now_ms),
            _instant(one.get("deletedFromAtMs"), now_ms),
        )
        for one in found["groups"]
    ]
    show(context, found, columns, rows, items=found["groups"])
    if is_text(context) and found["groups"]:
        typer.echo()
        show_table(
            context, ("TOPIC", "OPEN"), [(one["topic"], one["open"]) for one in found["topics"]]
        )
        if found["reasons"]:
            reasons = [(words(one["reason"]), one["open"]) for one in found["reasons"]]
            typer.echo()
            show_table(context, ("REASON", "OPEN"), reasons)
    warn_unreachable(found)
    if found.get("partial"):
        warn("topics and reasons count only the newest 100,000 open ones of a broker group")


@app.command("show")
def show_dead_letter(context: typer.Context, group: Group, letter: Id) -> None:
    """Show a dead letter with its message.

    Example: tidemill dead-letter show billing broker-0:17
    """
    shown = call(context, "GET", _path(group, letter))
    now_ms = SystemClock().wall_ms()
    settled = _instant(shown.get("settledAtMs"), now_ms)
    by = shown.get("settledBy")
    rows = [
        ("state", words(shown["state"])),
        ("settled", f"{settled} by {by}" if settled and by else settled),
        ("reason", words(shown["reason"])),
        ("attempts", shown["attempts"]),
        ("replays", shown["replays"]),
        ("first failed", _instant(shown.get("firstFailedAtMs"), now_ms)),
        ("dead", _instant(shown.get("deadAtMs"), now_ms)),
        ("topic", f"{shown['originTopic']}{' (deleted)' if shown['topicDeleted'] else ''}"),
        ("message id", shown.get("messageId")),
        ("message group", printable(shown.get("messageGroup") or "") or None),
        ("tag", printable(shown.get("tag") or "") or None),
        ("keys", printable(" ".join(shown.get("keys") or ()))),
        *(
            (printable(f"property {name}"), printable(value))
            for name, value in (shown.get("properties") or {}).items()
        ),
        ("sent by", shown.get("bornHost")),
        ("bytes", shown["bodySize"]),
        ("body", printable(shown.get("bodyText") or shown.get("bodyBase64") or "")),
    ]
    if shown.get("bodyHidden"):
        rows.append(("hidden", f"body, keys and properties need Sub on Group:{group}"))
    filled = [(name, value) for name, value in rows if value not in (None, "")]
    show(context, shown, ("DEAD LETTER", letter), filled)


@app.command("replay")
def replay_dead_letters(
    context: typer.Context,
    group: Group,
    letters: Ids = None,
    is_all: All = False,
    topic: FilterTopic = None,
    reason: FilterReason = None,
    tag: FilterTag = None,
    dead_from: FilterFrom = None,
    dead_to: FilterTo = None,
    rate: Rate = None,
    waits: Wait = False,
    is_dry: DryRun = False,
    is_sure: Yes = False,
) -> None:
    """Give dead letters to their consumer group again, and to no other one.

    A replayed message begins with attempt 1 and is as it was. A dead letter is replayed at most
    once, so a repeated command replays nothing again. With --all or a filter, an operation replays
    all open ones that match, in the background.

    Examples:
    * `tidemill dead-letter replay billing broker-0:17 broker-0:18 --dry-run`
    * `tidemill dead-letter replay billing broker-0:17 --yes`
    * `tidemill dead-letter replay billing --reason attempts-exhausted --rate 100 --wait`
    """
    wanted = _filter(topic, reason, tag, dead_from, dead_to)
    bulk = BulkChange(wanted, is_all, rate, waits)
    settle(context, group, letters or [], "replay", bulk, is_dry=is_dry, is_sure=is_sure)


@app.command("discard")
def discard_dead_letters(
    context: typer.Context,
    group: Group,
    letters: Ids = None,
    is_all: All = False,
    topic: FilterTopic = None,
    reason: FilterReason = None,
    tag: FilterTag = None,
    dead_from: FilterFrom = None,
    dead_to: FilterTo = None,
    rate: Rate = None,
    waits: Wait = False,
    is_dry: DryRun = False,
    is_sure: Yes = False,
) -> None:
    """Mark dead letters as done without a replay. They cannot be replayed afterwards.

    The messages stay readable until retention deletes them. With --all or a filter, an operation
    discards all open ones that match, in the background.

    Examples:
    * `tidemill dead-letter discard billing broker-0:17 --yes`
    * `tidemill dead-letter discard billing --to 2026-11-01T00:00:00Z --dry-run`
    """
    wanted = _filter(topic, reason, tag, dead_from, dead_to)
    bulk = BulkChange(wanted, is_all, rate, waits)
    settle(context, group, letters or [], "discard", bulk, is_dry=is_dry, is_sure=is_sure)


@app.command("copy")
def copy_dead_letter(
    context: typer.Context,
    group: Group,
    letter: Id,
    body: Annotated[
        str | None, typer.Option(help="Another body, as text. Default: that of the dead letter.")
    ] = None,
    body_file: Annotated[
        Path | None, typer.Option(help="Take the body from this file instead; - is standard input.")
    ] = None,
    tag: Annotated[str | None, typer.Option(help="Another tag.")] = None,
    keys: Annotated[
        list[str] | None, typer.Option("--key", help="Key in place of all keys; repeat for more.")
    ] = None,
    properties: Annotated[
        list[str] | None,
        typer.Option(
            "--property",
            metavar="NAME=VALUE",
            help="Property in place of all properties; repeat for more.",
        ),
    ] = None,
    to_topic: Annotated[
        str | None,
        typer.Option(
            help="Send the copy to this topic, for all of its consumer groups. Default: replay it"
            " to the consumer group alone.",
            callback=in_namespace,
            autocompletion=complete_topic,
        ),
    ] = None,
    is_discarded: Annotated[
        bool,
        typer.Option("--discard", help="With --to-topic: discard the dead letter after the send."),
    ] = False,
    is_dry: DryRun = False,
    is_sure: Yes = False,
) -> None:
    """Copy a dead letter with another body, tag, keys or properties.

    The copy is a new message. Its property TIDEMILL_COPY_OF is the id of the message.

    Examples:
    * `tidemill dead-letter copy billing broker-0:17 --body '{"amount": 12}'`
    * `tidemill dead-letter copy billing broker-0:17 --to-topic orders --discard --dry-run`
    """
    if body is not None and body_file is not None:
        raise typer.BadParameter("give either --body or --body-file")
    if is_discarded and to_topic is None:
        raise typer.BadParameter("--discard needs --to-topic; a replay settles the dead letter")
    fields = {
        "body": body,
        "bodyBase64": None if body_file is None else file_base64(body_file),
        "tag": tag,
        "keys": keys,
        "properties": None if properties is None else named_values(properties),
        "topic": to_topic,
    }
    sent: dict[str, Json] = {name: value for name, value in fields.items() if value is not None}
    sent["to"] = "group" if to_topic is None else "topic"
    if is_discarded:
        sent["discard"] = True
    _copy(context, group, letter, sent, is_dry=is_dry, is_sure=is_sure)


def _copy(
    context: typer.Context,
    group: str,
    letter: str,
    sent: dict[str, Json],
    *,
    is_dry: bool,
    is_sure: bool,
) -> None:
    """Store a copy after a confirmation. Exit with 1 if it is not stored."""
    path = f"{_path(group, letter)}:copy"
    if not is_dry:
        check_is_sure("dead-letter copy", is_sure=is_sure)
    if is_dry or not is_sure:
        planned = call(context, "POST", path, body=sent, query={"dryRun": "true"})
        receivers = ", ".join(planned["receivers"]) or "no consumer group at present"
        warn_about(planned)
        if is_dry:
            say(context, planned, f"a copy would be stored for {receivers}")
            return
        confirm(f"A copy of dead letter {letter} is for {receivers}. Store it?")
    done = call(context, "POST", path, body=sent)
    if "messageId" in done:
        outcome = done.get("outcome")
        end = "" if outcome is None else f"; the dead letter is {words(outcome)}"
        say(context, done, f"message {done['messageId']} is stored{end}")
        return
    say(context, done, f"dead letter {letter}: {OUTCOME_WORDS[done['outcome']]}")
    raise typer.Exit(EXIT_REFUSED)


def _filter(
    topic: str | None,
    reason: LetterReasonName | None,
    tag: str | None,
    dead_from: str | None,
    dead_to: str | None,
) -> dict[str, Json]:
    fields = {
        "topic": topic,
        "reason": reason.name if reason else None,
        "tag": tag,
        "fromMs": None if dead_from is None else instant_ms(dead_from),
        "toMs": None if dead_to is None else instant_ms(dead_to),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _path(group: str, letter: str) -> str:
    return f"/groups/{segment(group)}/dead-letters/{segment(letter)}"


def _instant(at_ms: int | None, now_ms: int) -> str | None:
    return None if at_ms is None else f"{utc(at_ms)} ({from_now(at_ms, now_ms)})"
