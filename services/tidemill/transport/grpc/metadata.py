"""The deadline in the header fields of a call."""

from __future__ import annotations

from typing import Final

from tidemill.transport.grpc.status import RpcCode, RpcError

_DIGITS_MAX: Final = 8
_SECONDS: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


def parse_timeout(text: str) -> float:
    """Return the seconds of a `grpc-timeout` field; raise RpcError if it is invalid."""
    digits, unit_s = text[:-1], _SECONDS.get(text[-1:])
    # Without a regular expression, which is slower. Every call has a timeout.
    if unit_s is None or not (digits.isdigit() and digits.isascii() and len(digits) <= _DIGITS_MAX):
        raise RpcError(
            RpcCode.INTERNAL, "grpc-timeout must be a number of up to 8 digits and a unit"
        )
    return int(digits) * unit_s
