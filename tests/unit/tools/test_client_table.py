"""The tables of docs/clients.md name tests that exist, and cells for each client."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.client_table import (
    CALLS,
    CLIENTS,
    DIFFERENCES,
    INSPECTED_VERSIONS,
    ROOT,
    SCENARIOS,
    Scenario,
    Support,
    versions,
)

COLLECTION_S = 240  # for a busy machine; it takes five seconds


def named_tests() -> set[str]:
    """Return the ids of all tests that the tables name, below tests/."""
    cells = [cell for scenario in SCENARIOS for cell in scenario.cells.values()]
    cells += [cell for _, cell in CALLS]
    return {cell.test for cell in cells} | {one.test for one in DIFFERENCES}


def test_every_named_test_is_collected() -> None:
    """A scenario works only with a test: pytest knows each one by this id."""
    files = sorted({test.partition("::")[0] for test in named_tests()})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    collected = subprocess.run(
        [*command, *(f"tests/{file}" for file in files)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=COLLECTION_S,
        check=False,
    )
    assert collected.returncode == 0, collected.stdout + collected.stderr
    missing = {f"tests/{test}" for test in named_tests()} - set(collected.stdout.splitlines())
    assert sorted(missing) == []


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_scenario_has_a_cell_for_each_client(scenario: Scenario) -> None:
    assert set(scenario.cells) == set(CLIENTS)
    for cell in scenario.cells.values():
        assert (cell.support is Support.WORKS) == (not cell.reason)


@pytest.mark.parametrize("client", INSPECTED_VERSIONS)
def test_the_inspected_version_is_in_use(client: str) -> None:
    """If not, look which of its missing calls the new version has, and test them."""
    assert versions()[client] == INSPECTED_VERSIONS[client]


def test_the_page_names_the_locked_versions() -> None:
    assert set(versions()) == set(CLIENTS)
    installed = Path(ROOT / "tests/e2e/node/package-lock.json").read_text("utf-8")
    assert f'"rocketmq-client-nodejs": "{versions()["Node.js"]}"' in installed
