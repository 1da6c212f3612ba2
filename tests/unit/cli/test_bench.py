"""`tidemill bench`: its latencies, and the options that it refuses."""

from __future__ import annotations

import random

import pytest
from typer.testing import CliRunner

from tidemill.cli.app import app
from tidemill.cli.bench_run import BenchResult, Latencies


def test_quantiles_are_exact_within_two_per_cent() -> None:
    generator = random.Random(7)
    values = sorted(generator.lognormvariate(1, 1.5) for _ in range(5_000))
    found = Latencies()
    for value in values:
        found.add(value)
    for part in (0.5, 0.99):
        exact, shown = values[int(part * len(values)) - 1], found.quantile(part)
        assert shown is not None
        assert exact <= shown <= exact * 1.03
    assert (found.count, found.max_ms) == (5_000, values[-1])
    assert len(found.buckets) < 1_000, "memory does not grow with the number of messages"


def test_no_message_has_no_quantile() -> None:
    assert Latencies().quantile(0.5) is None


def test_a_quantile_is_at_most_the_maximum() -> None:
    found = Latencies()
    found.add(3.0)
    assert found.quantile(0.99) == found.max_ms == 3.0
    found.add(-2.0)
    assert found.quantile(0.5) == pytest.approx(0.001, rel=0.03)


def test_the_rate_counts_until_the_last_message_without_the_delay() -> None:
    result = BenchResult(begin_s=10.0)
    for _ in range(6):
        result.latencies.add(1.0)
    result.end_s = 12.0
    assert result.per_second(None) == 3.0
    assert result.per_second(1_000) == 6.0


@pytest.mark.parametrize(
    "arguments",
    [
        ("send", "--for", "0s"),
        ("send", "--for", "11m"),
        ("send", "--size", "7"),
        ("send", "--concurrency", "0"),
        ("receive", "--rate", "0"),
        ("delay", "--delay", "11m"),
    ],
)
def test_a_limit_is_refused_before_the_topic_is_created(arguments: tuple[str, ...]) -> None:
    # An accepted command would exit with 3: no admin API is there.
    command = ["--admin", "http://127.0.0.1:1", "bench", *arguments]
    assert CliRunner().invoke(app, command).exit_code == 2


def test_a_missing_api_ends_it_before_the_load() -> None:
    command = ["--admin", "http://127.0.0.1:1", "bench", "send"]
    assert CliRunner().invoke(app, command).exit_code == 3
