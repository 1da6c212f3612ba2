"""The body in a stored message, which no process of ours ever looks at."""

from __future__ import annotations

from typing import Final

from tidemill.message.stored_message import decode

_FILL: Final = b"."


def body_of(blob: bytes | memoryview) -> bytes:
    """Return the transported body in `blob`."""
    return bytes(blob[len(blob) - decode(blob).body_size :])


def filled(text: str, size: int) -> bytes:
    """Return a body of at least `size` bytes that says `text`, in which there is no dot."""
    body = text.encode()
    assert _FILL not in body
    return body.ljust(size, _FILL)


def text_of(blob: bytes | memoryview) -> str:
    """Return what `filled` was told to say, of a stored message.

    By looking for the first dot: to strip tens of kilobytes of them costs a tenth of a
    millisecond, which the tests that read ten thousand messages again and again would notice.
    """
    return body_of(blob).partition(_FILL)[0].decode()
