"""`tidemill top`: consumer groups by lag and topics by rate, on one screen."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import Annotated, Final

import typer

from tidemill.cli.numbers import UNKNOWN, dead_numbers, number
from tidemill.cli.output import UNFOLDED_WIDTH, OutputFormat
from tidemill.cli.rest import call, is_text, options_of, output_of
from tidemill.cli.watching import watch
from tidemill.common.clock import SystemClock
from tidemill.common.rest_client import Json
from tidemill.common.times import age, utc

PERIOD_S: Final = 1.0
ROWS_ONCE: Final = 20  # of each list, without a terminal
ROWS_MAX: Final = 200  # of each list, on a tall terminal
HEADER_LINES: Final = 5  # the first line, two heads, and two empty lines
NAME_WIDTH_MIN: Final = 12
CLEAR: Final = "\x1b[H\x1b[J"  # cursor to the first line, and clear from there
GROUP_COLUMNS: Final = (
    *("GROUP", "LAG", "READY", "IN FLIGHT", "OLDEST"),
    *("IN/S", "OUT/S", "CONSUMERS", "DEAD", "DEAD 1H"),
)
TOPIC_COLUMNS: Final = ("TOPIC", "IN/S", "OUT/S", "MESSAGES", "TIMERS")
GAP: Final = "  "


def show_top(
    context: typer.Context,
    is_once: Annotated[
        bool, typer.Option("--once", help="Print once and end, as without a terminal.")
    ] = False,
) -> None:
    """Show consumer groups by lag and topics by rate, each second, until Ctrl-C.

    The lists fill the screen. Long names are cut; `group list` and `topic list` show them whole.
    The numbers are up to 5 s old. An unknown number is shown as `?`. With `-o json`, each reading
    is one line.

    Examples:
    * `tidemill top`
    * `tidemill top --once -o json`
    """
    is_terminal = sys.stdout.isatty()
    is_live = is_terminal and not is_once
    is_json = not is_text(context)
    if options_of(context).output in {OutputFormat.CSV, OutputFormat.NAME}:
        raise typer.BadParameter("top has two lists; see `tidemill group list -o csv` for one")

    def look() -> bool:
        size = shutil.get_terminal_size()
        rows_max = min(size.lines, ROWS_MAX) if is_live else ROWS_ONCE
        groups, topics = (_largest(context, *each, rows_max) for each in _LISTS)
        if is_json:
            row: tuple[str, ...] = ()
            document = {"groups": groups, "topics": topics}
            output_of(context).stream(document, row, row, name="", is_first=False)
            return is_live
        if is_live:
            shown_groups, shown_topics = shares(
                len(groups), len(topics), size.lines - 1 - HEADER_LINES
            )
            groups, topics = groups[:shown_groups], topics[:shown_topics]
        width = size.columns if is_terminal else UNFOLDED_WIDTH
        lines = _lines(options_of(context).admin, groups, topics, width)
        typer.echo((CLEAR if is_live else "") + "\n".join(line[:width] for line in lines))
        return is_live

    watch(look, PERIOD_S)


_LISTS: Final = (("groups", "-lag"), ("topics", "-inPerSecond"))


def _largest(context: typer.Context, path: str, sort: str, count: int) -> list[Json]:
    query = {"sort": sort, "pageSize": str(count)}
    found: list[Json] = call(context, "GET", f"/{path}", query=query)[path]
    return found


def _lines(address: str, groups: list[Json], topics: list[Json], width: int) -> list[str]:
    now_ms = SystemClock().wall_ms()
    return [
        f"{address}{GAP}{utc(now_ms)}",
        "",
        *table(GROUP_COLUMNS, [_group_row(each, now_ms) for each in groups], width),
        "",
        *table(TOPIC_COLUMNS, [_topic_row(each) for each in topics], width),
    ]


def shares(groups: int, topics: int, lines: int) -> tuple[int, int]:
    """Return the number of shown groups and topics. A short list leaves its lines to the other."""
    free = max(lines, 2)
    shown_topics = min(topics, max(free // 2, free - groups))
    return min(groups, free - shown_topics), shown_topics


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return the lines of a table. The first column is cut if the terminal is narrow."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    others = sum(widths[1:]) + len(GAP) * (len(widths) - 1)
    widths[0] = min(widths[0], max(width - others, NAME_WIDTH_MIN))
    lines = []
    for name, *numbers in (columns, *rows):
        shown = name if len(name) <= widths[0] else f"{name[: widths[0] - 1]}~"
        cells = [f"{shown:<{widths[0]}}"]
        cells += [f"{cell:>{size}}" for cell, size in zip(numbers, widths[1:], strict=True)]
        lines.append(GAP.join(cells).rstrip())
    return lines


def _group_row(group: Json, now_ms: int) -> tuple[str, ...]:
    return (
        group["name"],
        number(group.get("lag")),
        number(group.get("ready")),
        number(group.get("inFlight")),
        age(group.get("oldestUnackedAtMs"), now_ms) or ("-" if "lag" in group else UNKNOWN),
        number(group.get("inPerSecond")),
        number(group.get("outPerSecond")),
        number(group.get("consumers")),
        *dead_numbers(group),
    )


def _topic_row(topic: Json) -> tuple[str, ...]:
    fields = ("inPerSecond", "outPerSecond", "messages", "pendingTimers")
    return (topic["name"], *(number(topic.get(each)) for each in fields))
