"""The two ways to add a key to a table."""

from __future__ import annotations

from tidemill.broker.engine.dedup.key_table import KeyTable
from tidemill.broker.engine.layout.dedup import HASH_SIZE, NO_PIN, KeyRow
from tidemill.broker.engine.layout.numbers import LogOffset, TopicId


def hash_of(number: int) -> bytes:
    return number.to_bytes(HASH_SIZE, "big")


def row_of(number: int, *, taken_at_ms: int = 1_000) -> KeyRow:
    return KeyRow(hash_of(number), LogOffset(number * 100), taken_at_ms, number, NO_PIN)


def put_new(table: KeyTable, row: KeyRow) -> None:
    table.put_new(row.hash, row.log_offset, row.taken_at_ms, row.body_crc)


def test_a_new_key_is_put_as_any_other_key() -> None:
    table, expected = KeyTable(TopicId(1)), KeyTable(TopicId(1))
    for number in range(500):
        row = row_of(number, taken_at_ms=2_000 - number)
        assert table.find(row.hash) is None
        put_new(table, row)
        expected.put(row)
    assert list(table.walk()) == list(expected.walk())
    assert all(table.find(hash_of(number)) == expected.find(hash_of(number)) for number in range(9))
    assert table.oldest_ms == expected.oldest_ms == 1_501
    assert table.memory_bytes == expected.memory_bytes


def test_a_key_is_replaced_whatever_was_looked_up_before() -> None:
    table = KeyTable(TopicId(1))
    put_new(table, row_of(1))
    assert table.find(hash_of(1)) == row_of(1)
    put_new(table, row_of(1, taken_at_ms=1_001))
    assert table.find(hash_of(2)) is None
    put_new(table, row_of(1, taken_at_ms=1_002))
    missing = hash_of(3)
    assert table.find(missing) is None
    table.put(row_of(3))
    put_new(table, KeyRow(missing, LogOffset(7), 1_003, 3, NO_PIN))
    assert list(table.walk()) == [
        row_of(1, taken_at_ms=1_002),
        KeyRow(missing, LogOffset(7), 1_003, 3, NO_PIN),
    ]
