"""The two ways to add a key to a table."""

from __future__ import annotations

from random import Random

import pytest

from tidemill.broker.engine.dedup.key_table import KEY_BYTES, KeyTable
from tidemill.broker.engine.layout.dedup import HASH_SIZE, NO_PIN, KeyRow, pin_of_timer
from tidemill.broker.engine.layout.numbers import LogOffset, TopicId
from tidemill.broker.settings import BrokerSettings

PINNED_KEY_BYTES = 68  # with the share of a pin in its index


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


@pytest.mark.parametrize(("is_pinned", "limit"), [(False, KEY_BYTES), (True, PINNED_KEY_BYTES)])
def test_a_key_takes_at_most_the_documented_memory(is_pinned: bool, limit: int) -> None:
    table, random = KeyTable(TopicId(1)), Random(1)
    most = 0.0
    for number in range(40_000):
        pin = pin_of_timer(number) if is_pinned else NO_PIN
        table.put(KeyRow(random.randbytes(HASH_SIZE), LogOffset(number), 1_000, 0, pin))
        if number >= 1_000:
            most = max(most, table.memory_bytes / (number + 1))
    assert limit - 6 < most <= limit
    assert f"at most {limit}" in str(BrokerSettings.model_fields["dedup_memory_bytes"].description)
