"""The transaction id: names a half message, and any proxy can check it (ADR 0085).

    ┌────────────┬────────────┬─────────────┬────────┐
    │ version u8 │ broker u16 │ half_id u64 │ MAC, 8 │   big-endian
    └────────────┴────────────┴─────────────┴────────┘

The text is URL-safe base64 without padding. `broker` is a check of the name of the broker group.
The MAC is a keyed hash over the fields before it, the topic and the message id. So an id of another
topic or message does not match. Receipt and recall handles share its key; a different
personalisation prevents the use of one as the other.
"""

from __future__ import annotations

import struct
from hashlib import blake2b, blake2s
from hmac import compare_digest
from typing import Final, final

from tidemill.common.errors import TransactionNotFound
from tidemill.message.url_text import decode, encode

VERSION: Final = 1
SECRET_SIZE: Final = 32  # bytes
ID_CHARS: Final = 26
MARK_CHARS: Final = 4  # for version and broker, three bytes
_FIELDS = struct.Struct(">BHQ")
_FIELDS_SIZE = 11
assert _FIELDS.size == _FIELDS_SIZE, "transaction ids outlive the process that made them"
_MAC_SIZE = 8  # bytes; a caller also needs a right on the topic
_TOPIC_SIZE = struct.Struct(">H")

_UNKNOWN = "the transaction is unknown: its id is not one of this cluster"


def half_id_of(text: str) -> int:
    """Return the half id in a transaction id, which is not verified. Raises TransactionNotFound."""
    return int(_FIELDS.unpack_from(_decode(text))[2])


@final
class TransactionSigner:
    """Creates and opens the transaction ids of one broker group."""

    def __init__(self, secret: bytes, broker_name: str) -> None:
        assert len(secret) == SECRET_SIZE, "the handle secret is 32 bytes"
        self._keyed = blake2s(key=secret, digest_size=_MAC_SIZE, person=b"half")
        name_hash = blake2b(broker_name.encode(), digest_size=2, person=b"broker").digest()
        self._broker = int.from_bytes(name_hash, "big")
        # The first characters of its ids: version and broker.
        self.mark = encode(_FIELDS.pack(VERSION, self._broker, 0))[:MARK_CHARS]

    def sign(self, half_id: int, topic: str, message_id: str) -> str:
        """Return the transaction id of a half message."""
        fields = _FIELDS.pack(VERSION, self._broker, half_id)
        return encode(fields + self._mac(fields, topic, message_id))

    def open(self, text: str, topic: str, message_id: str) -> int:
        """Return the half id of a transaction id; raise TransactionNotFound unless it is right."""
        decoded = _decode(text)
        fields, mac = decoded[:_FIELDS_SIZE], decoded[_FIELDS_SIZE:]
        if not compare_digest(self._mac(fields, topic, message_id), mac):
            raise TransactionNotFound(
                f"the transaction id was changed, or belongs to another message or another topic"
                f" than {topic}"
            )
        return int(_FIELDS.unpack(fields)[2])

    def _mac(self, fields: bytes, topic: str, message_id: str) -> bytes:
        keyed = self._keyed.copy()
        encoded = topic.encode()
        keyed.update(fields + _TOPIC_SIZE.pack(len(encoded)) + encoded + message_id.encode())
        return keyed.digest()


def _decode(text: str) -> bytes:
    try:
        decoded = decode(text, chars_max=ID_CHARS)
    except ValueError:
        raise TransactionNotFound(_UNKNOWN) from None
    if len(decoded) != _FIELDS_SIZE + _MAC_SIZE or decoded[0] != VERSION:
        raise TransactionNotFound(_UNKNOWN)
    return decoded
