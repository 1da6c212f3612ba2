"""Messages of gRPC in the content of a stream.

     0            1               5
    ┌────────────┬───────────────┬─────────┐
    │ compressed │ length    u32 │ message │   big-endian
    │ u8: 0 or 1 │               │         │
    └────────────┴───────────────┴─────────┘

Frames of HTTP/2 cut this anywhere.
"""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, final

from tidemill.transport.grpc.status import RpcCode, RpcError

PREFIX: Final = struct.Struct(">BI")
PREFIX_SIZE: Final = 5
assert PREFIX.size == PREFIX_SIZE, "the prefix is part of the protocol"

# Small pieces are joined up to this many bytes: a piece costs 33 bytes by itself, and frames may be
# as small as a peer likes.
_PART_BYTES: Final = 4_096
# What a peer sends for it is a thousandth, which no window bounds, and what becomes of it takes as
# long as if it had been sent. No official client compresses at all.
INFLATED_BYTES_MAX: Final = 1 << 20
_GZIP_SIZE_MIN: Final = 18  # header and trailer, whose last four bytes are the size inflated
_GZIP_WINDOW: Final = 31  # zlib's way to say: with gzip's header
_unpack_prefix: Final = PREFIX.unpack_from
_pack_prefix: Final = PREFIX.pack


def encode(message: bytes) -> bytes:
    """Return a message with its prefix."""
    return _pack_prefix(0, len(message)) + message


def encode_all(messages: Iterable[bytes]) -> bytes:
    """Return messages, each with its prefix, in one piece."""
    parts: list[bytes] = []
    for message in messages:
        parts += (_pack_prefix(0, len(message)), message)
    return b"".join(parts)


def whole_message(data: bytes) -> bytes | None:
    """Return the message that `data` is exactly, uncompressed; None where it is not so easy."""
    if len(data) >= PREFIX_SIZE:
        is_compressed, length = _unpack_prefix(data)
        if not is_compressed and length == len(data) - PREFIX_SIZE:
            return data[PREFIX_SIZE:]
    return None


class CompleteMessage(NamedTuple):
    """A message that has come."""

    message: bytes
    wire_bytes: int  # what it took to send it: less where it was compressed
    is_inflated: bool
    skipped_bytes: int = 0  # of one that is too large, and is thrown away as it comes


@final
class MessageAssembler:
    """Puts messages together out of the pieces in which they come."""

    __slots__ = (
        "_admit",
        "_encoding",
        "_have",
        "_message_bytes_max",
        "_parts",
        "_skipped_bytes_max",
        "_wanted",
        "dropped_bytes",
        "inflated_bytes",
        "skip_left_bytes",
    )

    def __init__(
        self,
        encoding: str,
        message_bytes_max: int,
        admit: Callable[[int], None] = lambda _size: None,
        *,
        skipped_bytes_max: int = 0,
    ) -> None:
        """Ask `admit` before a message is inflated; it raises RpcError where there is no room.

        Of a message that is too large up to `skipped_bytes_max` are thrown away as they come.
        """
        self._skipped_bytes_max = skipped_bytes_max
        self.skip_left_bytes = 0  # to come, of the message that is thrown away
        self.dropped_bytes = 0  # thrown away by the last `feed`
        self._encoding = encoding
        self._message_bytes_max = message_bytes_max
        self._admit = admit
        self.inflated_bytes = 0  # of all messages so far
        self._parts: list[bytes] = []
        self._have = 0
        self._wanted = PREFIX_SIZE  # bytes from the start of a prefix until something can be done

    @property
    def is_empty(self) -> bool:
        """Whether no part of a message waits for the rest."""
        return not (self._have or self.skip_left_bytes)

    @property
    def has_more(self) -> bool:
        """Whether there is something that `feed` was not asked to look at."""
        return self._have >= self._wanted

    @property
    def held_bytes(self) -> int:
        """How much has come, of messages that `feed` has not returned."""
        return self._have

    @property
    def bound_bytes(self) -> int:
        """How much the message that has begun is going to take, as far as that is known."""
        return max(self._have, self._wanted) if self._have else 0

    @property
    def missing_bytes(self) -> int:
        """How many bytes have to come for something to happen."""
        return self._wanted - self._have

    def feed(self, data: bytes, messages_max: int = sys.maxsize) -> list[CompleteMessage]:
        """Take the next piece, or none; return the messages that are complete, so many at most.

        Where `has_more` holds afterwards, go on with nothing. Raises RpcError for a message that is
        too large, or compressed in a way that is not known.
        """
        self.dropped_bytes = 0
        if self.skip_left_bytes:
            self.dropped_bytes = min(self.skip_left_bytes, len(data))
            self.skip_left_bytes -= self.dropped_bytes
            data = data[self.dropped_bytes :]
        if self._parts and len(self._parts[-1]) + len(data) <= _PART_BYTES:
            self._parts[-1] += data
        elif data:
            self._parts.append(data)
        self._have += len(data)
        messages: list[CompleteMessage] = []
        while self._have >= self._wanted and len(messages) < messages_max:
            if len(self._parts) > 1:
                self._parts = [b"".join(self._parts)]
            self._take(messages, messages_max)
        return messages

    def _take(self, messages: list[CompleteMessage], messages_max: int) -> None:
        """Take the complete messages off the one part, and see what the next one wants."""
        buffer, at = self._parts[0], 0
        self._wanted = PREFIX_SIZE
        while len(buffer) - at >= PREFIX_SIZE and len(messages) < messages_max:
            is_compressed, length = _unpack_prefix(buffer, at)
            if self._message_bytes_max < length <= self._skipped_bytes_max:
                begin = at + PREFIX_SIZE
                at = min(begin + length, len(buffer))
                self.dropped_bytes += at - begin
                self.skip_left_bytes = length - (at - begin)
                messages.append(
                    CompleteMessage(b"", PREFIX_SIZE, is_inflated=False, skipped_bytes=length)
                )
                continue
            self._check(is_compressed, length)
            end = at + PREFIX_SIZE + length
            if end > len(buffer):
                self._wanted = PREFIX_SIZE + length
                break
            message = buffer[at + PREFIX_SIZE : end]
            whole = self._decompress(message) if is_compressed else message
            messages.append(CompleteMessage(whole, PREFIX_SIZE + length, bool(is_compressed)))
            at = end
        self._have = len(buffer) - at
        self._parts = [buffer[at:]] if self._have else []

    def _check(self, is_compressed: int, length: int) -> None:
        if length > self._message_bytes_max:
            raise RpcError(
                RpcCode.RESOURCE_EXHAUSTED,
                f"a message of {length} bytes is over the limit of {self._message_bytes_max} bytes",
            )
        if is_compressed > 1:
            raise RpcError(RpcCode.INTERNAL, "a message's first byte is 0 or 1")
        if is_compressed and self._encoding != "gzip":
            raise RpcError(RpcCode.INTERNAL, "a compressed message needs grpc-encoding: gzip")

    def _decompress(self, message: bytes) -> bytes:
        limit = min(self._message_bytes_max, INFLATED_BYTES_MAX)
        if len(message) < _GZIP_SIZE_MIN:
            raise RpcError(RpcCode.INTERNAL, "the message is not compressed with gzip")
        # What it says of itself, before anything is done for it; who lies is found out below.
        told_bytes = int.from_bytes(message[-4:], "little")
        if told_bytes > limit:
            raise RpcError(
                RpcCode.RESOURCE_EXHAUSTED,
                f"a compressed message is over the limit of {limit} bytes when it is inflated",
            )
        self._admit(told_bytes)
        self.inflated_bytes += told_bytes
        unpacker = zlib.decompressobj(_GZIP_WINDOW)
        try:
            # One more than it says: to see that there is more.
            whole = unpacker.decompress(message, told_bytes + 1)
        except zlib.error:
            raise RpcError(RpcCode.INTERNAL, "the message is not compressed with gzip") from None
        if len(whole) != told_bytes or not unpacker.eof:
            raise RpcError(RpcCode.INTERNAL, "the compressed message is not what its end says")
        return whole
