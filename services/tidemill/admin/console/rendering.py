"""Templates, and their filters: numbers, sizes, times and ages as text."""

from __future__ import annotations

import functools
import json
import time
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
SECOND_MS: Final = 1_000
MINUTE_MS: Final = 60 * SECOND_MS
HOUR_MS: Final = 60 * MINUTE_MS
DAY_MS: Final = 24 * HOUR_MS
UNKNOWN: Final = "unknown"
RATE_MIN: Final = 0.1  # per second: smaller rates are not shown as numbers


class _Templates(Environment):
    """Templates that read `each["keys"]` from a document, never from the methods of `dict`."""

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return an item; undefined without one."""
        try:
            return obj[argument]
        except (TypeError, LookupError):
            return self.undefined(obj=obj, name=argument)


@functools.cache
def templates() -> Environment:
    """Return the templates. A name that a template does not know raises an error."""
    environment = _Templates(
        loader=PackageLoader("tidemill.admin.console"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        number=number_text,
        rate=rate_text,
        size=bytes_text,
        time=time_text,
        age=age_text,
        until=until_text,
        duration=duration_text,
        json=json_text,
        segment=lambda name: quote(name, safe=""),
    )
    return environment


def render(name: str, values: dict[str, Any]) -> str:
    """Return the text of a whole template."""
    return _template(name).render(values)


def render_block(name: str, block: str, values: dict[str, Any]) -> str:
    """Return the text of one block of a template."""
    template = _template(name)
    return "".join(template.blocks[block](template.new_context(values)))


def _template(name: str) -> Template:
    return templates().get_template(f"{name}.html")


def number_text(value: float | None) -> str:
    """Return a number with separators of thousands; `unknown` for None."""
    return UNKNOWN if value is None else f"{value:,}"


def rate_text(per_second: float | None) -> str:
    """Return a rate with one decimal below 100; `unknown` for None. Only 0 is shown as 0."""
    if per_second is None:
        return UNKNOWN
    if 0 < per_second < RATE_MIN:
        return f"< {RATE_MIN}"
    return f"{per_second:,.1f}" if 0 < per_second < 100 else f"{per_second:,.0f}"


def bytes_text(count: int | None) -> str:
    """Return a size with three digits: `512 B`, `1.2 KiB`; `unknown` for None."""
    if count is None:
        return UNKNOWN
    size, unit = float(count), 0
    while size >= 999.5 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {UNITS[unit]}" if not unit or size >= 99.5 else f"{size:.1f} {UNITS[unit]}"


def time_text(at_ms: int | None) -> str:
    """Return a time in UTC to the millisecond, as in logs; `unknown` for None."""
    if at_ms is None:
        return UNKNOWN
    at = datetime.fromtimestamp(at_ms / SECOND_MS, UTC)
    return f"{at:%Y-%m-%d %H:%M:%S}.{at_ms % SECOND_MS:03d}Z"


def duration_text(duration_ms: int | None) -> str:
    """Return a duration with at most two units: `2 d 3 h`, `12 s`, `0.4 s`."""
    if duration_ms is None:
        return UNKNOWN
    if duration_ms < 10 * SECOND_MS:
        return f"{duration_ms / SECOND_MS:.1f} s"
    days, rest = divmod(duration_ms, DAY_MS)
    hours, rest = divmod(rest, HOUR_MS)
    minutes, rest = divmod(rest, MINUTE_MS)
    seconds = rest // SECOND_MS
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s")]
    first = next(index for index, (count, _) in enumerate(parts) if count)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2] if count)


def age_text(at_ms: int | None, now_ms: int | None = None) -> str:
    """Return how long ago a time was; for a time to come, when it will be."""
    if at_ms is None:
        return UNKNOWN
    past_ms = (_now_ms() if now_ms is None else now_ms) - at_ms
    return f"{duration_text(past_ms)} ago" if past_ms >= 0 else f"in {duration_text(-past_ms)}"


def until_text(at_ms: int | None, now_ms: int | None = None) -> str:
    """Return the time to a moment: `in 2 h 3 min`, or `due` if it has passed."""
    if at_ms is None:
        return UNKNOWN
    left_ms = at_ms - (_now_ms() if now_ms is None else now_ms)
    return "due" if left_ms <= 0 else f"in {duration_text(left_ms)}"


def json_text(value: object) -> str:
    """Return a value as indented JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
