"""Bodies of stored messages. The product itself never reads them."""

from __future__ import annotations

from typing import Final

from tidemill.message.stored_message import decode

_FILL: Final = b"."


def body_of(blob: bytes | memoryview) -> bytes:
    """Return the transported body in `blob`."""
    return bytes(blob[len(blob) - decode(blob).body_size :])


def filled(text: str, size: int) -> bytes:
    """Return `text`, which has no dot, padded with dots to at least `size` bytes."""
    body = text.encode()
    assert _FILL not in body
    return body.ljust(size, _FILL)


def text_of(blob: bytes | memoryview) -> str:
    """Return the text of a stored message whose body `filled` made.

    It searches for the first dot. Stripping tens of kilobytes would take 0.1 ms, which is too slow
    for tests that read ten thousand messages repeatedly.
    """
    return body_of(blob).partition(_FILL)[0].decode()
