"""The rows of the fault matrix have tests, and these are there by their names."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.chaos.faults import FAULTS
from tests.e2e.test_standalone_replicas import FAULTS as REPLICA_FAULTS
from tests.support.worlds.fault_rows import MISSING, ROWS, Row

ROOT = Path(__file__).parents[3]
WANTED = {*range(1, 30), *range(32, 46)}


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS.values(), ids=[str(number) for number in ROWS])
def test_the_tests_of_a_row_are_there(row: Row) -> None:
    assert row.tests or row.on_cluster
    for test in row.tests:
        name, _, of = test.partition("::")
        path = ROOT / name
        assert path.is_file(), test
        function, _, parameter = of.partition("[")
        if function:
            assert function in names_in(path), test
        if parameter:
            assert parameter.removesuffix("]") in REPLICA_FAULTS, test
    known = {fault.name for fault in FAULTS}
    assert set(row.on_cluster) <= known


def test_every_row_has_a_fault_or_a_reason() -> None:
    assert set(ROWS) == WANTED
    assert set(MISSING) <= WANTED | {30, 31}
