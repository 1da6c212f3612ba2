"""The secret that a request proves: in the header `Authorization: Basic`, or with a signature.

The signature is the one of the official clients. Only calls by gRPC have it, because a web page
could repeat a copied one.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hmac
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from starlette.datastructures import Headers

from tidemill.admin.http.refused_login import RefusedLogin
from tidemill.common.errors import Unauthorized
from tidemill.security.identities import SECRET_CHARS_MAX
from tidemill.security.signatures import DATE_TIME, Signer, parse_header

if TYPE_CHECKING:
    from starlette.types import Scope

GRPC: Final = "grpc"  # type of the scope of a call by gRPC
VIA_BASIC: Final = "basic"
VIA_SIGNATURE: Final = "signature"
HEADER_CHARS_MAX: Final = 4_096
WRONG: Final = "the user or the secret is wrong"
WRONG_SIGNATURE: Final = "the access key or the signature is wrong"
MISSING: Final = (
    "no credentials; send a user and its secret in the header Authorization: Basic, or a token in"
    " Authorization: Bearer TOKEN"
)


class ShownSecret(NamedTuple):
    """The name of a user in a request, and the proof of its secret."""

    name: str
    kind: str  # of the credential
    wrong: str  # reason of a refusal
    # Whether a secret is the proven one. It takes the same time for each secret.
    fits: Callable[[bytes], bool]


def find_shown_secret(scope: Scope, shown: Sequence[str]) -> ShownSecret:
    """Return the secret of the headers `Authorization`; an invalid one has no user.

    Raises RefusedLogin for an invalid signature.
    """
    if scope["type"] == GRPC and not _is_basic(shown[0]):
        return _signed_by(shown[0], Headers(scope=scope).get(DATE_TIME, ""))
    name, secret = parse_basic(shown[0]) if len(shown) == 1 else ("", "")
    fits = functools.partial(hmac.compare_digest, secret.encode())
    return ShownSecret(name, VIA_BASIC, WRONG, fits)


def _signed_by(authorization: str, date_time: str) -> ShownSecret:
    try:
        signed = parse_header(authorization, date_time)
    except Unauthorized as error:
        raise RefusedLogin.of(error) from None
    if signed is None:
        raise RefusedLogin(MISSING)

    def fits(secret: bytes) -> bool:
        return hmac.compare_digest(Signer(secret).sign(signed.date_time), signed.signature)

    return ShownSecret(signed.access_key, VIA_SIGNATURE, WRONG_SIGNATURE, fits)


def is_bearer(authorization: str) -> bool:
    """Whether a header has a token."""
    return authorization.partition(" ")[0].lower() == "bearer"


def _is_basic(authorization: str) -> bool:
    return authorization.partition(" ")[0].lower() == "basic"


def parse_basic(authorization: str) -> tuple[str, str]:
    """Return the user and the secret of a header (RFC 7617); two empty texts if it has none."""
    if not _is_basic(authorization) or len(authorization) > HEADER_CHARS_MAX:
        return "", ""
    try:
        text = base64.b64decode(authorization.partition(" ")[2].strip(), validate=True).decode()
    except (binascii.Error, ValueError):
        return "", ""
    name, _, secret = text.partition(":")
    return name, secret[: SECRET_CHARS_MAX + 1]
