"""gRPC messages in the content of a stream.

     0            1               5
    ┌────────────┬───────────────┬─────────┐
    │ compressed │ length    u32 │ message │   big-endian
    │ u8: 0 or 1 │               │         │
    └────────────┴───────────────┴─────────┘

HTTP/2 frames may split it anywhere.
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

# Small pieces are joined up to this size. A piece costs 33 bytes, and peers choose the size of
# frames.
_PART_BYTES: Final = 4_096
# A peer may send a thousandth of it, which no window limits. Processing takes as long as for an
# uncompressed message. Official clients do not compress.
INFLATED_BYTES_MAX: Final = 1 << 20
_GZIP_SIZE_MIN: Final = 18  # header and trailer; the last four bytes are the inflated size
_GZIP_WINDOW: Final = 31  # zlib: a gzip header is expected
_unpack_prefix: Final = PREFIX.unpack_from
_pack_prefix: Final = PREFIX.pack


def encode(message: bytes) -> bytes:
    """Return a message with its prefix."""
    return _pack_prefix(0, len(message)) + message


def encode_all(messages: Iterable[bytes]) -> bytes:
    """Return messages with their prefixes as one piece."""
    parts: list[bytes] = []
    for message in messages:
        parts += (_pack_prefix(0, len(message)), message)
    return b"".join(parts)


def whole_message(data: bytes) -> bytes | None:
    """Return the message if `data` is exactly one uncompressed message; otherwise None."""
    if len(data) >= PREFIX_SIZE:
        is_compressed, length = _unpack_prefix(data)
        if not is_compressed and length == len(data) - PREFIX_SIZE:
            return data[PREFIX_SIZE:]
    return None


class CompleteMessage(NamedTuple):
    """A received message."""

    message: bytes
    wire_bytes: int  # size as sent; smaller if it was compressed
    is_inflated: bool
    skipped_bytes: int = 0  # size of a message that is discarded as too large


@final
class MessageAssembler:
    """Assembles messages from pieces."""

    __slots__ = (
        "_admit",
        "_encoding",
        "_message_bytes_max",
        "_needed_bytes",
        "_parts",
        "_received_bytes",
        "_skipped_bytes_max",
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
        """Call `admit` before a message is inflated; it raises RpcError if there is no room.

        A message over the limit and up to `skipped_bytes_max` is discarded while it arrives.
        """
        self._skipped_bytes_max = skipped_bytes_max
        self.skip_left_bytes = 0  # of the discarded message, still to come
        self.dropped_bytes = 0  # discarded by the last `feed`
        self._encoding = encoding
        self._message_bytes_max = message_bytes_max
        self._admit = admit
        self.inflated_bytes = 0  # of all messages so far
        self._parts: list[bytes] = []
        self._received_bytes = 0
        self._needed_bytes = PREFIX_SIZE  # bytes from the start of a prefix to the next step

    @property
    def is_empty(self) -> bool:
        """Whether no part of a message is waiting."""
        return not (self._received_bytes or self.skip_left_bytes)

    @property
    def has_more(self) -> bool:
        """Whether data is waiting that `feed` may still process."""
        return self._received_bytes >= self._needed_bytes

    @property
    def held_bytes(self) -> int:
        """The received bytes that `feed` has not returned."""
        return self._received_bytes

    @property
    def bound_bytes(self) -> int:
        """The known size of the current message."""
        return max(self._received_bytes, self._needed_bytes) if self._received_bytes else 0

    @property
    def missing_bytes(self) -> int:
        """The number of bytes until the next step."""
        return self._needed_bytes - self._received_bytes

    def feed(self, data: bytes, messages_max: int = sys.maxsize) -> list[CompleteMessage]:
        """Add a piece of data, perhaps empty; return at most `messages_max` complete messages.

        If `has_more` is true afterwards, call again without data. Raises RpcError for a message
        that is too large or has an unknown compression.
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
        self._received_bytes += len(data)
        messages: list[CompleteMessage] = []
        while self._received_bytes >= self._needed_bytes and len(messages) < messages_max:
            if len(self._parts) > 1:
                self._parts = [b"".join(self._parts)]
            self._take(messages, messages_max)
        return messages

    def _take(self, messages: list[CompleteMessage], messages_max: int) -> None:
        """Take the complete messages, and set the size that the next one needs."""
        buffer, at = self._parts[0], 0
        self._needed_bytes = PREFIX_SIZE
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
                self._needed_bytes = PREFIX_SIZE + length
                break
            message = buffer[at + PREFIX_SIZE : end]
            whole = self._decompress(message) if is_compressed else message
            messages.append(CompleteMessage(whole, PREFIX_SIZE + length, bool(is_compressed)))
            at = end
        self._received_bytes = len(buffer) - at
        self._parts = [buffer[at:]] if self._received_bytes else []

    def _check(self, is_compressed: int, length: int) -> None:
        if length > self._message_bytes_max:
            raise RpcError(
                RpcCode.RESOURCE_EXHAUSTED,
                f"a message of {length} bytes is over the limit of {self._message_bytes_max} bytes",
            )
        if is_compressed > 1:
            raise RpcError(RpcCode.INTERNAL, "the first byte of a message must be 0 or 1")
        if is_compressed and self._encoding != "gzip":
            raise RpcError(RpcCode.INTERNAL, "a compressed message needs grpc-encoding: gzip")

    def _decompress(self, message: bytes) -> bytes:
        limit = min(self._message_bytes_max, INFLATED_BYTES_MAX)
        if len(message) < _GZIP_SIZE_MIN:
            raise RpcError(RpcCode.INTERNAL, "the message is not compressed with gzip")
        # The announced size comes first. A wrong size is detected below.
        announced_bytes = int.from_bytes(message[-4:], "little")
        if announced_bytes > limit:
            raise RpcError(
                RpcCode.RESOURCE_EXHAUSTED,
                f"an inflated message is over the limit of {limit} bytes",
            )
        self._admit(announced_bytes)
        self.inflated_bytes += announced_bytes
        unpacker = zlib.decompressobj(_GZIP_WINDOW)
        try:
            # One byte more than announced, to detect a larger message.
            whole = unpacker.decompress(message, announced_bytes + 1)
        except zlib.error:
            raise RpcError(RpcCode.INTERNAL, "the message is not compressed with gzip") from None
        if len(whole) != announced_bytes or not unpacker.eof:
            raise RpcError(
                RpcCode.INTERNAL, "the compressed message differs from its announced size"
            )
        return whole
