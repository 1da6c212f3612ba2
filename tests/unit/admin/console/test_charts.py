"""Charts: lines with gaps, peaks that stay, and texts of values."""

from __future__ import annotations

import re

from tidemill.admin.console.charts import POINTS_MAX, Line, chart, sparkline
from tidemill.admin.console.rendering import rate_text

AT_MS = 1_800_000_000_000


def points_of(svg: str) -> list[list[tuple[float, float]]]:
    """Return the points of each line."""
    return [
        [(float(x), float(y)) for x, y in (pair.split(",") for pair in text.split())]
        for text in re.findall(r'points="([^"]*)"', svg)
    ]


def drawn(*values: float | None) -> str:
    return str(
        chart(
            "Rates", [Line("in", "first", values)], from_ms=AT_MS, step_ms=5_000, text_of=rate_text
        )
    )


def test_the_largest_value_is_at_the_top_and_zero_at_the_bottom() -> None:
    [line] = points_of(drawn(0, 5, 10))
    heights = [y for _, y in line]
    assert heights == sorted(heights, reverse=True)
    assert heights[0] - heights[1] == heights[1] - heights[2]
    assert [x for x, _ in line] == sorted(x for x, _ in line)


def test_an_unknown_value_is_a_gap() -> None:
    svg = drawn(1, 2, None, 3, None)
    assert [len(line) for line in points_of(svg)] == [2, 2], "a single point is drawn, too"
    assert "now in 3" in svg


def test_a_chart_without_values_says_unknown() -> None:
    svg = drawn(None, None)
    assert points_of(svg) == []
    assert "in unknown" in svg


def test_a_peak_stays_in_a_long_line() -> None:
    values = [0.0] * 5_000
    values[1_234] = 7.0
    [line] = points_of(drawn(*values))
    assert len(line) <= POINTS_MAX
    assert min(y for _, y in line) == points_of(drawn(7.0))[0][0][1]


def test_texts_are_escaped() -> None:
    line = Line("<b>", "first", [1])
    svg = chart("<i>", [line], from_ms=0, step_ms=1, text_of=lambda _value: "<u>")
    assert not re.search("<[biu]>", svg)


def test_a_small_line_needs_two_values() -> None:
    assert sparkline("Backlog", [None, 5]) == ""
    assert len(points_of(sparkline("Backlog", [0, 0, 0]))) == 1
