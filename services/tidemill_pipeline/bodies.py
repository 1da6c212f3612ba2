"""Unpacking of bodies that were sent packed (encoding GZIP), within limits.

An unpacked body may be a thousand times as large: 4 MiB can be 4 GiB of zeros. One body therefore
has a limit, and so have all unpacked bodies of a batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Final

BODY_BYTES_MAX: Final = 256 << 20  # of one unpacked body
PART_BYTES: Final = 8 << 20  # of unpacked bodies per batch, unless one is larger
# Bytes of a packed body per step. zlib copies the bytes after each gzip member, and a member may
# have only 20 bytes.
_PIECE_BYTES: Final = 16 << 10
_GZIP_WINDOW: Final = 16 + zlib.MAX_WBITS  # zlib's name for gzip


def unpacked(body: bytes) -> bytes:
    """Return the unpacked body: all its gzip members in order.

    A body that is not valid gzip or that exceeds the limit is returned as stored.
    """
    parts: list[bytes] = []
    bytes_left = BODY_BYTES_MAX + 1
    member = zlib.decompressobj(_GZIP_WINDOW)
    try:
        for at in range(0, len(body), _PIECE_BYTES):
            piece = body[at : at + _PIECE_BYTES]
            while piece:
                if member.eof:
                    member = zlib.decompressobj(_GZIP_WINDOW)
                parts.append(member.decompress(piece, bytes_left))
                bytes_left -= len(parts[-1])
                if not bytes_left:
                    return body
                piece = member.unused_data
    except zlib.error:
        return body
    return b"".join(parts) if member.eof else body


def unpacked_parts(
    bodies: Sequence[bytes], are_packed: Sequence[bool]
) -> Iterator[tuple[slice, list[bytes]]]:
    """Yield bodies in order, unpacked if packed, in parts with their slice of the input.

    Without its last body, a part has less than PART_BYTES of unpacked bodies. The caller limits
    the bodies that are not packed.
    """
    part: list[bytes] = []
    begin, size = 0, 0
    for end, (body, is_packed) in enumerate(zip(bodies, are_packed, strict=True), 1):
        part.append(unpacked(body) if is_packed else body)
        size += len(part[-1]) if is_packed else 0
        if size >= PART_BYTES:
            yield slice(begin, end), part
            begin, size, part = end, 0, []
    if part:
        yield slice(begin, len(bodies)), part
