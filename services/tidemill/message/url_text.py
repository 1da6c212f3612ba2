"""URL-safe base64 without padding, with exactly one valid text per value."""

from __future__ import annotations

from binascii import Error as Base64Error
from binascii import a2b_base64, b2a_base64

_TO_URL_SAFE = bytes.maketrans(b"+/", b"-_")
# Characters of the standard alphabet become illegal ones, which strict decoding rejects.
_FROM_URL_SAFE = bytes.maketrans(b"-_+/=", b"+/!!!")


def encode(data: bytes) -> str:
    """Return the text of some bytes."""
    return b2a_base64(data, newline=False).rstrip(b"=").translate(_TO_URL_SAFE).decode("ascii")


def decode(text: str, *, chars_max: int) -> bytes:
    """Return the bytes of a text. Raises ValueError unless `encode` returns the same text."""
    if not text.isascii() or len(text) > chars_max:
        raise ValueError("the text has other characters, or too many")
    padded = text.encode("ascii").translate(_FROM_URL_SAFE) + b"=" * (-len(text) % 4)
    try:
        decoded = a2b_base64(padded, strict_mode=True)
    except Base64Error as error:
        raise ValueError(str(error)) from None
    # The last character has bits that no byte uses. They must be zero.
    if encode(decoded) != text:
        raise ValueError("the last character has bits that no byte uses")
    return decoded
