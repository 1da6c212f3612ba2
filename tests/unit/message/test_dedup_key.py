"""The dedup key in a stored message, and its owner."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.worlds.engine_world import blob
from tidemill.common.errors import IllegalPropertyKey
from tidemill.message.dedup_key import check_key, owner_of_key, property_of

GROUPS = ["broker-0", "broker-1", "broker-2"]


def test_the_property_is_read_from_a_stored_message() -> None:
    assert property_of(blob("b", properties={"a": "b", "dedup-key": "k"})) == b"k"
    assert property_of(blob("b", properties={"a": "b"})) is None
    assert property_of(blob("b")) is None


def test_its_bytes_in_another_value_are_not_the_property() -> None:
    assert property_of(blob("b", properties={"a": "\n\x09dedup-key\x12\x01k"})) is None


@pytest.mark.parametrize("size", [0, 256])
def test_a_key_has_bounds(size: int) -> None:
    with pytest.raises(IllegalPropertyKey):
        check_key(b"k" * size)


@pytest.mark.parametrize("size", [1, 255])
def test_a_key_within_the_bounds_is_accepted(size: int) -> None:
    assert check_key(b"k" * size) == b"k" * size


def test_the_owner_of_a_key_never_changes() -> None:
    """Every process and every release returns the same owner."""
    keys = [f"key-{n}".encode() for n in range(8)]
    owners = [owner_of_key(key, GROUPS)[-1] for key in keys]
    assert "".join(owners) == "12221202"


def test_keys_are_spread_over_the_broker_groups() -> None:
    owners = Counter(owner_of_key(f"key-{n}".encode(), GROUPS) for n in range(3_000))
    assert all(800 < count < 1_200 for count in owners.values())


def test_only_the_keys_of_a_removed_broker_group_move() -> None:
    for n in range(300):
        key = f"key-{n}".encode()
        owner = owner_of_key(key, GROUPS)
        rest = [name for name in GROUPS if name != "broker-1"]
        assert owner == "broker-1" or owner_of_key(key, rest) == owner
