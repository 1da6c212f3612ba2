"""The headers of signed calls, as the clients send them."""

from __future__ import annotations

import hashlib
import hmac

import pytest

from tidemill.common.errors import Unauthorized
from tidemill.security.signatures import find_secret, parse_header

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
    assert find_secret(found, [b"another one", b"a secret of mine"]) == 1
    assert find_secret(found, [b"another one"]) is None


def test_an_empty_access_key_is_no_credential() -> None:
    """The Python client always sends the header."""
    assert parse_header(header("", signature("")), DATE) is None
    assert parse_header("", "") is None


def test_the_last_of_repeated_headers_counts() -> None:
    """The Go client adds all headers again for each repeated send."""
    later = "20261129T140601Z"
    repeated = f"{header('orders', signature('s'))},{header('orders', signature('s', later))}"
    found = parse_header(repeated, f"{DATE},{later}")
    assert found is not None
    assert find_secret(found, [b"s"]) == 0


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
