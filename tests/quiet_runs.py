"""A check of each test: its process prints no fatal error and no noise of gRPC's transport.

In a green run such a line looks like a fault. A test that causes one on purpose uses a process of
its own, and checks the output of that process.
"""

from __future__ import annotations

import re
from collections.abc import Generator

import pytest

# Python's dump at a fatal signal, and the log of gRPC's C core: severity, date, time, thread, file.
_NOISE = re.compile(
    r"^(Fatal Python error: .*|[A-Z]\d{4} [\d:.]+ +\d+ [\w./]+\.cc:\d+\] .*)$", re.MULTILINE
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail the end of a test whose captured standard error has noise, unless it is `hostile`."""
    report = yield
    is_hostile = item.get_closest_marker("hostile") is not None
    if report.when != "teardown" or not report.passed or is_hostile:
        return report
    if found := noise(report.capstderr):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} printed noise on standard error:\n{found}"
    return report


def noise(text: str) -> str:
    """Return the first line of noise; "" if there is none."""
    found = _NOISE.search(text)
    return found[0] if found else ""
