"""Bulk changes for `tidemill timer`: by ids, or by filter as an operation."""

from __future__ import annotations

import secrets
from typing import Final, NamedTuple

import typer

from tidemill.cli.operations import await_end, result_of
from tidemill.cli.rest import call, check_is_sure, say, warn_partial, warn_unreachable
from tidemill.common.exit_codes import EXIT_REFUSED
from tidemill.common.prompts import confirm, warn
from tidemill.common.rest_client import Json
from tidemill.common.times import utc

IDS_MAX: Final = 1_000
HOURS_SHOWN: Final = 24  # of a dry run
OUTCOME_WORDS: Final = {
    "DONE": "done",
    "ALREADY_DELIVERED": "it was delivered before",
    "ALREADY_CANCELLED": "it was cancelled before",
    "QUARANTINED": "its message is damaged; it can only be cancelled",
    "DROPPED": "its message is on %DLQ%TIMER",
    "NOT_FOUND": "not found",
    "TOO_LATE": "the new due time is beyond the maximum delay",
    "DAMAGED": "its entry is damaged; restart the broker",
}


class TimerVerb(NamedTuple):
    """A change, in the words of the path and of sentences."""

    path: str  # cancel, reschedule or fire
    done: str  # cancelled, moved or fired
    question: str  # Cancel, Move or Deliver


CANCEL: Final = TimerVerb("cancel", "cancelled", "Cancel")
RESCHEDULE: Final = TimerVerb("reschedule", "moved", "Move")
FIRE: Final = TimerVerb("fire", "fired", "Deliver now")


class TimerSelection(NamedTuple):
    """The timers of a command: by ids, or by filter."""

    ids: list[str]  # BROKER:NUMBER
    wanted: dict[str, Json]  # the filter
    max_count: int | None
    rate: int | None
    waits: bool

    def check(self) -> None:
        """Raise BadParameter unless the options fit together."""
        if bool(self.ids) == bool(self.wanted):
            raise typer.BadParameter("give either timers, or --topic or --key")
        if self.wanted and not {"topic", "key"} & self.wanted.keys():
            raise typer.BadParameter("--tag, --from and --to need --topic or --key")
        others = self.max_count is not None or self.rate is not None or self.waits
        if self.ids and others:
            raise typer.BadParameter("--max, --rate and --wait need --topic or --key")
        if len(self.ids) > IDS_MAX:
            raise typer.BadParameter(f"{len(self.ids)} timers; at most {IDS_MAX} are allowed")


def ids_of(timers: list[str], broker: str | None) -> list[str]:
    """Return the ids of timers, which are BROKER:NUMBER, or numbers beside --broker."""
    ids = []
    for text in timers:
        if ":" in text:
            ids.append(text)
        elif text.isascii() and text.isdecimal() and broker:
            ids.append(f"{broker}:{text}")
        else:
            raise typer.BadParameter(
                f"{text!r} is not a timer: give BROKER:NUMBER, or a number and --broker"
            )
    return ids


def change_timers(
    context: typer.Context,
    verb: TimerVerb,
    chosen: TimerSelection,
    move: dict[str, Json],
    *,
    is_dry: bool,
    is_sure: bool,
) -> None:
    """Change timers by ids, or all that match a filter."""
    if not is_dry:
        check_is_sure(f"timer {verb.path}", is_sure=is_sure)
    if chosen.ids:
        _change_ids(context, verb, {"ids": chosen.ids, **move}, is_dry=is_dry, is_sure=is_sure)
    else:
        _change_matching(context, verb, chosen, move, is_dry=is_dry, is_sure=is_sure)


def _change_ids(
    context: typer.Context, verb: TimerVerb, body: Json, *, is_dry: bool, is_sure: bool
) -> None:
    """Change timers after a confirmation. Exit with 1 if none is changed."""
    path = f"/timers:{verb.path}"
    if is_dry or not is_sure:
        planned = call(context, "POST", path, body=body, query={"dryRun": "true"})
        _warn_about(planned)
        if is_dry:
            say(context, planned, _with_outcomes(planned, f"would be {verb.done}"))
            return
        confirm(f"{verb.question}: {_count(planned['count'])}?")
    done = call(context, "POST", path, body=body)
    say(context, done, _with_outcomes(done, verb.done))
    _warn_about(done)
    if not done["count"]:
        raise typer.Exit(EXIT_REFUSED)


def _change_matching(
    context: typer.Context,
    verb: TimerVerb,
    chosen: TimerSelection,
    move: dict[str, Json],
    *,
    is_dry: bool,
    is_sure: bool,
) -> None:
    """Begin an operation on the timers that match, after a count and a confirmation."""
    path = f"/timers:{verb.path}"
    body: dict[str, Json] = {"filter": chosen.wanted, **move}
    if chosen.rate is not None:
        body["ratePerSecond"] = chosen.rate
    planned = call(context, "POST", path, body=body, query={"dryRun": "true"})
    _warn_about(planned)
    count = _count(planned["count"])
    if is_dry:
        say(context, planned, _with_hours(planned, f"{count} would be {verb.done}"))
        return
    if not planned["count"]:
        say(context, planned, "no pending timer matches")
        return
    if not is_sure:
        confirm(f"{verb.question}: {count}?")
    body["asOfMs"] = planned["asOfMs"]
    body["maxCount"] = planned["count"] if chosen.max_count is None else chosen.max_count
    headers = {"Idempotency-Key": secrets.token_hex(16)}
    done = call(context, "POST", path, body=body, headers=headers)
    for text in done.get("warnings", []):
        warn_partial(text)
    warn_unreachable(done)
    if "operation" not in done:
        say(context, done, "no pending timer matches")
        return
    operation = done["operation"]
    if not chosen.waits:
        say(context, done, f"operation {operation['id']} has begun: {_count(done['count'])}")
        return
    ended = await_end(context, operation["id"])
    say(context, ended, result_of(ended))
    if ended["state"] != "DONE":
        raise typer.Exit(EXIT_REFUSED)


def _warn_about(answer: Json) -> None:
    for text in answer.get("warnings", ()):
        warn(text)
    if "stoppedBy" in answer:
        warn(f"the call ended early: {answer['stoppedBy']}")
    warn_unreachable(answer)


def _with_outcomes(answer: Json, verb: str) -> str:
    """Return the result in a line, and each outcome without an effect in another one."""
    lines = [f"{_count(answer['count'])}: {verb}"]
    for one in answer["outcomes"]:
        outcome = one.get("outcome")
        if outcome != "DONE":
            words = "unknown" if outcome is None else OUTCOME_WORDS[outcome]
            lines.append(f"  {one['id']}  {words}")
    return "\n".join(lines)


def _with_hours(planned: Json, sentence: str) -> str:
    """Return a sentence with the timers of each topic and of the first hours."""
    lines = [sentence]
    lines += [f"  topic {one['name']}: {one['timers']}" for one in planned["topics"]]
    hours = planned["hours"]
    lines += [f"  due from {utc(one['fromMs'])}: {one['timers']}" for one in hours[:HOURS_SHOWN]]
    if len(hours) > HOURS_SHOWN:
        lines.append(f"  and {len(hours) - HOURS_SHOWN} other hours; see the JSON output")
    return "\n".join(lines)


def _count(count: int) -> str:
    return f"{count} timer{'' if count == 1 else 's'}"
