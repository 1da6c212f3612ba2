"""`tidemill dead-letter ...`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from tidemill.cli.messages import file_base64, named_values
from tidemill.cli.pages import read_pages
from tidemill.cli.rest import (
    OutputFormat,
    call,
    check_is_sure,
    in_namespace,
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


class State(StrEnum):
    """The states of a dead letter."""

    OPEN = "open"
    REPLAYED = "replayed"
    DISCARDED = "discarded"


class Reason(StrEnum):
    """Why a message is a dead letter."""

    ATTEMPTS_EXHAUSTED = "attempts-exhausted"
    FORWARDED_BY_CLIENT = "forwarded-by-client"
    DAMAGED = "damaged"


Group = Annotated[str, typer.Argument(help="Name of the consumer group.", callback=in_namespace)]
Id = Annotated[
    str, typer.Argument(metavar="ID", help="Id of the dead letter, as `dead-letter list` shows it.")
]
Ids = Annotated[
    list[str],
    typer.Argument(
        metavar="ID...", help="Ids of up to 1,000 dead letters, as the list shows them."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the effect and change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

COLUMNS: Final = (
    "ID",
    "STATE",
    "DEAD AT",
    "GROUP",
    "TOPIC",
    "MESSAGE ID",
    "KEYS",
    "REASON",
    "ATTEMPTS",
    "REPLAYS",
)
_WORDS: Final = {
    "REPLAYED": "replayed",
    "ALREADY_REPLAYED": "not replayed: it was replayed before",
    "DISCARDED": "not replayed: it was discarded",
    "TOPIC_DELETED": "not replayed: its topic was deleted; see dead-letter copy --to-topic",
    "DAMAGED": "not replayed: its body is lost; see dead-letter copy with another body",
    "EXPIRED": "not found: retention has removed it",
    "NOT_FOUND": "not found",
}


@app.command("list")
def list_dead_letters(
    context: typer.Context,
    group: Annotated[
        str | None, typer.Option(help="Only this consumer group.", callback=in_namespace)
    ] = None,
    topic: Annotated[
        str | None, typer.Option(help="Only messages of this topic.", callback=in_namespace)
    ] = None,
    reason: Annotated[
        Reason | None, typer.Option(case_sensitive=False, help="Only with this reason.")
    ] = None,
    tag: Annotated[str | None, typer.Option(help="Only messages with this tag.")] = None,
    state: Annotated[
        State | None, typer.Option(case_sensitive=False, help="Only in this state. Default: all.")
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
    show(context, found, COLUMNS, [_row(one) for one in found])
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
    show(context, found, columns, rows)
    if options_of(context).output is not OutputFormat.JSON and found["groups"]:
        typer.echo()
        show_table(("TOPIC", "OPEN"), [(one["topic"], one["open"]) for one in found["topics"]])
        if found["reasons"]:
            reasons = [(_words(one["reason"]), one["open"]) for one in found["reasons"]]
            typer.echo()
            show_table(("REASON", "OPEN"), reasons)
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
        ("state", _words(shown["state"])),
        ("settled", f"{settled} by {by}" if settled and by else settled),
        ("reason", _words(shown["reason"])),
        ("attempts", shown["attempts"]),
        ("replays", shown["replays"]),
        ("first failed", _instant(shown.get("firstFailedAtMs"), now_ms)),
        ("dead", _instant(shown.get("deadAtMs"), now_ms)),
        ("topic", f"{shown['originTopic']}{' (deleted)' if shown['topicDeleted'] else ''}"),
        ("message id", shown.get("messageId")),
        ("message group", shown.get("messageGroup")),
        ("tag", shown.get("tag")),
        ("keys", " ".join(shown.get("keys") or ())),
        *((f"property {name}", value) for name, value in (shown.get("properties") or {}).items()),
        ("sent by", shown.get("bornHost")),
        ("bytes", shown["bodySize"]),
        ("body", shown.get("bodyText") or shown.get("bodyBase64")),
    ]
    if shown.get("bodyHidden"):
        rows.append(("hidden", f"body, keys and properties need Sub on Group:{group}"))
    filled = [(name, value) for name, value in rows if value not in (None, "")]
    show(context, shown, ("DEAD LETTER", letter), filled)


@app.command("replay")
def replay_dead_letters(
    context: typer.Context, group: Group, letters: Ids, is_dry: DryRun = False, is_sure: Yes = False
) -> None:
    """Give dead letters to their consumer group again, and to no other one.

    A replayed message begins with attempt 1 and is as it was. A dead letter is replayed at most
    once, so a repeated command replays nothing again.

    Examples:
    * `tidemill dead-letter replay billing broker-0:17 broker-0:18 --dry-run`
    * `tidemill dead-letter replay billing broker-0:17 --yes`
    """
    _settle(context, group, letters, "replay", is_dry=is_dry, is_sure=is_sure)


@app.command("discard")
def discard_dead_letters(
    context: typer.Context, group: Group, letters: Ids, is_dry: DryRun = False, is_sure: Yes = False
) -> None:
    """Mark dead letters as done without a replay. They cannot be replayed afterwards.

    The messages stay readable until retention deletes them.

    Example: tidemill dead-letter discard billing broker-0:17 --yes
    """
    _settle(context, group, letters, "discard", is_dry=is_dry, is_sure=is_sure)


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
        _warn(planned)
        if is_dry:
            say(context, planned, f"a copy would be stored for {receivers}")
            return
        confirm(f"A copy of dead letter {letter} is for {receivers}. Store it?")
    done = call(context, "POST", path, body=sent)
    if "messageId" in done:
        outcome = done.get("outcome")
        end = "" if outcome is None else f"; the dead letter is {_words(outcome)}"
        say(context, done, f"message {done['messageId']} is stored{end}")
        return
    say(context, done, f"dead letter {letter}: {_WORDS[done['outcome']]}")
    raise typer.Exit(EXIT_REFUSED)


def _settle(
    context: typer.Context,
    group: str,
    letters: list[str],
    verb: str,
    *,
    is_dry: bool,
    is_sure: bool,
) -> None:
    """Settle dead letters after a confirmation. Exit with 1 if none is settled."""
    path = f"/groups/{segment(group)}/dead-letters:{verb}"
    body: Json = {"ids": letters}
    if not is_dry:
        check_is_sure(f"dead-letter {verb}", is_sure=is_sure)
    if is_dry or not is_sure:
        planned = call(context, "POST", path, body=body, query={"dryRun": "true"})
        _warn(planned)
        count = _count(planned["count"])
        if is_dry:
            _show(context, planned, f"{count} of group {group} would be {verb}ed", verb)
            return
        confirm(f"{verb.capitalize()} {count} of group {group}?")
    done = call(context, "POST", path, body=body)
    _show(context, done, f"{_count(done['count'])} of group {group}: {verb}ed", verb)
    _warn(done)
    if not done["count"]:
        raise typer.Exit(EXIT_REFUSED)


def _show(context: typer.Context, done: Json, sentence: str, verb: str) -> None:
    """Print the result, and each outcome without an effect."""
    say(context, done, sentence)
    if options_of(context).output is OutputFormat.JSON:
        return
    effect = f"{verb.upper()}ED"
    for one in done["outcomes"]:
        outcome = one.get("outcome")
        if outcome != effect:
            words = "unknown" if outcome is None else _WORDS[outcome]
            words = words.replace("not replayed", f"not {verb}ed")
            typer.echo(f"  {one['id']}  {words}")


def _warn(answer: Json) -> None:
    for text in answer.get("warnings", ()):
        warn(text)
    if "stoppedBy" in answer:
        warn(f"the call ended early: {answer['stoppedBy']}")
    warn_unreachable(answer)


def _count(count: int) -> str:
    return f"{count} dead letter{'' if count == 1 else 's'}"


def _path(group: str, letter: str) -> str:
    return f"/groups/{segment(group)}/dead-letters/{segment(letter)}"


def _row(one: Json) -> tuple[object, ...]:
    dead_at_ms = one.get("deadAtMs")
    return (
        one["id"],
        _words(one["state"]),
        None if dead_at_ms is None else utc(dead_at_ms),
        one["group"],
        f"{one['originTopic']} (deleted)" if one["topicDeleted"] else one["originTopic"],
        one.get("messageId"),
        " ".join(one.get("keys") or ()),
        _words(one["reason"]),
        one["attempts"],
        one["replays"],
    )


def _words(text: str) -> str:
    return text.lower().replace("_", " ")


def _instant(at_ms: int | None, now_ms: int) -> str | None:
    return None if at_ms is None else f"{utc(at_ms)} ({from_now(at_ms, now_ms)})"
