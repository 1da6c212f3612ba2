"""The headers of signed calls, as the clients send them."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.common.errors import Unauthorized
from tidemill.security import signatures
from tidemill.security.signatures import Signer, find_signer, parse_header

DATE = "20261129T140552Z"


def signature(secret: str, date: str = DATE) -> str:
    return hmac.new(secret.encode(), date.encode(), hashlib.sha1).hexdigest()


def header(key: str, digits: str) -> str:
    return f"MQv2-HMAC-SHA1 Credential={key}, SignedHeaders=x-mq-date-time, Signature={digits}"


@pytest.mark.parametrize("key", ["orders", "orders//Rocketmq", "orders/eu/RocketMQ"])
@pytest.mark.parametrize("is_upper", [False, True])
def test_the_headers_of_the_clients_are_read(key: str, is_upper: bool) -> None:
    digits = signature("a secret of mine")
    found = parse_header(header(key, digits.upper() if is_upper else digits), DATE)
    assert found is not None
    assert found.access_key == "orders"
    assert find_signer(found, [Signer(b"another one"), Signer(b"a secret of mine")]) == 1
    assert find_signer(found, [Signer(b"another one")]) is None


def test_an_empty_access_key_is_no_credential() -> None:
    """The Python client always sends the header."""
    assert parse_header(header("", signature("")), DATE) is None
    assert parse_header("", "") is None
    assert parse_header(" ", DATE) is None


@pytest.mark.parametrize(
    "authorization",
    [
        "x",
        "Bearer",
        "Basic b3JkZXJzOnNlY3JldA==",
        f"MQv2-HMAC-SHA1 Signature={'0' * 40}",
        f"MQv2-HMAC-SHA1 credential=orders, SignedHeaders=x, Signature={'0' * 40}",
        f"MQv2-HMAC-SHA1 Credential:orders, SignedHeaders=x, Signature={'0' * 40}",
        "MQv2-HMAC-SHA1",
        ",",
        "=",
    ],
)
def test_a_header_of_another_form_is_refused(authorization: str) -> None:
    with pytest.raises(Unauthorized, match="malformed"):
        parse_header(authorization, DATE)


def test_the_last_of_repeated_headers_counts() -> None:
    """The Go client adds all headers again for each repeated send."""
    later = "20261129T140601Z"
    repeated = f"{header('orders', signature('s'))},{header('orders', signature('s', later))}"
    found = parse_header(repeated, f"{DATE},{later}")
    assert found is not None
    assert find_signer(found, [Signer(b"s")]) == 0


@pytest.mark.parametrize(
    "second",
    [
        header("billing", signature("s")),
        header("", signature("s")),
        f"Bearer tmk_{'a' * 16}_{'b' * 43}",
        "bearer x",
    ],
)
def test_two_headers_with_different_credentials_are_refused(second: str) -> None:
    repeated = f"{header('orders', signature('s'))}, {second}"
    with pytest.raises(Unauthorized, match="send one"):
        parse_header(repeated, DATE)


@pytest.mark.parametrize(
    ("authorization", "date"),
    [
        (header("orders", signature("s")), ""),
        (header("orders", signature("s")), "x" * 65),
        (header("orders", signature("s")[1:]), DATE),
        (header("orders", "g" * 40), DATE),
        (header("orders", " " * 40), DATE),
        (header("orders", ""), DATE),
        (header("o" * 4_096, signature("s")), DATE),
    ],
)
def test_malformed_headers_are_refused(authorization: str, date: str) -> None:
    with pytest.raises(Unauthorized):
        parse_header(authorization, date)


@pytest.mark.parametrize("size", [1, 16, 43, 63, 64, 65, 128])
def test_a_signer_computes_the_hmac(size: int) -> None:
    secret = bytes(range(size))
    for text in (b"", b"20261129T140552Z", bytes(1_000)):
        assert Signer(secret).sign(text) == hmac.digest(secret, text, "sha1")


@given(st.text(alphabet="MQv2-HMAC Credential=orders/,SignatureHed x0123af", max_size=120))
def test_the_usual_form_and_the_lenient_one_read_the_same(text: str) -> None:
    for authorization in (text, f"MQv2-HMAC-SHA1 Credential={text}, Signature={'0' * 40}"):
        usual = signatures._USUAL.fullmatch(authorization)
        if usual is not None:
            assert usual.groups() == signatures._parse_any(authorization)


def test_the_form_of_each_client_is_a_usual_one() -> None:
    for key in ("orders", "orders//Rocketmq", "orders/eu-central/RocketMQ", "a.b_c@d-e"):
        assert signatures._USUAL.fullmatch(header(key, "0" * 40)), key
