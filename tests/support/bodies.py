"""The body in a stored message, which no process of ours ever looks at."""

from __future__ import annotations

from tidemill.message.stored_message import decode


def body_of(blob: bytes | memoryview) -> bytes:
    """Return the transported body in `blob`."""
    return bytes(blob[len(blob) - decode(blob).body_size :])
