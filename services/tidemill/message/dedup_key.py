"""Dedup keys: where a message has its key, and the broker group that owns a key (ADR 0087).

A key is the user property `dedup-key`, or the message id. The broker reads it from the stored
message, so every send is checked, whichever proxy it came through.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from tidemill.common.errors import IllegalPropertyKey
from tidemill.message import stored_message
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

DEDUP_PROPERTY: Final = "dedup-key"
KEY_BYTES_MAX: Final = 255
# An entry of `user_properties` with this key has these bytes.
_PROPERTY_FIELD: Final = b"\n\x09dedup-key\x12"


def check_key(key: bytes) -> bytes:
    """Return a dedup key of a user property. Raises IllegalPropertyKey.

    No user property has control characters: `rules.check_properties` rejects them.
    """
    if not 1 <= len(key) <= KEY_BYTES_MAX:
        raise IllegalPropertyKey(
            f"the property {DEDUP_PROPERTY} has 1 to {KEY_BYTES_MAX} bytes of UTF-8, not {len(key)}"
        )
    return key


def property_of(blob: bytes | memoryview) -> bytes | None:
    """Return the user property `dedup-key` of a stored message, unchecked; None if it has none.

    Raises ValueError if `blob` is not a stored message.
    """
    wire = bytes(stored_message.wires_of(blob)[1])
    if _PROPERTY_FIELD not in wire:
        return None
    # The bytes may also occur in another value, so the properties are parsed.
    value = v2.Message.FromString(wire).user_properties.get(DEDUP_PROPERTY)
    return None if value is None else value.encode()


def owner_of_key(key: bytes, groups: Sequence[str]) -> str:
    """Return the broker group that owns a key without a message group.

    Invariant: every process and every release returns the same for the same list. If a broker group
    leaves the list, only its keys get another owner.
    """
    return max(groups, key=lambda name: (_weight(key, name), name))


def _weight(key: bytes, name: str) -> bytes:
    return blake2b(key, digest_size=8, key=name.encode()[:64], person=b"key owner").digest()
