"""The charts of a topic or consumer group: rates and backlog over an hour or a day."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from markupsafe import Markup

from tidemill.admin.console.charts import Line, chart, sparkline
from tidemill.admin.console.page import PageCall, Values, url
from tidemill.admin.console.rendering import duration_text, number_text, rate_text
from tidemill.admin.http.rest_calls import Document

# None: the last hour, which has a number every 5 s.
RANGES: Final[Mapping[str, int | None]] = {"1h": None, "24h": 86_400_000}
DEFAULT: Final = "1h"
SPARK_MS: Final = 900_000
SPARKLINES_MAX: Final = 20  # rows of a table; each is one more call of the REST API
TABLE_ROWS: Final = 60
TABLE: Final = "table"


async def history_values(call: PageCall, object_: str, page: str) -> Values:
    """Return the charts of an object, or its table, for the range in the URL of a page."""
    wanted = call.get("range") or DEFAULT
    chosen = wanted if wanted in RANGES else DEFAULT
    is_table = call.get("view") == TABLE
    found = await _find(call, object_, RANGES[chosen])
    ranges = [
        (each, url(page, range=each, view=TABLE if is_table else None), each == chosen)
        for each in RANGES
    ]
    return {
        "history_charts": [] if is_table or "series" not in found else _charts(found),
        "history_rows": _rows(found) if is_table and "series" in found else [],
        "history_unknown": found.get("unknown", ""),
        "history_ranges": ranges,
        "history_toggle": url(page, range=chosen, view=None if is_table else TABLE),
        "history_is_table": is_table,
    }


async def lag_sparklines(call: PageCall, groups: list[Document]) -> Mapping[str, Markup]:
    """Return the backlog of the first groups over 15 minutes, by name."""
    lines = {}
    for group in groups[:SPARKLINES_MAX]:
        found = await _find(call, f"group:{group['name']}", SPARK_MS)
        if "series" in found:
            title = f"Backlog of {group['name']} over 15 minutes"
            lines[group["name"]] = sparkline(title, found["series"]["lag"])
    return lines


async def _find(call: PageCall, object_: str, range_ms: int | None) -> Document:
    from_ms = None if range_ms is None else time.time_ns() // 1_000_000 - range_ms
    return await call.api.get("/history", object=object_, fromMs=from_ms)


def _charts(found: Document) -> list[Markup]:
    series, begin = found["series"], {"from_ms": found["fromMs"], "step_ms": found["stepMs"]}
    rates = [
        Line("in", "first", series["in"]),
        Line("out", "second", series["out"]),
        Line("acked", "third", series["ack"]),
    ]
    lag = [Line("waiting", "first", series["lag"])]
    oldest = [Line("oldest", "first", series["oldestMs"])]
    return [
        chart("Messages per second", rates, text_of=rate_text, **begin),
        chart("Waiting messages", lag, text_of=lambda value: number_text(round(value)), **begin),
        chart(
            "Age of the oldest", oldest, text_of=lambda value: duration_text(int(value)), **begin
        ),
    ]


def _rows(found: Document) -> list[tuple[int, Document]]:
    """Return times with their numbers, the newest first."""
    series = found["series"]
    count = len(series["in"])
    step = -(-count // TABLE_ROWS) or 1
    return [
        (
            found["fromMs"] + number * found["stepMs"],
            {name: values[number] for name, values in series.items()},
        )
        for number in range(count - 1, -1, -step)
    ]
