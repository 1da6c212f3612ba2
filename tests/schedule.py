"""The order of test files, longest first, and the record of the time of each test.

Parallel workers take whole files, so the run ends soonest if its longest files begin first. The
durations of earlier runs lie in the cache of tools; a file without one begins first. `--junitxml`
writes the CPU time and the slow fixtures of each test as its properties, for `tools/slowest.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tools.cached_build import cache_folder

SLOW_FIXTURE_S = 0.2
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
BEGIN = pytest.StashKey[float]()


def pytest_configure(config: pytest.Config) -> None:
    # Workers get the durations of their controller: another run may write new ones meanwhile, and
    # all workers must have one order.
    given = getattr(config, "workerinput", {}).get("durations")
    config.pluginmanager.register(FileOrder(config, read_durations() if given is None else given))


class FileOrder:
    """The durations of files in earlier runs and in this one; a run is known by its markers."""

    def __init__(self, config: pytest.Config, earlier: dict[str, float]) -> None:
        self._markers = config.option.markexpr
        self._earlier = earlier
        self._measured: defaultdict[str, float] = defaultdict(float)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["durations"] = self._earlier

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        if hasattr(config, "workerinput"):
            longest = float("inf")
            items.sort(key=lambda item: -self._earlier.get(self._file_of(item.nodeid), longest))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._measured[self._file_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        is_controller = session.config.pluginmanager.has_plugin("dsession")
        if is_controller and not session.config.option.keyword:
            write_durations({**read_durations(), **self._measured})

    def _file_of(self, nodeid: str) -> str:
        return f"{nodeid.partition('::')[0]} {self._markers}"


def durations_file() -> Path:
    return cache_folder() / "test-durations.json"


def read_durations() -> dict[str, float]:
    try:
        found: dict[str, float] = json.loads(durations_file().read_text())
    except (OSError, ValueError):
        return {}
    return found


def write_durations(durations: Mapping[str, float]) -> None:
    draft = durations_file().with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):  # The tests do not depend on the order.
        draft.parent.mkdir(parents=True, exist_ok=True)
        rounded = {name: round(duration_s, 2) for name, duration_s in durations.items()}
        draft.write_text(json.dumps(rounded, indent=0, sort_keys=True))
        draft.replace(durations_file())


def cpu_s() -> float:
    """Return the CPU time of this process and all below it, also of those that have ended."""
    total_s = sum(os.times()[:4])
    pids = children(os.getpid())
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total_s += sum(map(int, fields[11:15])) / TICKS_PER_S
        pids += children(pid)
    return total_s


def children(pid: int) -> list[int]:
    """Return the children of a process; none on a machine without /proc."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, thread.read_text().split())
    return found


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
