"""Division of a round into writes that each take one slice of the owner's time."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.broker.engine.tally import SLICE_BYTES

SLICE_BUFFERS = 4096  # buffers of one write: a quarter of a microsecond each


def in_slices(buffers: list[bytes | memoryview]) -> Iterator[tuple[list[bytes | memoryview], int]]:
    """Yield lists of buffers with the same bytes, one per slice, and the size of each list."""
    size = sum(map(len, buffers))
    if len(buffers) <= SLICE_BUFFERS and size <= SLICE_BYTES:
        yield buffers, size
        return
    piece: list[bytes | memoryview] = []
    room = SLICE_BYTES
    for buffer in buffers:
        remaining = buffer
        while len(remaining) > room:
            view = memoryview(remaining)
            piece.append(view[:room])
            yield piece, SLICE_BYTES
            remaining, piece, room = view[room:], [], SLICE_BYTES
        piece.append(remaining)
        room -= len(remaining)
        if len(piece) == SLICE_BUFFERS:
            yield piece, SLICE_BYTES - room
            piece, room = [], SLICE_BYTES
    if piece:
        yield piece, SLICE_BYTES - room
