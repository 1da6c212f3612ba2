"""The public keys of an issuer of tokens: a JSON Web Key Set (RFC 7517), as Kubernetes serves it.

    {"keys": [{"kty": "RSA", "kid": "...", "n": "...", "e": "AQAB", "alg": "RS256", "use": "sig"}]}

A key verifies one algorithm alone, which its type decides: RS256 for RSA, ES256 for P-256. So a
token cannot choose another use of a key. Other and malformed keys of the set are left out, as RFC
7517 recommends in section 5.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

    PublicKey: TypeAlias = RSAPublicKey | EllipticCurvePublicKey

RS256: Final = "RS256"
ES256: Final = "ES256"
SET_BYTES_MAX: Final = 256 << 10  # of the document; a key of 4,096 bits has 800
KEYS_MAX: Final = 64
KEY_ID_CHARS_MAX: Final = 256
RSA_BITS_MIN: Final = 2_048
RSA_BITS_MAX: Final = 4_096  # a check takes 0.16 ms; it grows with the square
EXPONENT_BITS_MAX: Final = 32  # a larger one makes a check slow
COORDINATE_BYTES: Final = 32  # of P-256, also of each half of a signature
_BASE64URL: Final = re.compile(r"[A-Za-z0-9_-]+")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class IssuerKey:
    """A public key for one algorithm."""

    id: str
    algorithm: str
    thumbprint: bytes  # of the numbers of the key
    public: PublicKey = field(repr=False, compare=False)

    def has_signed(self, content: bytes, signature: bytes) -> bool:
        """Whether a signature is that of the content."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric import ec, padding, utils
        from cryptography.hazmat.primitives.hashes import SHA256

        try:
            if isinstance(self.public, ec.EllipticCurvePublicKey):
                if len(signature) != 2 * COORDINATE_BYTES:
                    return False
                halves = signature[:COORDINATE_BYTES], signature[COORDINATE_BYTES:]
                encoded = utils.encode_dss_signature(*map(int.from_bytes, halves))
                self.public.verify(encoded, content, ec.ECDSA(SHA256()))
            else:
                self.public.verify(signature, content, padding.PKCS1v15(), SHA256())
        except InvalidSignature:
            return False
        return True


@final
class KeySet:
    """The keys of an issuer by id and algorithm."""

    def __init__(self, keys: Iterable[IssuerKey] = ()) -> None:
        """Raise ValueError if two different keys for one algorithm have the same id."""
        self._keys: dict[tuple[str, str], IssuerKey] = {}
        for key in keys:
            if self._keys.setdefault((key.id, key.algorithm), key) != key:
                raise ValueError(f"two keys have the id {key.id!r}")

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, key_id: str, algorithm: str) -> IssuerKey | None:
        """Return the key with an id for an algorithm; None if there is none."""
        return self._keys.get((key_id, algorithm))

    def has_id(self, key_id: str) -> bool:
        """Whether a key has this id."""
        return (key_id, RS256) in self._keys or (key_id, ES256) in self._keys

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeySet) and self._keys == other._keys

    __hash__ = None  # type: ignore[assignment]  # Nothing hashes a set of keys.


def parse_key_set(content: bytes) -> KeySet:
    """Read a JSON Web Key Set. Raises ValueError."""
    if len(content) > SET_BYTES_MAX:
        raise ValueError(f"it is longer than {SET_BYTES_MAX} bytes")
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    keys = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(keys, list):
        raise ValueError('it has no list "keys", so it is not a JSON Web Key Set')  # noqa: TRY004  # Of a file.
    if len(keys) > KEYS_MAX:
        raise ValueError(f"it has {len(keys)} keys; at most {KEYS_MAX} are allowed")
    return KeySet([key for each in keys if (key := _key_of(each)) is not None])


def _key_of(jwk: Any) -> IssuerKey | None:
    """Return a key that can verify tokens; None if it is malformed or has another purpose."""
    if not isinstance(jwk, dict) or jwk.get("use", "sig") != "sig":
        return None
    key_id = jwk.get("kid")
    if not isinstance(key_id, str) or not 0 < len(key_id) <= KEY_ID_CHARS_MAX:
        return None
    algorithm = {"RSA": RS256, "EC": ES256}.get(str(jwk.get("kty")))
    if algorithm is None or jwk.get("alg", algorithm) != algorithm:
        return None
    names = ("n", "e") if algorithm == RS256 else ("x", "y")
    if algorithm == ES256 and jwk.get("crv") != "P-256":
        return None
    numbers = [decode_base64url(jwk.get(name)) for name in names]
    if None in numbers:
        return None
    first, second = (int.from_bytes(number or b"") for number in numbers)
    public = _rsa(first, second) if algorithm == RS256 else _p256(first, second)
    if public is None:
        return None
    thumbprint = hashlib.sha256(f"{algorithm} {first} {second}".encode()).digest()
    return IssuerKey(id=key_id, algorithm=algorithm, thumbprint=thumbprint, public=public)


def _rsa(modulus: int, exponent: int) -> RSAPublicKey | None:
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicNumbers

    if not RSA_BITS_MIN <= modulus.bit_length() <= RSA_BITS_MAX:
        return None
    if exponent.bit_length() > EXPONENT_BITS_MAX:
        return None
    try:
        return RSAPublicNumbers(exponent, modulus).public_key()
    except ValueError:
        return None


def _p256(x: int, y: int) -> EllipticCurvePublicKey | None:
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicNumbers

    try:
        return EllipticCurvePublicNumbers(x, y, SECP256R1()).public_key()
    except ValueError:
        return None


def decode_base64url(text: object) -> bytes | None:
    """Return the bytes of base64url without padding; None for every other text.

    Each value has one text, so no token has two.
    """
    if not isinstance(text, str) or not _BASE64URL.fullmatch(text):
        return None
    try:
        decoded = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError:
        return None
    return decoded if base64.urlsafe_b64encode(decoded).rstrip(b"=") == text.encode() else None
