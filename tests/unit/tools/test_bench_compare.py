"""The comparison of two commits (`tools/bench_compare.py`), without a benchmark."""

from __future__ import annotations

import math

import pytest

from tools.bench_compare import figures, interval, report, verdict


def test_figures_are_the_numbers_that_speak_of_cpu() -> None:
    result = {
        "bench": "x",
        "cpus": 2,
        "start_s": 0.5,
        "engine": {"cpu_us": 3, "per_second": 9},
        "call": {"us": 7},
        "idle_cpu_percent": 4,
        "load_cpu_us": 5,
        "unary": {"grpcio": {"us": 8}},
        "runs": [
            {"send": {"cpu_s_per_million": {"proxy": 10.0}}},
            {"send": {"cpu_s_per_million": {"proxy": 12.0}}},
            {"send": {"cpu_s_per_million": {"proxy": 90.0}}},
        ],
    }
    assert figures(result) == {
        "engine.cpu_us": 3,
        "call.us": 7,
        "runs.send.cpu_s_per_million.proxy": 12.0,
    }


@pytest.mark.parametrize(
    ("count", "cut"), [pytest.param(count, cut) for count, cut in ((5, 0), (7, 0), (8, 1), (11, 2))]
)
def test_the_interval_leaves_out_as_many_extremes_as_it_may(count: int, cut: int) -> None:
    ratios = [1 + n / 100 for n in range(count)]
    assert interval(ratios[::-1]) == (ratios[cut], ratios[-1 - cut])


def test_four_pairs_are_too_few() -> None:
    assert interval([1.0] * 4) == (0.0, math.inf)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(1.04, 1.1, "worse"), (0.9, 1.03, "not worse"), (1.0, 1.1, "not measurable")],
)
def test_a_figure_is_worse_if_its_whole_interval_is_above_the_limit(
    low: float, high: float, expected: str
) -> None:
    assert verdict(low, high, limit=1.03) == expected


def test_a_figure_of_only_one_tree_is_omitted(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = [({"a.cpu_us": 10.0, "old.cpu_us": 1.0}, {"a.cpu_us": 12.0, "new.cpu_us": 1.0})] * 5
    assert report("x", pairs, limit=1.03) == ["worse"]
    assert "1.200   1.200 -  1.200  worse           a.cpu_us" in capsys.readouterr().out
