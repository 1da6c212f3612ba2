"""Access keys and signatures in the headers of a call, as RocketMQ's clients send them.

    authorization    MQv2-HMAC-SHA1 Credential=KEY[/...], SignedHeaders=x-mq-date-time,
                     Signature=HEX
    x-mq-date-time   the signed text

The signature is the HMAC-SHA1 of the signed text under the secret. Nothing else of a call is
signed, so a copied header stays valid until its secret changes, or until `signature_age_max_ms`
after its date. A client may repeat its headers:
the Go client adds them again for each repeated send. Then the last ones count. A call with the
credentials of two users is refused.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple, final

from tidemill.common.errors import Unauthorized

AUTHORIZATION: Final = "authorization"
DATE_TIME: Final = "x-mq-date-time"
HEADER_BYTES_MAX: Final = 4_096
DATE_TIME_BYTES_MAX: Final = 64
SIGNATURE_DIGITS: Final = 40
_CREDENTIAL: Final = "Credential"  # field of a header
_BEARER: Final = "bearer "  # begin of a header with a token
_HEX: Final = frozenset("0123456789abcdefABCDEF")
_BLOCK_BYTES: Final = 64  # of SHA-1
# The form of the official clients. A pattern for more of the algorithms takes twice the time.
_USUAL: Final = re.compile(
    r"MQv2-HMAC-SHA1 Credential=([^,/=]{1,64})[^,=]{0,64}, ?SignedHeaders=x-mq-date-time, ?"
    r"Signature=([0-9A-Fa-f]{40})"
)


# HMAC-SHA1 is the signature of RocketMQ's clients. It does not need a hash without collisions.
_sha1 = functools.partial(hashlib.sha1, usedforsecurity=False)


class SignedHeader(NamedTuple):
    """What a call shows of its user."""

    access_key: str
    signature: bytes
    date_time: bytes


@final
class Signer:
    """Signs with one secret. It keeps the two hashes that begin each HMAC (RFC 2104)."""

    __slots__ = ("_inner", "_outer")

    def __init__(self, secret: bytes) -> None:
        if len(secret) > _BLOCK_BYTES:
            secret = _sha1(secret).digest()
        block = secret.ljust(_BLOCK_BYTES, b"\0")
        self._inner = _sha1(bytes([byte ^ 0x36 for byte in block]))
        self._outer = _sha1(bytes([byte ^ 0x5C for byte in block]))

    def sign(self, text: bytes) -> bytes:
        """Return the HMAC-SHA1 of a text, in a third of the time of `hmac.digest`."""
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(text)
        outer.update(inner.digest())
        return outer.digest()


def signed_headers(access_key: str, secret: str, date_time: str) -> dict[str, str]:
    """Return the headers of a call, signed as the clients sign it."""
    signature = Signer(secret.encode()).sign(date_time.encode()).hex()
    return {
        AUTHORIZATION: (
            f"MQv2-HMAC-SHA1 Credential={access_key}, SignedHeaders={DATE_TIME},"
            f" Signature={signature}"
        ),
        DATE_TIME: date_time,
    }


def parse_header(authorization: str, date_time: str) -> SignedHeader | None:
    """Read the headers of a call; None if they are blank or have an empty access key.

    The Python client sends an empty access key if it has no credentials. The algorithm and the list
    of signed headers are not examined. Raises Unauthorized, also for a header of another form: its
    caller must not get the user of its certificate instead.
    """
    usual = _USUAL.fullmatch(authorization)
    if usual is not None:
        access_key, signature = usual.groups()
    else:
        if not authorization.strip():
            return None
        access_key, signature = _parse_any(authorization)
        if not access_key:
            return None
    date = date_time.rpartition(",")[2].strip().encode()
    if not 0 < len(date) <= DATE_TIME_BYTES_MAX:
        raise Unauthorized(
            f"a signed call has the header {DATE_TIME} with 1 to {DATE_TIME_BYTES_MAX} bytes"
        )
    if usual is None and (len(signature) != SIGNATURE_DIGITS or not _HEX.issuperset(signature)):
        raise Unauthorized(f"a signature has {SIGNATURE_DIGITS} hexadecimal digits")
    return SignedHeader(access_key, bytes.fromhex(signature), date)


def _parse_any(authorization: str) -> tuple[str, str]:
    """Return the access key and the signature of an unusual or repeated header.

    Raises Unauthorized if it is too long, has no field for the access key, or has the credentials
    of two users.
    """
    if len(authorization) > HEADER_BYTES_MAX:
        raise Unauthorized(f"the header {AUTHORIZATION} has more than {HEADER_BYTES_MAX} bytes")
    fields: dict[str, str] = {}
    access_keys: set[str] = set()
    for part in authorization.split(","):
        name, _, value = part.strip().partition("=")
        field = name.rpartition(" ")[2]
        fields[field] = value.strip()
        if field == _CREDENTIAL:
            access_keys.add(value.strip().partition("/")[0])
        if access_keys and name.lower().startswith(_BEARER):
            raise Unauthorized(f"the call has a signature and a token in {AUTHORIZATION}; send one")
    if len(access_keys) > 1:
        keys = " and ".join(sorted(key or "(empty)" for key in access_keys))
        raise Unauthorized(f"the call has the access keys {keys} in {AUTHORIZATION}; send one")
    if _CREDENTIAL not in fields:
        raise Unauthorized(
            f"the header {AUTHORIZATION} is malformed: it has neither Credential=KEY nor a token"
        )
    return access_keys.pop(), fields.get("Signature", "")


def find_signer(header: SignedHeader, signers: Sequence[Signer]) -> int | None:
    """Return the index of the signer that has signed the header; None if none has.

    Each signer costs the same time, whether its signature fits or not.
    """
    found = None
    for index, signer in enumerate(signers):
        if hmac.compare_digest(signer.sign(header.date_time), header.signature):
            found = index
    return found


def check_date(date_time: str, *, now_ms: int, age_ms_max: int) -> None:
    """Check that the date of a signature is near the clock of this process. Raises Unauthorized.

    The clients send `20261129T140552Z`, and Rust sends RFC 3339 with the time zone. A date without
    a time zone is UTC.
    """
    text = date_time.rpartition(",")[2].strip()
    try:
        date = datetime.fromisoformat(text)
        if date.tzinfo is None:
            date = date.replace(tzinfo=UTC)
        signed_at_ms = round(date.timestamp() * 1_000)
    except (ValueError, OverflowError):
        raise Unauthorized(
            f"the date of the signature in {DATE_TIME} is not a date such as 20261129T140552Z, and"
            " this proxy limits the age of signatures"
        ) from None
    if abs(now_ms - signed_at_ms) <= age_ms_max:
        return
    side = "older" if signed_at_ms < now_ms else "newer"
    raise Unauthorized(
        f"the date of the signature, {text}, is {side} than the time of this proxy,"
        f" {datetime.fromtimestamp(now_ms // 1_000, UTC):%Y%m%dT%H%M%SZ}, by more than {age_ms_max}"
        " ms (signature_age_max_ms); check both clocks, and do not use a signature again"
    )
