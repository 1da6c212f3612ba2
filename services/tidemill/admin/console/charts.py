"""Charts as SVG: lines over time on a page, and small lines in the rows of a table (ADR 0090).

A page draws them on the server, so they need no script and are a part of the live block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from markupsafe import Markup

from tidemill.admin.console.rendering import time_text

WIDTH, HEIGHT = 640, 160  # of a chart, in units of its view box
LEFT, BOTTOM = 76, 22  # for the texts of the axes
SPARK_WIDTH, SPARK_HEIGHT = 90, 20
POINTS_MAX: Final = 240  # of a line: more points would be closer than two units

Values = Sequence[float | None]  # None: unknown, and the line has a gap

_SVG: Final = Markup('<svg class="{}" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>')
_LINE: Final = Markup('<polyline class="line {}" points="{}"/>')
_TEXT: Final = Markup('<text x="{}" y="{}" class="{}">{}</text>')
_GRID: Final = Markup('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>')


class Line(NamedTuple):
    """One line of a chart."""

    label: str
    style: str  # class in console.css, which sets its colour and its dashes
    values: Values


def chart(
    title: str,
    lines: Sequence[Line],
    *,
    from_ms: int,
    step_ms: int,
    text_of: Callable[[float], str],
) -> Markup:
    """Return a chart of lines over the same time. `text_of` writes a value of the axis."""
    drawn = [line._replace(values=_thinned(line.values)) for line in lines]
    top = max((value for line in drawn for value in line.values if value is not None), default=0)
    top = top or 1.0
    parts = [_GRID.format(LEFT, WIDTH, y, y) for y in (1, (HEIGHT - BOTTOM) / 2, HEIGHT - BOTTOM)]
    for line in drawn:
        parts += [
            _LINE.format(line.style, points)
            for points in _points(
                line.values, top, left=LEFT, width=WIDTH - LEFT, height=HEIGHT - BOTTOM
            )
        ]
    count = max((len(line.values) for line in lines), default=1)
    end_ms = from_ms + max(count - 1, 0) * step_ms
    parts += [
        _TEXT.format(LEFT - 6, 14, "axis end", text_of(top)),
        _TEXT.format(LEFT - 6, HEIGHT - BOTTOM, "axis end", text_of(0)),
        _TEXT.format(LEFT, HEIGHT - 4, "axis", _clock(from_ms)),
        _TEXT.format(WIDTH, HEIGHT - 4, "axis end", _clock(end_ms)),
    ]
    last = ", ".join(f"{line.label} {_last(line.values, text_of)}" for line in lines)
    return _SVG.format("chart", WIDTH, HEIGHT, f"{title}: now {last}", Markup("").join(parts))


def sparkline(title: str, values: Values) -> Markup:
    """Return a small line without axes; nothing if fewer than two values are known."""
    thinned = _thinned(values)
    if sum(value is not None for value in thinned) < 2:
        return Markup("")
    top = max(value for value in thinned if value is not None) or 1.0
    lines = [
        _LINE.format("first", points)
        for points in _points(thinned, top, left=0, width=SPARK_WIDTH, height=SPARK_HEIGHT)
    ]
    return _SVG.format("spark", SPARK_WIDTH, SPARK_HEIGHT, title, Markup("").join(lines))


def _thinned(values: Values) -> list[float | None]:
    """Return at most POINTS_MAX values: of each part the largest, so that no peak is lost."""
    size = -(-len(values) // POINTS_MAX) or 1
    parts = [values[first : first + size] for first in range(0, len(values), size)]
    return [max((one for one in part if one is not None), default=None) for part in parts]


def _points(values: Values, top: float, *, left: float, width: float, height: float) -> list[str]:
    """Return the points of each part of a line without gaps."""
    step = width / max(len(values) - 1, 1)
    parts: list[list[str]] = [[]]
    for number, value in enumerate(values):
        if value is None:
            parts.append([])
            continue
        y = 1 + (height - 2) * (1 - value / top)
        parts[-1].append(f"{left + number * step:.1f},{y:.1f}")
    return [" ".join(part * 2 if len(part) == 1 else part) for part in parts if part]


def _last(values: Values, text_of: Callable[[float], str]) -> str:
    known = [value for value in values if value is not None]
    return text_of(known[-1]) if known else "unknown"


def _clock(at_ms: int) -> str:
    """Return the hour and minute of a time in UTC."""
    return time_text(at_ms)[11:16]
