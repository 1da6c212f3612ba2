"""The index of dedup keys against a dictionary."""

from __future__ import annotations

import sys
from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from tidemill.broker.engine.dedup.row_blocks import RowBlock
from tidemill.broker.engine.dedup.row_index import MARK_SIZE, PART_ROWS_MAX, RowIndex
from tidemill.broker.engine.layout.dedup import ROW_SIZE

COUNT = 3_000


def _random_mark(random: Random) -> bytes:
    return random.randbytes(MARK_SIZE)


def _near_mark(random: Random) -> bytes:
    # Marks that differ in their last bits only: no split sets them apart for long.
    return b"\x80\0\0" + random.randbytes(1)


@pytest.mark.parametrize("make_mark", [_random_mark, _near_mark])
def test_the_index_finds_what_was_put_in(make_mark: Callable[[Random], bytes]) -> None:
    random, index = Random(7), RowIndex()
    marks: dict[int, bytes] = {}
    for number in range(COUNT):
        marks[number] = make_mark(random)
        index.insert(marks[number], number)
        if number % 3 == 0:
            gone = random.choice(list(marks))
            index.remove(marks.pop(gone), gone)
        if number % 5 == 0 and marks:
            moved = random.choice(list(marks))
            index.move(marks[moved], moved, COUNT + number)
            marks[COUNT + number] = marks.pop(moved)
    expected: dict[bytes, set[int]] = {}
    for number, mark in marks.items():
        expected.setdefault(mark, set()).add(number)
    for mark, numbers in expected.items():
        found = index.find(mark)
        assert (set(found), len(found)) == (numbers, len(numbers))
    assert not index.find(b"\x01\x02\x03\x04")


def test_a_built_index_finds_each_row_by_its_value() -> None:
    random = Random(3)
    values = [random.randbytes(16) for _ in range(COUNT)]
    rows = bytearray(b"".join([value + bytes(ROW_SIZE - len(value)) for value in values]))
    index = RowIndex()
    index.build(np.array([int.from_bytes(value[:MARK_SIZE], "big") for value in values], np.uint64))
    blocks = [RowBlock(rows)]
    assert [index.find_value(value, blocks) for value in values] == list(range(COUNT))
    # The same mark, and another value behind it.
    assert index.find_value(values[5][:MARK_SIZE] + bytes(12), blocks) == -1


def test_the_memory_of_an_index_is_not_counted_too_low() -> None:
    random, index = Random(5), RowIndex()
    for number in range(PART_ROWS_MAX * 40):
        index.insert(random.randbytes(MARK_SIZE), number)
        if number % 500 == 0:
            parts = {id(part): part for part in index._parts}.values()
            sizes = [
                sys.getsizeof(one) for part in parts for one in (part, part.marks, part.numbers)
            ]
            assert index.memory_bytes >= 0.98 * sum(sizes)
