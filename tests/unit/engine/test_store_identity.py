"""The identity of a store on disk."""

from __future__ import annotations

from tidemill.broker.engine.layout import store_identity

UUID = bytes(range(16))
GOLDEN = bytes.fromhex("544d5549cecee288000102030405060708090a0b0c0d0e0f")


def test_the_bytes_are_unchanged() -> None:
    assert store_identity.encode(UUID) == GOLDEN
    assert store_identity.find(GOLDEN) == UUID


def test_a_damaged_identity_is_unknown() -> None:
    assert store_identity.find(None) is None
    for at in range(len(GOLDEN)):
        damaged = bytearray(GOLDEN)
        damaged[at] ^= 1
        assert store_identity.find(bytes(damaged)) is None
    assert store_identity.find(GOLDEN[:-1]) is None
