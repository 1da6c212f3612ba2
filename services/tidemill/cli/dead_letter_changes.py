"""Replays and discards of dead letters for `tidemill dead-letter`: by ids, or by filter."""

from __future__ import annotations

import secrets
from typing import Final, NamedTuple

import typer

from tidemill.cli.operations import await_end, result_of
from tidemill.cli.rest import (
    call,
    check_is_sure,
    is_text,
    say,
    segment,
    show_table,
    warn_partial,
    warn_unreachable,
)
from tidemill.common.exit_codes import EXIT_REFUSED
from tidemill.common.prompts import confirm, warn
from tidemill.common.rest_client import Json
from tidemill.common.times import utc

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
OUTCOME_WORDS: Final = {
    "REPLAYED": "replayed",
    "ALREADY_REPLAYED": "not replayed: it was replayed before",
    "DISCARDED": "not replayed: it was discarded",
    "TOPIC_DELETED": "not replayed: its topic was deleted; see dead-letter copy --to-topic",
    "DAMAGED": "not replayed: its body is lost; see dead-letter copy with another body",
    "EXPIRED": "not found: retention has removed it",
    "NOT_FOUND": "not found",
}


class BulkChange(NamedTuple):
    """A change of all dead letters that match a filter."""

    wanted: dict[str, Json]  # the filter; empty: all, or the command names ids
    is_all: bool
    rate: int | None
    waits: bool


def settle(
    context: typer.Context,
    group: str,
    letters: list[str],
    verb: str,
    bulk: BulkChange,
    *,
    is_dry: bool,
    is_sure: bool,
) -> None:
    """Settle dead letters by ids, or all that match a filter."""
    is_bulk = bulk.is_all or bool(bulk.wanted)
    if is_bulk == bool(letters):
        raise typer.BadParameter("give either ids, or --all or a filter")
    if not is_bulk and (bulk.waits or bulk.rate is not None):
        raise typer.BadParameter("--rate and --wait need --all or a filter")
    if is_bulk:
        _settle_matching(context, group, verb, bulk, is_dry=is_dry, is_sure=is_sure)
    else:
        _settle_ids(context, group, letters, verb, is_dry=is_dry, is_sure=is_sure)


def _settle_matching(
    context: typer.Context, group: str, verb: str, bulk: BulkChange, *, is_dry: bool, is_sure: bool
) -> None:
    """Begin an operation on the dead letters that match, after a count and a confirmation."""
    path = f"/groups/{segment(group)}/dead-letters:{verb}"
    if not is_dry:
        check_is_sure(f"dead-letter {verb}", is_sure=is_sure)
    planned = call(context, "POST", path, body={"filter": bulk.wanted}, query={"dryRun": "true"})
    warn_about(planned)
    count = _count(planned["count"])
    if is_dry:
        say(context, planned, f"{count} of group {group} would be {verb}ed")
        if is_text(context) and planned["sample"]:
            show_table(context, COLUMNS, [row_of(one) for one in planned["sample"]])
        return
    if not planned["count"]:
        say(context, planned, f"no open dead letter of group {group} matches")
        return
    if not is_sure:
        confirm(f"{verb.capitalize()} {count} of group {group}?")
    body: dict[str, Json] = {
        "filter": bulk.wanted,
        "asOfMs": planned["asOfMs"],
        "maxCount": planned["count"],
    }
    if bulk.rate is not None:
        body["ratePerSecond"] = bulk.rate
    headers = {"Idempotency-Key": secrets.token_hex(16)}
    done = call(context, "POST", path, body=body, headers=headers)
    for text in done.get("warnings", []):
        warn_partial(text)
    warn_unreachable(done)
    if "operation" not in done:
        say(context, done, f"no open dead letter of group {group} matches")
        return
    operation = done["operation"]
    if not bulk.waits:
        say(context, done, f"operation {operation['id']} has begun: {count} of group {group}")
        return
    ended = await_end(context, operation["id"])
    say(context, ended, result_of(ended))
    if ended["state"] != "DONE":
        raise typer.Exit(EXIT_REFUSED)


def _settle_ids(
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
        warn_about(planned)
        count = _count(planned["count"])
        if is_dry:
            _show(context, planned, f"{count} of group {group} would be {verb}ed", verb)
            return
        confirm(f"{verb.capitalize()} {count} of group {group}?")
    done = call(context, "POST", path, body=body)
    _show(context, done, f"{_count(done['count'])} of group {group}: {verb}ed", verb)
    warn_about(done)
    if not done["count"]:
        raise typer.Exit(EXIT_REFUSED)


def _show(context: typer.Context, done: Json, sentence: str, verb: str) -> None:
    """Print the result, and each outcome without an effect."""
    say(context, done, sentence)
    if not is_text(context):
        return
    effect = f"{verb.upper()}ED"
    for one in done["outcomes"]:
        outcome = one.get("outcome")
        if outcome != effect:
            words = "unknown" if outcome is None else OUTCOME_WORDS[outcome]
            words = words.replace("not replayed", f"not {verb}ed")
            typer.echo(f"  {one['id']}  {words}")


def warn_about(answer: Json) -> None:
    """Print the warnings of an answer."""
    for text in answer.get("warnings", ()):
        warn(text)
    if "stoppedBy" in answer:
        warn(f"the call ended early: {answer['stoppedBy']}")
    warn_unreachable(answer)


def _count(count: int) -> str:
    return f"{count} dead letter{'' if count == 1 else 's'}"


def row_of(one: Json) -> tuple[object, ...]:
    """Return the row of a dead letter."""
    dead_at_ms = one.get("deadAtMs")
    return (
        one["id"],
        words(one["state"]),
        None if dead_at_ms is None else utc(dead_at_ms),
        one["group"],
        f"{one['originTopic']} (deleted)" if one["topicDeleted"] else one["originTopic"],
        one.get("messageId"),
        " ".join(one.get("keys") or ()),
        words(one["reason"]),
        one["attempts"],
        one["replays"],
    )


def words(text: str) -> str:
    """Return the name of a state or reason in words."""
    return text.lower().replace("_", " ")
