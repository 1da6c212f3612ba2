"""What a call says in its header fields: its deadline, its metadata."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Final

from tidemill.transport.grpc.status import RpcCode, RpcError

_TIMEOUT: Final = re.compile(r"([0-9]{1,8})([HMSmun])")
_SECONDS: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


def parse_timeout(text: str) -> float:
    """Return the seconds of a `grpc-timeout` field; raise RpcError for what is none."""
    found = _TIMEOUT.fullmatch(text)
    if found is None:
        raise RpcError(RpcCode.INTERNAL, "grpc-timeout is a number of up to 8 digits and a unit")
    return int(found[1]) * _SECONDS[found[2]]


def decode_binary(value: str) -> bytes:
    """Return the bytes of a field whose name ends in `-bin`, padded or not.

    Raises RpcError for what is no base64.
    """
    try:
        return base64.b64decode(value + "=" * (-len(value) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise RpcError(RpcCode.INTERNAL, "a field that ends in -bin holds base64") from None


def encode_binary(value: bytes) -> str:
    """Return the text of a field whose name ends in `-bin`."""
    return base64.b64encode(value).decode().rstrip("=")
