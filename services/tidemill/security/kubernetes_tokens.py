"""Tokens of Kubernetes service accounts: signed by the API server, for a few minutes (ADR 0079).

    HEADER.CLAIMS.SIGNATURE      three parts in base64url (RFC 7519)

    HEADER  {"alg": "RS256", "kid": "..."}
    CLAIMS  {"iss": ISSUER, "aud": ["tidemill"], "exp": s, "nbf": s, "iat": s,
             "sub": "system:serviceaccount:NS:NAME",
             "kubernetes.io": {"namespace": "NS", "serviceaccount": {"name": "NAME"}}}

A process remembers that a token is genuine. It does not remember the rights of the token.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol, final

from tidemill.common.errors import KeyMissing, TokenEnded, Unauthorized, WrongCredentials
from tidemill.security.identities import ACCOUNT_NAME, NAMESPACE
from tidemill.security.json_web_keys import (
    ES256,
    KEY_ID_CHARS_MAX,
    RS256,
    IssuerKey,
    KeySet,
    decode_base64url,
)

SESSION_TOKEN: Final = "x-mq-session-token"  # noqa: S105  # The name of a header.
TOKEN_BYTES_MAX: Final = 8 << 10
# Of the header, which is decoded before the signature is known to be right. Decoding 8 KiB would
# take as long as a check of a signature.
PART_CHARS_MAX: Final = 1 << 10
# Of a signature: 64 bytes of ES256; RSA_BITS_MIN to RSA_BITS_MAX of RS256.
SIGNATURE_CHARS: Final = frozenset({86, *range(342, 684)})
LEEWAY_S: Final = 30  # between the clocks of the API server and of this process
DURATION_S_MAX: Final = 24 * 3_600  # of a token, from `iat` to `exp`
VERIFIED_MAX: Final = 10_000  # remembered tokens, about 400 bytes each
TIME_S_MAX: Final = 1 << 40  # of a claim
WRONG: Final = "the Kubernetes token is wrong"  # before its signature is known to be right

_SUBJECT: Final = re.compile(rf"system:serviceaccount:({NAMESPACE}):({ACCOUNT_NAME})")


class ChecksOfSignatures(Protocol):
    """The limit of checks that fail, by the address of the caller."""

    def is_used_up(self, address: str) -> bool:
        """Whether too many checks have failed."""

    def check(self, address: str) -> None:
        """Raise Overloaded if too many checks have failed."""

    def note_failure(self, address: str) -> None:
        """Count a failed check."""


class VerifiedToken(NamedTuple):
    """A genuine token."""

    account: str  # NS/NAME
    not_after_ms: int  # with the leeway
    key: IssuerKey


class TokenHeader(NamedTuple):
    """The first part of a token."""

    key_id: str
    algorithm: str


@final
class KubernetesTokens:
    """The check of tokens, and the genuine ones of the last calls."""

    def __init__(
        self,
        issuer: str,
        audience: str,
        find_keys: Callable[[], KeySet | None],
        limit: ChecksOfSignatures,
    ) -> None:
        """`find_keys` returns the present keys of the issuer; None if they are unknown."""
        self._issuer = issuer
        self._audience = audience
        self._find_keys = find_keys
        self._limit = limit
        self._verified: dict[bytes, VerifiedToken] = {}  # by SHA-256, the oldest first

    def verify(self, text: str, *, address: str, now_ms: int) -> VerifiedToken:
        """Return the service account of a token. Raises Unauthorized, KeyMissing, Overloaded.

        A text names a claim only after a correct signature.
        """
        keys = self._find_keys()
        if keys is None:
            raise KeyMissing(
                "the keys of oidc_keys have not been read, so no Kubernetes token is verified"
            )
        # A malformed token is not even hashed.
        digest = hash_of(text) if has_shape(text) else b""
        known = self._verified.get(digest)
        if known is not None:
            if known.key == keys.find(known.key.id, known.key.algorithm):
                if now_ms <= known.not_after_ms:
                    return known
                del self._verified[digest]
                raise TokenEnded("the Kubernetes token has ended")
            del self._verified[digest]
        # A check takes up to 0.16 ms, and every host can send wrong tokens.
        self._limit.check(address)
        try:
            verified = self._check(text, keys, now_ms)
        except Unauthorized:
            self._limit.note_failure(address)
            raise
        if len(self._verified) >= VERIFIED_MAX:
            del self._verified[next(iter(self._verified))]
        self._verified[digest] = verified
        return verified

    def has_unknown_key(self, text: str, *, address: str) -> bool:
        """Whether a well-formed token names a key that is not among the present ones.

        If too many checks have failed, the answer is no, and `verify` refuses the token.
        """
        if not has_shape(text) or hash_of(text) in self._verified:
            return False  # If the key of a genuine token has left the set, no read brings it back.
        if self._limit.is_used_up(address):
            return False
        header = parse_header(text)
        if header is None:
            return False
        keys = self._find_keys()
        return keys is None or not keys.has_id(header.key_id)

    def _check(self, text: str, keys: KeySet, now_ms: int) -> VerifiedToken:
        header = parse_header(text)
        key = None if header is None else keys.find(header.key_id, header.algorithm)
        if key is None:
            raise WrongCredentials(WRONG)
        signed, _, last = text.rpartition(".")
        signature = decode_base64url(last)
        if signature is None or not key.has_signed(signed.encode(), signature):
            raise WrongCredentials(WRONG)
        claims = _json_of(signed.partition(".")[2])
        account, not_after_ms = self._check_claims(claims or {}, now_ms)
        return VerifiedToken(account, not_after_ms, key)

    def _check_claims(self, claims: dict[str, Any], now_ms: int) -> tuple[str, int]:
        """Return the service account and the end of a token. Raises Unauthorized."""
        if claims.get("iss") != self._issuer:
            raise Unauthorized("the issuer of the Kubernetes token is not oidc_issuer")
        audience = claims.get("aud")
        if self._audience not in (audience if isinstance(audience, list) else [audience]):
            raise Unauthorized(
                f"the Kubernetes token is not for the audience {self._audience}; request a token"
                " with this audience"
            )
        times = [claims.get(name, -1) for name in ("exp", "nbf", "iat")]
        if not all(type(each) is int and 0 <= each < TIME_S_MAX for each in times):
            raise Unauthorized("the Kubernetes token has no valid times exp, nbf and iat")
        expires_s, not_before_s, issued_s = times
        not_after_ms = (expires_s + LEEWAY_S) * 1_000
        if now_ms > not_after_ms:
            raise TokenEnded("the Kubernetes token has ended")
        if now_ms < (not_before_s - LEEWAY_S) * 1_000:
            raise Unauthorized("the Kubernetes token is not valid yet; compare the clocks")
        if expires_s - issued_s > DURATION_S_MAX:
            raise Unauthorized(
                f"the Kubernetes token is valid for {expires_s - issued_s} s; at most"
                f" {DURATION_S_MAX} s are allowed"
            )
        return _account_of(claims), not_after_ms


def hash_of(text: str) -> bytes:
    """Return the SHA-256 of a token."""
    return hashlib.sha256(text.encode(errors="replace")).digest()


def has_shape(text: str) -> bool:
    """Whether a text has the size and the parts of a token. It decodes nothing: under 1 us."""
    if len(text) > TOKEN_BYTES_MAX or text.count(".") != 2:
        return False
    first, _, rest = text.partition(".")
    claims, _, last = rest.partition(".")
    return 0 < len(first) <= PART_CHARS_MAX and bool(claims) and len(last) in SIGNATURE_CHARS


def parse_header(text: str) -> TokenHeader | None:
    """Return the first part of a token; None if it is malformed or of another algorithm."""
    header = _json_of(text.partition(".")[0]) if has_shape(text) else None
    # An extension that the header marks as critical is unknown here (RFC 7515, 4.1.11).
    if header is None or "crit" in header:
        return None
    key_id, algorithm = header.get("kid"), header.get("alg")
    if algorithm not in {RS256, ES256} or not isinstance(key_id, str):
        return None
    return TokenHeader(key_id, algorithm) if len(key_id) <= KEY_ID_CHARS_MAX else None


def _json_of(part: str) -> dict[str, Any] | None:
    """Return the object in a part of a token; None if there is none."""
    decoded = decode_base64url(part)
    try:
        found = None if decoded is None else json.loads(decoded)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _account_of(claims: dict[str, Any]) -> str:
    """Return the service account of a token, NS/NAME. Raises Unauthorized."""
    subject = claims.get("sub")
    found = _SUBJECT.fullmatch(subject) if isinstance(subject, str) else None
    if found is None:
        raise Unauthorized("the Kubernetes token is not that of a service account")
    namespace, name = found.groups()
    own = claims.get("kubernetes.io")
    account = own.get("serviceaccount") if isinstance(own, dict) else None
    named = account.get("name") if isinstance(account, dict) else None
    if not isinstance(own, dict) or (own.get("namespace"), named) != (namespace, name):
        raise Unauthorized("the claims of the Kubernetes token name two service accounts")
    return f"{namespace}/{name}"
