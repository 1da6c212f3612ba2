"""A salvaged message can be parsed and contains only intact values."""

from __future__ import annotations

import pytest

from tidemill.message import stored_message
from tidemill.message.encoding import encode_stored
from tidemill.message.salvage import SalvagedProperties, encode, properties_of
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

NOW_MS = 1_700_000_000_123


def message(body: bytes = b"a body") -> v2.Message:
    return v2.Message(
        user_properties={"colour": "blue", "größe": ""},
        system_properties=v2.SystemProperties(
            message_id="01ABCDEF", tag="tag", keys=["k1", "k2"], body_encoding=v2.IDENTITY
        ),
        body=body,
    )


def stored(body: bytes = b"a body") -> bytes:
    return encode_stored(message(body), message_type=v2.NORMAL, now_ms=NOW_MS)


def parse(blob: bytes) -> v2.Message:
    """Parse a stored message as consumers receive it."""
    fields = stored_message.decode(blob)
    system = blob[fields.system_at : fields.user_at]
    parsed = v2.Message.FromString(blob[fields.user_at :])
    parsed.system_properties.MergeFromString(system)
    return parsed


def test_a_damaged_body_leaves_all_properties() -> None:
    blob = bytearray(stored())
    blob[-3] ^= 1
    assert encode(properties_of(bytes(blob))) == stored(b"")


def test_damaged_properties_leave_an_empty_message() -> None:
    blob = encode(properties_of(b""))
    assert properties_of(blob) == SalvagedProperties()
    assert stored_message.is_well_formed(blob)
    assert parse(blob).body == b""


@pytest.mark.parametrize("bit", range(8))
def test_a_flipped_bit_leaves_true_properties_that_can_be_parsed(bit: int) -> None:
    original, intact = stored(), message()
    for at in range(len(original)):
        damaged = bytearray(original)
        damaged[at] ^= 1 << bit
        blob = encode(properties_of(bytes(damaged)))
        found = parse(blob)
        system = found.system_properties
        assert found.body == b""
        assert system.message_id in ("", "01ABCDEF")
        assert system.tag in ("", "tag")
        assert set(system.keys) <= set(intact.system_properties.keys)
        assert system.body_digest.checksum == "D41D8CD98F00B204E9800998ECF8427E"
        fields = stored_message.decode(blob)
        assert fields.key_count == 1 + len(system.keys)
        assert stored_message.tag_of(blob) == system.tag
        assert stored_message.message_id_of(blob) == system.message_id
