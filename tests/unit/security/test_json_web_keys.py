"""Sets of public keys of an issuer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.issuer import base64url, jwk, key_set, p256_key, rsa_key
from tidemill.security.json_web_keys import KEYS_MAX, SET_BYTES_MAX, parse_key_set

RSA = jwk(rsa_key())


def count(*keys: Any) -> int:
    return len(parse_key_set(key_set(*keys)))


def test_keys_are_found_by_id_and_algorithm() -> None:
    keys = parse_key_set(key_set(RSA, jwk(p256_key(), "k2")))
    assert keys.find("k1", "RS256")
    assert keys.find("k2", "ES256")
    assert keys.find("k1", "ES256") is None
    assert keys.find("k2", "RS256") is None
    assert keys.has_id("k2")
    assert not keys.has_id("k3")


def test_equal_keys_of_two_reads_are_equal() -> None:
    assert parse_key_set(key_set(RSA)) == parse_key_set(key_set(dict(RSA)))
    assert parse_key_set(key_set(RSA)) != parse_key_set(key_set(jwk(rsa_key(1))))


def test_alg_and_use_may_be_missing() -> None:
    short = {name: RSA[name] for name in ("kty", "kid", "n", "e")}
    assert count(short) == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"use": "enc"},
        {"alg": "RS512"},
        {"alg": "HS256"},
        {"kty": "oct", "k": "AAAA"},
        {"kty": "OKP"},
        {"kid": ""},
        {"kid": None},
        {"kid": 1},
        {"kid": "k" * 257},
        {"e": base64url(b"\1" + b"\0" * 3 + b"\1")},
    ],
)
def test_keys_for_other_purposes_are_left_out(changed: dict[str, Any]) -> None:
    assert count({**RSA, **changed}, jwk(p256_key(), "k2")) == 1


def test_other_curves_are_left_out() -> None:
    assert count(jwk(p256_key(), crv="P-384")) == 0


def test_short_and_long_rsa_keys_are_left_out() -> None:
    for bits, kept in ((2_047, 0), (2_048, 1), (4_096, 1), (4_097, 0)):
        number = 1 << bits - 1 | 1
        assert count({**RSA, "n": base64url(number.to_bytes((bits + 7) // 8))}) == kept


@pytest.mark.parametrize(
    "changed", [{"n": None}, {"n": "="}, {"n": "a b"}, {"e": ""}, {"e": base64url(b"\2")}]
)
def test_malformed_keys_are_left_out(changed: dict[str, Any]) -> None:
    assert count({**RSA, **changed}, jwk(p256_key(), "k2")) == 1


def test_a_point_beside_the_curve_is_left_out() -> None:
    assert count(RSA, jwk(p256_key(), x=base64url(b"\1" * 32))) == 1


def test_two_keys_of_one_id_are_reported() -> None:
    with pytest.raises(ValueError, match="two keys"):
        count(RSA, jwk(rsa_key(1)))
    assert count(RSA, RSA) == 1
    assert count(RSA, jwk(p256_key())) == 2, "of two algorithms"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"keys": {}}', b"[" * 9_000, b"\xff"]
)
def test_other_documents_are_reported(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"JSON"):
        parse_key_set(content)


def test_the_number_of_keys_is_limited() -> None:
    keys = [jwk(rsa_key(), f"k{number}") for number in range(KEYS_MAX + 1)]
    assert count(*keys[:-1]) == KEYS_MAX
    with pytest.raises(ValueError, match="at most 64"):
        count(*keys)


def test_the_size_is_limited() -> None:
    document = json.dumps({"keys": [RSA]}).encode()
    assert len(parse_key_set(document.ljust(SET_BYTES_MAX))) == 1
    with pytest.raises(ValueError, match="longer than"):
        parse_key_set(document.ljust(SET_BYTES_MAX + 1))


def test_an_empty_set_has_no_keys() -> None:
    assert count() == 0
