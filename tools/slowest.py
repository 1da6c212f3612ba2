"""Print where the time of a test run went, from the JUnit reports of `make test` and `make heavy`.

    slowest.py [--count 20] REPORT.xml ...

Prints the slowest tests, files and fixtures with their wall time and CPU time in seconds. The CPU
time includes child processes that have ended.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

FIXTURE = "fixture "


@dataclass(frozen=True, slots=True)
class Duration:
    """The wall and CPU time of a number of tests or fixtures."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    count: int = 0

    def __add__(self, other: Duration) -> Duration:
        return Duration(
            self.wall_s + other.wall_s, self.cpu_s + other.cpu_s, self.count + other.count
        )


class TestCase(NamedTuple):
    """One test of a report."""

    file: str
    name: str
    duration: Duration
    fixtures: dict[str, float]


def test_cases(report: Path) -> Iterator[TestCase]:
    """Yield the tests of a report."""
    # The report is our own.
    for case in ET.parse(report).iter("testcase"):  # noqa: S314
        properties = {one.get("name", ""): one.get("value", "") for one in case.iter("property")}
        duration = Duration(float(case.get("time", 0)), float(properties.get("cpu_s", 0)), 1)
        fixtures = {
            name.removeprefix(FIXTURE): float(value)
            for name, value in properties.items()
            if name.startswith(FIXTURE)
        }
        yield TestCase(case.get("classname", ""), case.get("name", ""), duration, fixtures)


def tables(cases: Iterable[TestCase]) -> dict[str, dict[str, Duration]]:
    """Return the durations of tests, files and fixtures by their names."""
    found: dict[str, dict[str, Duration]] = {
        name: defaultdict(Duration) for name in ("files", "tests", "fixtures")
    }
    for case in cases:
        found["files"][case.file] += case.duration
        found["tests"][f"{case.file}::{case.name}"] += case.duration
        for name, wall_s in case.fixtures.items():
            found["fixtures"][name] += Duration(wall_s, 0.0, 1)
    return found


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description="Print where the time of a test run went.")
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT.xml")
    parser.add_argument("--count", type=int, default=20, help="Rows per table. Default: 20.")
    given = parser.parse_args(arguments)
    cases = [case for report in given.reports for case in test_cases(report)]
    total = sum((case.duration for case in cases), Duration())
    print(f"{total.wall_s:8.1f} s wall {total.cpu_s:8.1f} s CPU {total.count:6} tests in all")
    for title, rows in tables(cases).items():
        print(f"\n    wall      CPU  count  {title}")
        slowest = sorted(rows.items(), key=lambda row: -row[1].wall_s)[: given.count]
        for name, duration in slowest:
            print(f"{duration.wall_s:8.1f} {duration.cpu_s:8.1f} {duration.count:6}  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
