"""Access keys and signatures in the headers of a call, as RocketMQ's clients send them.

    authorization    MQv2-HMAC-SHA1 Credential=KEY[/...], SignedHeaders=x-mq-date-time,
                     Signature=HEX
    x-mq-date-time   the signed text

The signature is the HMAC-SHA1 of the signed text under the secret. Nothing else of a call is
signed, so a copied header stays valid until its secret changes. A client may repeat its headers:
the Go client adds them again for each repeated send. Then the last ones count.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Final, NamedTuple

from tidemill.common.errors import Unauthorized

AUTHORIZATION: Final = "authorization"
DATE_TIME: Final = "x-mq-date-time"
HEADER_BYTES_MAX: Final = 4_096
DATE_TIME_BYTES_MAX: Final = 64
SIGNATURE_DIGITS: Final = 40
_HEX: Final = frozenset("0123456789abcdefABCDEF")


class SignedHeader(NamedTuple):
    """What a call shows of its user."""

    access_key: str
    signature: bytes
    date_time: bytes


def parse_header(authorization: str, date_time: str) -> SignedHeader | None:
    """Read the headers of a call; None if they have no access key.

    The algorithm and the list of signed headers are not examined. Raises Unauthorized.
    """
    if len(authorization) > HEADER_BYTES_MAX:
        raise Unauthorized(f"the header {AUTHORIZATION} has more than {HEADER_BYTES_MAX} bytes")
    fields: dict[str, str] = {}
    for part in authorization.split(","):
        name, _, value = part.strip().partition("=")
        fields[name.rpartition(" ")[2]] = value.strip()
    access_key = fields.get("Credential", "").partition("/")[0]
    if not access_key:
        return None
    date_time = date_time.rpartition(",")[2].strip()
    if not 0 < len(date_time.encode()) <= DATE_TIME_BYTES_MAX:
        raise Unauthorized(
            f"a signed call has the header {DATE_TIME} with 1 to {DATE_TIME_BYTES_MAX} bytes"
        )
    signature = fields.get("Signature", "")
    if len(signature) != SIGNATURE_DIGITS or not _HEX.issuperset(signature):
        raise Unauthorized(f"a signature has {SIGNATURE_DIGITS} hexadecimal digits")
    return SignedHeader(access_key, bytes.fromhex(signature), date_time.encode())


def sign(secret: bytes, date_time: bytes) -> bytes:
    """Return the signature of a text."""
    return hmac.digest(secret, date_time, "sha1")


def find_secret(header: SignedHeader, secrets: Sequence[bytes]) -> int | None:
    """Return the index of the secret that has signed the header; None if none has.

    Each secret costs the same time, whether it fits or not.
    """
    found = None
    for index, secret in enumerate(secrets):
        if hmac.compare_digest(sign(secret, header.date_time), header.signature):
            found = index
    return found
