"""The heat map of due times."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest

from tidemill.admin.console.pages.timers import LAYOUTS, LEVELS, HeatRow, heat_map, short_number
from tidemill.admin.json.timers import HistogramStep
from tidemill.admin.messages.timer_histogram import SPANS

NOW_MS = 1_796_051_464_395  # Monday, 2026-11-30 15:11:04 UTC


def histogram(step: HistogramStep, counts: dict[int, int]) -> dict[str, Any]:
    span = SPANS[step]
    listed = [counts.get(place, 0) for place in range(span.buckets)]
    from_ms = NOW_MS - NOW_MS % span.step_ms
    return {"stepMs": span.step_ms, "fromMs": from_ms, "counts": listed}


def cells(rows: Iterable[HeatRow]) -> list[int | None]:
    return [None if cell is None else cell.timers for row in rows for cell in row.cells]


@pytest.mark.parametrize("step", HistogramStep)
def test_each_bucket_has_one_cell_in_order(step: HistogramStep) -> None:
    span = SPANS[step]
    found = histogram(step, {place: place + 1 for place in range(span.buckets)})
    rows = heat_map(found, step.value)
    shown = [timers for timers in cells(rows) if timers is not None]
    assert shown == found["counts"]
    width = LAYOUTS[step.value].row_ms // span.step_ms
    assert {len(row.cells) for row in rows} == {width}
    assert len(rows) in {math.ceil(span.buckets / width), math.ceil(span.buckets / width) + 1}


def test_hours_of_a_day_are_a_row_and_a_cell_leads_to_its_hour() -> None:
    rows = heat_map(histogram(HistogramStep.HOUR, {0: 5}), "1h")
    assert rows[0].title == "Mon 30 Nov"
    assert rows[0].cells[14] is None
    now = rows[0].cells[15]
    assert now is not None
    assert now.at_s == NOW_MS // 1000 // 3600 * 3600


def test_weeks_begin_on_monday() -> None:
    rows = heat_map(histogram(HistogramStep.DAY, {}), "1d")
    assert rows[0].title == "30 Nov 2026"
    assert rows[0].cells[0] is not None


def test_shades_grow_with_the_count() -> None:
    rows = heat_map(histogram(HistogramStep.HOUR, {0: 0, 1: 1, 2: 50, 3: 100_000}), "1h")
    found = [cell.level for cell in rows[0].cells if cell is not None]
    assert found[0] == 0
    assert 1 <= found[1] < found[2] < found[3] == LEVELS


def test_numbers_of_cells_are_short() -> None:
    counts = (0, 999, 1_000, 9_949, 9_950, 91_200, 1_234_567)
    assert [*map(short_number, counts)] == ["0", "999", "1.0k", "9.9k", "10k", "91k", "1.2M"]
