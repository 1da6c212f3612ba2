"""Timers: a heat map of due times, a search, and the changes of one timer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

from tidemill.admin.console.actions import PageAction, Rows
from tidemill.admin.console.forms import Field, FieldKind
from tidemill.admin.console.page import Page, PageCall, Values, url
from tidemill.admin.console.rendering import DAY_MS, HOUR_MS, SECOND_MS, bytes_text, time_text
from tidemill.admin.http.rest_calls import Document

ROWS: Final = 50  # per page
PERIOD_S: Final = 5.0  # Each rendering scans all timers once.
LEVELS: Final = 6  # shades of a cell
SECONDS_DIGITS: Final = 11  # of a time since 1970


class Layout(NamedTuple):
    """The table of one step: a row per `row_ms`, a column per bucket of a row."""

    text: str  # the time that it covers
    row_ms: int
    row: str  # format of the time at the begin of a row
    column: str  # format of the time within a row


LAYOUTS: Final = {
    "1s": Layout("2 min", 10 * SECOND_MS, "%H:%M:%S", "+%S s"),
    "10m": Layout("24 h", HOUR_MS, "%a %H:%M", "+%M min"),
    "1h": Layout("30 days", DAY_MS, "%a %d %b", "%H"),
    "1d": Layout("400 days", 7 * DAY_MS, "%d %b %Y", "%a"),
}
MONDAY_MS: Final = 4 * DAY_MS  # 1970-01-05; rows of weeks begin with a Monday


class Cell(NamedTuple):
    """A bucket of the heat map."""

    text: str
    timers: int
    level: int  # 0: empty; LEVELS: as full as the fullest
    at_s: int  # the begin of the bucket, since 1970


class HeatRow(NamedTuple):
    """A row of the heat map."""

    title: str
    cells: list[Cell | None]  # None: before the first bucket, or behind the last one


async def load_timers(call: PageCall) -> Values:
    """Read the histogram, and a page of timers."""
    step = call.get("step") or "1h"
    step = step if step in LAYOUTS else "1h"
    topic, key = call.get("topic"), call.get("key")
    found: Document = await call.api.get("/timers/histogram", step=step, topic=topic)
    due_from, due_to = _range(call, found["stepMs"])
    listed = await call.api.get(
        "/timers",
        topic=topic,
        key=key,
        dueFrom=due_from,
        dueTo=due_to,
        pageSize=ROWS,
        pageToken=call.get("pageToken"),
    )
    kept = {"step": step, "topic": topic, "key": key}
    range_ = {"from": _local(due_from), "to": _local(due_to)}
    token = listed.get("nextPageToken")
    return {
        "step": step,
        "layouts": [
            (name, layout.text, url("/timers", **{**kept, "step": name}))
            for name, layout in LAYOUTS.items()
        ],
        "topic_query": f"&{urlencode({'topic': topic})}" if topic else "",
        "heat": heat_map(found, step),
        "columns": _columns(found, step),
        "histogram": found,
        "waiting": found["overdue"] + found["later"] + sum(found["counts"]),
        "timers": listed["timers"],
        "next": url("/timers", **kept, **range_, pageToken=token) if token else "",
        "all_found": _all_found(topic, key, range_),
        "count_found": _count_found(call, found, key),
        "unreachable": sorted({*found.get("unreachable", []), *listed.get("unreachable", [])}),
        "filter": {
            "topic": topic or "",
            "key": key or "",
            "from": range_["from"] or "",
            "to": range_["to"] or "",
        },
    }


def _all_found(topic: str | None, key: str | None, range_: dict[str, str | None]) -> str:
    """Return the query of a change of all timers that a search finds; "" without topic and key."""
    if not topic and not key:
        return ""
    fields = {
        "filter.topic": topic,
        "filter.key": key,
        "filter.dueFromMs": range_["from"],
        "filter.dueToMs": range_["to"],
    }
    return urlencode({name: text for name, text in fields.items() if text})


def _count_found(call: PageCall, found: Document, key: str | None) -> int | None:
    """Return the number of timers of the clicked cell; None of another search."""
    at_s = call.get("at") or ""
    if key or not at_s.isdecimal() or len(at_s) > SECONDS_DIGITS:
        return None
    place = (int(at_s) * SECOND_MS - found["fromMs"]) // found["stepMs"]
    counts: list[int] = found["counts"]
    return counts[place] if 0 <= place < len(counts) else None


def heat_map(found: Document, step: str) -> list[HeatRow]:
    """Return the rows of a histogram."""
    layout, step_ms, begin_ms = LAYOUTS[step], found["stepMs"], found["fromMs"]
    fullest = max(found["counts"])
    rows: dict[int, HeatRow] = {}
    for place, count in enumerate(found["counts"]):
        at_ms = begin_ms + place * step_ms
        row_ms = _row_of(at_ms, layout)
        if row_ms not in rows:
            empty: list[Cell | None] = [None] * (layout.row_ms // step_ms)
            rows[row_ms] = HeatRow(_moment(row_ms).strftime(layout.row), empty)
        rows[row_ms].cells[(at_ms - row_ms) // step_ms] = Cell(
            text=short_number(count),
            timers=count,
            level=_level(count, fullest),
            at_s=at_ms // SECOND_MS,
        )
    return [rows[row_ms] for row_ms in sorted(rows)]


def short_number(count: int) -> str:
    """Return a number with at most four characters: `999`, `1.2k`, `91k`, `1.2M`."""
    for size, letter in ((1_000_000, "M"), (1_000, "k")):
        if count >= size:
            value = count / size
            return f"{value:.1f}{letter}" if value < 9.95 else f"{value:.0f}{letter}"
    return str(count)


def _level(count: int, fullest: int) -> int:
    if not count:
        return 0
    share = math.log1p(count) / math.log1p(fullest)
    return max(1, math.ceil(share * LEVELS))


def _row_of(at_ms: int, layout: Layout) -> int:
    shift = MONDAY_MS if layout.row_ms > DAY_MS else 0
    return at_ms - (at_ms - shift) % layout.row_ms


def _columns(found: Document, step: str) -> list[str]:
    layout, step_ms = LAYOUTS[step], found["stepMs"]

    def titles() -> Iterator[str]:
        row_ms = _row_of(found["fromMs"], layout)
        for place in range(layout.row_ms // step_ms):
            # From the begin of a minute or hour, so that the text is the time within the row.
            within_ms = place * step_ms
            base_ms = row_ms if layout.row_ms >= DAY_MS else 0
            yield _moment(base_ms + within_ms).strftime(layout.column)

    return list(titles())


def _moment(at_ms: int) -> datetime:
    return datetime.fromtimestamp(at_ms / SECOND_MS, UTC)


def _local(at_ms: int | None) -> str | None:
    """Return a time for a field of a form, which has no time zone: UTC."""
    return None if at_ms is None else _moment(at_ms).strftime("%Y-%m-%dT%H:%M:%S")


def _range(call: PageCall, step_ms: int) -> tuple[int | None, int | None]:
    """Return the due times of a search: of the clicked cell `at`, else of the fields."""
    at_s = call.get("at") or ""
    if at_s.isdecimal() and len(at_s) <= SECONDS_DIGITS:
        return int(at_s) * SECOND_MS, int(at_s) * SECOND_MS + step_ms
    return call.instant_ms("from"), call.instant_ms("to")


async def load_timer(call: PageCall) -> Values:
    """Read one timer."""
    timer = await call.api.get(f"/timers/{call.path['timer_id']}", broker=call.path["broker"])
    return {"timer": timer, "is_pending": timer["state"] == "PENDING"}


def _timer_rows(timer: dict[str, Any]) -> Rows:
    return [
        ("Topic", timer.get("topic", "deleted")),
        ("Due", time_text(timer["dueAtMs"])),
        ("Keys", ", ".join(timer.get("keys", [])) or "none"),
        ("Size", bytes_text(timer["size"])),
        ("State", timer["state"]),
    ]


PAGES: Final = (
    Page("/timers", "timers", load_timers, period_s=PERIOD_S),
    Page("/timers/{broker}/{timer_id}", "timer", load_timer),
)
_PATH: Final = "/timers/{broker}/{timer_id}"
ACTIONS: Final = (
    PageAction(
        path=f"{_PATH}/cancel",
        method="POST",
        rest="/timers/{timer_id}:cancel",
        query=("broker",),
        title="Cancel timer {timer_id}",
        about="The message is not delivered. This cannot be undone.",
        back=_PATH,
        rows=_timer_rows,
        button=lambda _found, path: f"Cancel timer {path['timer_id']}",
        is_loss=True,
    ),
    PageAction(
        path=f"{_PATH}/reschedule",
        method="POST",
        rest="/timers/{timer_id}:reschedule",
        query=("broker",),
        title="Move timer {timer_id}",
        about="Fill in one of the fields.",
        back=_PATH,
        fields=(
            Field("dueAtMs", "New due time", FieldKind.TIME),
            Field("delayMs", "Or from now, in ms", FieldKind.NUMBER),
        ),
        rows=_timer_rows,
        button=lambda _found, path: f"Move timer {path['timer_id']}",
    ),
    PageAction(
        path=f"{_PATH}/fire",
        method="POST",
        rest="/timers/{timer_id}:fire",
        query=("broker",),
        title="Deliver timer {timer_id} now",
        about="The message becomes ready for its consumers at once.",
        back=_PATH,
        rows=_timer_rows,
        button=lambda _found, path: f"Deliver timer {path['timer_id']} now",
    ),
)
