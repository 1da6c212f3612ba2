"""Bodies that were sent packed (encoding GZIP), as they were before, within bounds.

What is unpacked may be a thousand times as large as what is stored: 4 MiB of it are 4 GiB of zeros.
So a single body has a bound, and so has what the bodies of one batch come to.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Final

BODY_BYTES_MAX: Final = 256 << 20  # of a body that is unpacked
PART_BYTES: Final = 8 << 20  # of bodies that are unpacked for one batch, unless one is larger
# Of a packed body that is unpacked at once: what stands behind a member is copied for each, and a
# member may have 20 bytes.
_PIECE_BYTES: Final = 16 << 10
_GZIP_WINDOW: Final = 16 + zlib.MAX_WBITS  # zlib's name for gzip


def unpacked(body: bytes) -> bytes:
    """Return what a body of encoding GZIP was before: all members of it, one behind the other.

    One that is not gzip to its end, or has more than its bound, is returned as it is: its sender
    said what is not so, and the bytes are what there is.
    """
    parts: list[bytes] = []
    left = BODY_BYTES_MAX + 1
    member = zlib.decompressobj(_GZIP_WINDOW)
    try:
        for at in range(0, len(body), _PIECE_BYTES):
            piece = body[at : at + _PIECE_BYTES]
            while piece:
                if member.eof:
                    member = zlib.decompressobj(_GZIP_WINDOW)
                parts.append(member.decompress(piece, left))
                left -= len(parts[-1])
                if not left:
                    return body
                piece = member.unused_data
    except zlib.error:
        return body
    return b"".join(parts) if member.eof else body


def unpacked_parts(
    bodies: Sequence[bytes], are_packed: Sequence[bool]
) -> Iterator[tuple[slice, list[bytes]]]:
    """Yield bodies in order, unpacked where they are packed, in parts with their places.

    What is unpacked of a part is less than PART_BYTES without its last body; what was not packed
    has the bound of who gathered it.
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
