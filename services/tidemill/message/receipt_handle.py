"""The receipt handle: identifies one delivery for its client, and any proxy can check it.

    ┌───────────── prefix: 39 bytes as 52 characters ──────────────┐┌─ 3 characters ─┐
    │ version u8 │ broker u16 │ slot u32 │ delivery_id u64 │       ││ index │ check  │
    │ visible_at_ms i64 │ MAC, 16 bytes                            ││  0-31 │ 12 bit │
    └──────────────────────────────────────────────────────────────┘└────────────────┘

The text is URL-safe base64 without padding. Both parts are whole groups of characters, so each
value has exactly one text. `broker` is a check of the broker's name.

The messages of one delivery differ only in their index, so they share one keyed hash. The hash over
the struct, the consumer group and the topic name has 64 bytes. 16 bytes are the MAC. The other 48
are a 12-bit check for each of 32 indexes. A changed character is rejected. A changed index with a
guessed check passes once in 4096 tries. It then names another message of the same delivery to the
same consumer group. The state of the broker decides about every handle.
"""

from __future__ import annotations

import struct
from binascii import Error as Base64Error
from binascii import a2b_base64, b2a_base64
from functools import lru_cache
from hashlib import blake2b
from hmac import compare_digest
from typing import NamedTuple

from tidemill.common.errors import InvalidReceiptHandle

VERSION = 1
INDEX_COUNT_MAX = 32  # messages of one delivery, because the hash has bytes for 32 checks
SECRET_SIZE = 32  # bytes
MARK_CHARS = 4  # for version and broker, three bytes

_FIELDS = struct.Struct(">BHIQq")
_FIELDS_SIZE = 23  # bytes
assert _FIELDS.size == _FIELDS_SIZE, "receipt handles outlive the process that made them"
_MAC_SIZE = 16  # bytes
_PREFIX_CHARS = (_FIELDS_SIZE + _MAC_SIZE) * 4 // 3
HANDLE_CHARS = _PREFIX_CHARS + 3
_NAMES_SIZE = struct.Struct(">H")  # distinguishes ("ab", "c") from ("a", "bc")

_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
_INDEX_CHARS = [_ALPHABET[index : index + 1] for index in range(INDEX_COUNT_MAX)]
_INDEXES = {character.decode(): index for index, character in enumerate(_INDEX_CHARS)}
_TO_URL_SAFE = bytes.maketrans(b"+/", b"-_")
# Characters of the standard alphabet become illegal ones, which strict decoding rejects.
_FROM_URL_SAFE = bytes.maketrans(b"-_+/=", b"+/!!!")

# No name of a topic or consumer group is longer, with the prefixes of the broker.
NAME_CHARS_MAX = 255
_NOT_ISSUED = "the receipt handle was not issued to this consumer group for this topic"


class HandleFields(NamedTuple):
    """The fields of a receipt handle: one message of one delivery."""

    slot: int
    delivery_id: int
    visible_at_ms: int
    message_index: int


class SignedDelivery:
    """The part of the handles that all messages of one delivery share."""

    __slots__ = ("_checks", "_prefix")

    def __init__(self, prefix: bytes, checks: bytes) -> None:
        self._prefix = prefix
        self._checks = checks

    def handle(self, index: int) -> bytes:
        """Return the handle of message `index`, as ASCII bytes."""
        return self._prefix + _INDEX_CHARS[index] + self._checks[2 * index : 2 * index + 2]


class HandleSigner:
    """Creates and opens the receipt handles of one broker."""

    def __init__(self, secret: bytes, broker_name: str) -> None:
        assert len(secret) == SECRET_SIZE, "the handle secret is 32 bytes"
        self._keyed = blake2b(key=secret)
        name_hash = blake2b(broker_name.encode(), digest_size=2, person=b"broker").digest()
        self._broker = int.from_bytes(name_hash, "big")
        # The first characters of its handles: version and broker.
        self.mark = _encode(_FIELDS.pack(VERSION, self._broker, 0, 0, 0))[:MARK_CHARS].decode()

    def sign(
        self, group: str, topic: str, *, slot: int, delivery_id: int, visible_at_ms: int
    ) -> SignedDelivery:
        """Sign one delivery of `topic` to the consumer group `group`."""
        fields = _FIELDS.pack(VERSION, self._broker, slot, delivery_id, visible_at_ms)
        digest = self._digest(fields, group, topic)
        return SignedDelivery(_encode(fields + digest[:_MAC_SIZE]), _encode(digest[_MAC_SIZE:]))

    def open(self, text: str, group: str, topic: str) -> HandleFields:
        """Return the fields of `text`; raise InvalidReceiptHandle if any character is wrong."""
        return self.opener(group, topic).open(text)

    def opener(self, group: str, topic: str) -> HandleOpener:
        """Return an opener for the handles of one request, which are mostly of few deliveries."""
        return HandleOpener(self, group, topic)

    def open_delivery(self, prefix: bytes, group: str, topic: str) -> tuple[HandleFields, bytes]:
        """Return the fields of a handle's prefix, with index 0, and the checks of all indexes."""
        decoded = _decode(prefix)
        fields, mac = decoded[:_FIELDS_SIZE], decoded[_FIELDS_SIZE:]
        version, broker, slot, delivery_id, visible_at_ms = _FIELDS.unpack(fields)
        digest = self._digest(fields, group, topic)
        if not compare_digest(digest[:_MAC_SIZE], mac):
            raise InvalidReceiptHandle(_NOT_ISSUED)
        if version != VERSION or broker != self._broker:
            raise InvalidReceiptHandle("the receipt handle belongs to another broker")
        return HandleFields(slot, delivery_id, visible_at_ms, 0), _encode(digest[_MAC_SIZE:])

    def _digest(self, fields: bytes, group: str, topic: str) -> bytes:
        keyed = self._keyed.copy()
        keyed.update(fields + _names(group, topic))
        return keyed.digest()


class HandleOpener:
    """Opens the handles of one request; checks the shared part of a delivery only once."""

    def __init__(self, signer: HandleSigner, group: str, topic: str) -> None:
        self._signer = signer
        self._group = group
        self._topic = topic
        self._prefix = ""
        self._delivery: HandleFields
        self._checks = ""

    def open(self, text: str) -> HandleFields:
        """Return the fields of `text`; raise InvalidReceiptHandle if any character is wrong."""
        if len(text) != HANDLE_CHARS or not text.isascii():
            raise InvalidReceiptHandle(_NOT_ISSUED)
        if text[:_PREFIX_CHARS] != self._prefix:
            prefix = text[:_PREFIX_CHARS]
            self._delivery, checks = self._signer.open_delivery(
                prefix.encode(), self._group, self._topic
            )
            self._prefix, self._checks = prefix, checks.decode()
        index = _INDEXES.get(text[_PREFIX_CHARS], INDEX_COUNT_MAX)
        # An invalid index has no check, so the comparison fails.
        if not compare_digest(self._checks[2 * index : 2 * index + 2], text[_PREFIX_CHARS + 1 :]):
            raise InvalidReceiptHandle(_NOT_ISSUED)
        slot, delivery_id, visible_at_ms, _ = self._delivery
        return HandleFields(slot, delivery_id, visible_at_ms, index)


@lru_cache(maxsize=4096)
def _names(group: str, topic: str) -> bytes:
    if max(len(group), len(topic)) > NAME_CHARS_MAX:
        raise InvalidReceiptHandle(_NOT_ISSUED)
    group_name = group.encode()
    return _NAMES_SIZE.pack(len(group_name)) + group_name + topic.encode()


def _encode(data: bytes) -> bytes:
    return b2a_base64(data, newline=False).translate(_TO_URL_SAFE)


def _decode(text: bytes) -> bytes:
    try:
        return a2b_base64(text.translate(_FROM_URL_SAFE), strict_mode=True)
    except Base64Error:
        raise InvalidReceiptHandle("the receipt handle is not URL-safe base64") from None
