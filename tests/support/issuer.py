"""An issuer of Kubernetes tokens, as the API server of a cluster is one."""

from __future__ import annotations

import base64
import json
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias

from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa, utils
from cryptography.hazmat.primitives.hashes import SHA256

PrivateKey: TypeAlias = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey

ISSUER: Final = "https://kubernetes.default.svc.cluster.local"
AUDIENCE: Final = "tidemill"
NOW_S: Final = 1_000_000


@cache
def rsa_key(number: int = 0, bits: int = 2_048) -> rsa.RSAPrivateKey:
    """Return an RSA key; equal arguments name one key."""
    assert number >= 0
    return rsa.generate_private_key(65_537, bits)


@cache
def p256_key(number: int = 0) -> ec.EllipticCurvePrivateKey:
    """Return a key of P-256."""
    assert number >= 0
    return ec.generate_private_key(ec.SECP256R1())


def base64url(data: bytes) -> str:
    """Return base64url without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def part(value: object) -> str:
    """Return a part of a token."""
    return base64url(json.dumps(value).encode())


def _number(value: int, size: int | None = None) -> str:
    return base64url(value.to_bytes(size or (value.bit_length() + 7) // 8))


def jwk(key: PrivateKey, key_id: str = "k1", **fields: Any) -> dict[str, Any]:
    """Return the public half of a key, as an issuer publishes it."""
    if isinstance(key, rsa.RSAPrivateKey):
        public = key.public_key().public_numbers()
        own = {"kty": "RSA", "n": _number(public.n), "e": _number(public.e), "alg": "RS256"}
    else:
        point = key.public_key().public_numbers()
        own = {"kty": "EC", "crv": "P-256", "alg": "ES256"}
        own |= {"x": _number(point.x, 32), "y": _number(point.y, 32)}
    return {"kid": key_id, "use": "sig", **own, **fields}


def key_set(*keys: dict[str, Any]) -> bytes:
    """Return the document of an issuer."""
    return json.dumps({"keys": list(keys)}).encode()


def claims_of(
    account: str = "shop/orders", *, now_s: int = NOW_S, **changed: Any
) -> dict[str, Any]:
    """Return the claims of a token for an hour; a value of None leaves a claim out."""
    namespace, _, name = account.partition("/")
    claims = {
        "iss": ISSUER,
        "aud": [AUDIENCE],
        "exp": now_s + 3_600,
        "nbf": now_s,
        "iat": now_s,
        "sub": f"system:serviceaccount:{namespace}:{name}",
        "kubernetes.io": {
            "namespace": namespace,
            "pod": {"name": "orders-0", "uid": "u1"},
            "serviceaccount": {"name": name, "uid": "u2"},
        },
        **changed,
    }
    return {name: value for name, value in claims.items() if value is not None}


def signature_of(key: PrivateKey, content: str) -> bytes:
    """Return the signature of a text as tokens have it."""
    if isinstance(key, rsa.RSAPrivateKey):
        return key.sign(content.encode(), padding.PKCS1v15(), SHA256())
    halves = utils.decode_dss_signature(key.sign(content.encode(), ec.ECDSA(SHA256())))
    return b"".join(half.to_bytes(32) for half in halves)


def token(
    claims: dict[str, Any] | None = None, key: PrivateKey | None = None, **header: Any
) -> str:
    """Return a signed token; None leaves a field of the header out."""
    key = key or rsa_key()
    algorithm = "RS256" if isinstance(key, rsa.RSAPrivateKey) else "ES256"
    fields = {"alg": algorithm, "kid": "k1", **header}
    first = part({name: value for name, value in fields.items() if value is not None})
    signed = f"{first}.{part(claims_of() if claims is None else claims)}"
    return f"{signed}.{base64url(signature_of(key, signed))}"


def write_keys(folder: Path, *keys: dict[str, Any]) -> str:
    """Write the document of an issuer; return the name of the file."""
    file = folder / "jwks.json"
    file.write_bytes(key_set(*keys))
    return str(file)
