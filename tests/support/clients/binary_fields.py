"""Header fields whose names end in `-bin`: base64 without padding, as gRPC has it."""

from __future__ import annotations

import base64


def decode_binary(value: str) -> bytes:
    """Return the bytes of a field, padded or not."""
    return base64.b64decode(value + "=" * (-len(value) % 4), validate=True)


def encode_binary(value: bytes) -> str:
    """Return the text of a field."""
    return base64.b64encode(value).decode().rstrip("=")
