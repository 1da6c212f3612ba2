"""The record of the time of each test: CPU, its children included, and slow fixtures.

`--junitxml` writes the record as properties of each test, and `tools/slowest.py` reads it.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Generator
from typing import Any

import pytest

SLOW_FIXTURE_S = 0.2
BEGIN = pytest.StashKey[float]()


def cpu_s() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    usages = (
        resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[BEGIN] = cpu_s()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if call.when == "teardown":
        item.user_properties.append(("cpu_s", f"{cpu_s() - item.stash[BEGIN]:.3f}"))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    begin_s = time.monotonic()
    try:
        return (yield)
    finally:
        duration_s = time.monotonic() - begin_s
        if duration_s > SLOW_FIXTURE_S:
            name = f"fixture {fixturedef.baseid}::{fixturedef.argname}"
            request._pyfuncitem.user_properties.append((name, f"{duration_s:.3f}"))
