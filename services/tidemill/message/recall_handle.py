"""The recall handle: identifies a delayed message for its producer, and any proxy can check it.

    ┌────────────┬────────────┬──────────────┬───────────────┬────────────────────────┬──────────┐
    │ version u8 │ broker u16 │ timer_id u64 │ due_at_ms i64 │ message id: u16, bytes │ MAC, 16  │
    └────────────┴────────────┴──────────────┴───────────────┴────────────────────────┴──────────┘

The text is URL-safe base64 without padding, with one valid text per value. `broker` is a check of
the broker's name. The MAC is a keyed hash over all bytes before it and the topic name; the size of
the message id separates the two. Recall and receipt handles share a key. A different
personalisation prevents the use of one as the other.

`due_at_ms` is the due time at the creation of the handle. The handle stays valid if the timer is
moved later. The state of the broker decides about every handle.
"""

from __future__ import annotations

import struct
from hashlib import blake2b, blake2s
from hmac import compare_digest
from typing import NamedTuple

from tidemill.common.errors import BadRequest
from tidemill.message.url_text import decode, encode

VERSION = 1
SECRET_SIZE = 32  # bytes
MARK_CHARS = 4  # for version and broker, three bytes
HANDLE_CHARS_MAX = 2048  # enough for the longest message id, of 1,024 bytes

_FIELDS = struct.Struct(">BHQqH")
_FIELDS_SIZE = 21  # bytes
assert _FIELDS.size == _FIELDS_SIZE, "recall handles outlive the process that made them"
_MAC_SIZE = 16  # bytes

_INVALID = "the recall handle was not issued by this cluster"


class RecallFields(NamedTuple):
    """The fields of a recall handle."""

    timer_id: int
    due_at_ms: int
    message_id: str


class RecallSigner:
    """Creates and opens the recall handles of one broker."""

    def __init__(self, secret: bytes, broker_name: str) -> None:
        assert len(secret) == SECRET_SIZE, "the handle secret is 32 bytes"
        # Copied for each handle, because the setup costs as much as the hash.
        self._keyed = blake2s(key=secret, digest_size=_MAC_SIZE, person=b"recall")
        name_hash = blake2b(broker_name.encode(), digest_size=2, person=b"broker").digest()
        self._broker = int.from_bytes(name_hash, "big")
        # The first characters of its handles: version and broker.
        self.mark = encode(_FIELDS.pack(VERSION, self._broker, 0, 0, 0))[:MARK_CHARS]

    def sign(self, topic: str, recall: RecallFields) -> str:
        """Return the handle of a delayed message of `topic`."""
        message_id = recall.message_id.encode()
        signed = (
            _FIELDS.pack(VERSION, self._broker, recall.timer_id, recall.due_at_ms, len(message_id))
            + message_id
        )
        return encode(signed + self._mac(signed, topic))

    def open(self, text: str, topic: str) -> RecallFields:
        """Return the fields of `text`; raise BadRequest unless every character is right."""
        try:
            decoded = decode(text, chars_max=HANDLE_CHARS_MAX)
        except ValueError:
            raise BadRequest(_INVALID) from None
        signed, mac = decoded[:-_MAC_SIZE], decoded[-_MAC_SIZE:]
        if len(signed) < _FIELDS_SIZE or signed[0] != VERSION:
            raise BadRequest(_INVALID)
        _, broker, timer_id, due_at_ms, id_size = _FIELDS.unpack_from(signed)
        if broker != self._broker:
            raise BadRequest("the recall handle belongs to another broker")
        if not compare_digest(self._mac(signed, topic), mac):
            raise BadRequest(
                f"the recall handle was changed or belongs to another topic than {topic}"
            )
        assert len(signed) == _FIELDS_SIZE + id_size, "a signed handle is well-formed"
        return RecallFields(timer_id, due_at_ms, signed[_FIELDS_SIZE:].decode())

    def _mac(self, signed: bytes, topic: str) -> bytes:
        keyed = self._keyed.copy()
        keyed.update(signed + topic.encode())
        return keyed.digest()
