"""`tidemill group progress --watch`: rates of a consumer group, and when it has caught up."""

from __future__ import annotations

import json
import time
from typing import NamedTuple

import typer

from tidemill.cli.rest import OutputFormat, call, options_of, segment
from tidemill.cli.watching import watch
from tidemill.common.rest_client import Json
from tidemill.common.times import span

PERIOD_S = 2.0  # long enough for a meaningful rate, short enough to watch
_LINE = "{:<8}  {:>10}  {:>10}  {:>9}  {:>10}  {:>10}  {}"
HEAD = _LINE.format("TIME", "LAG", "READY", "IN FLIGHT", "IN/S", "OUT/S", "CAUGHT UP IN")


class GroupRates(NamedTuple):
    """Rates of a consumer group between two readings."""

    in_per_s: float
    out_per_s: float
    caught_up_in_ms: int | None  # None: at this pace never


def pace_of(before: Json, after: Json, elapsed_s: float) -> GroupRates | None:
    """Return the rates between two readings.

    Return None if the readings do not compare: a broker group was unreachable, or a topic was
    deleted.
    """
    if before.get("unreachable") or after.get("unreachable") or elapsed_s <= 0:
        return None
    arrived = after["total"]["stored"] - before["total"]["stored"]
    left = arrived - (after["total"]["lag"] - before["total"]["lag"])
    if arrived < 0 or left < 0:
        return None
    lag = after["total"]["lag"]
    if lag == 0:
        caught_up_in_ms: int | None = 0
    elif left > arrived:
        caught_up_in_ms = round(lag * elapsed_s * 1000 / (left - arrived))
    else:
        caught_up_in_ms = None
    return GroupRates(arrived / elapsed_s, left / elapsed_s, caught_up_in_ms)


def line_of(progress: Json, pace: GroupRates | None, clock: str) -> str:
    """Return one reading as a line below `HEAD`."""
    total = progress["total"]
    if pace is None:
        rates = ("", "", "")
    else:
        when = "never at this pace"
        if pace.caught_up_in_ms is not None:
            when = span(pace.caught_up_in_ms) if total["lag"] else "now"
        rates = (f"{pace.in_per_s:.1f}", f"{pace.out_per_s:.1f}", when)
    line = _LINE.format(clock, total["lag"], total["ready"], total["inFlight"], *rates).rstrip()
    if unreachable := progress.get("unreachable"):
        line += f"  (without {', '.join(unreachable)}: unreachable)"
    return line


def run(context: typer.Context, group: str) -> None:
    """Print a line per reading until Ctrl-C; the first line has no rates."""
    path = f"/groups/{segment(group)}/progress"
    is_json = options_of(context).output is OutputFormat.JSON
    last: tuple[Json, float] | None = None

    def look() -> bool:
        nonlocal last
        progress, at_s = call(context, "GET", path), time.monotonic()
        pace = pace_of(last[0], progress, at_s - last[1]) if last else None
        if is_json:
            rates = (
                {
                    "inPerS": round(pace.in_per_s, 1),
                    "outPerS": round(pace.out_per_s, 1),
                    "caughtUpInMs": pace.caught_up_in_ms,
                }
                if pace
                else {}
            )
            # One line per reading, so that a program can read them as they come.
            typer.echo(json.dumps(progress | rates, ensure_ascii=False))
        else:
            if last is None:
                typer.echo(HEAD)
            typer.echo(line_of(progress, pace, time.strftime("%H:%M:%S")))
        last = progress, at_s
        return True

    watch(look, PERIOD_S)
