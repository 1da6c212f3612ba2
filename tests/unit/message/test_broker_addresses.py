"""Valid and invalid addresses of brokers."""

from __future__ import annotations

import pytest

from tidemill.common.errors import BadRequest
from tidemill.message.broker_names import check_address, is_loopback_address


@pytest.mark.parametrize(
    "address",
    [
        "h:1",
        "localhost:10911",
        "broker-0.brokers.ns.svc.cluster.local.:65535",
        "compose_broker_1:10911",
        "127.0.0.1:1",
        "[::1]:10911",
        "x" * 63 + ":1",
    ],
)
def test_a_valid_address_is_accepted(address: str) -> None:
    check_address(address)


@pytest.mark.parametrize(
    "address",
    ["localhost:1", "LOCALHOST.:1", "a.localhost:1", "127.0.0.1:1", "127.9.9.9:1", "[::1]:1"],
)
def test_an_address_of_each_machine_itself_is_loopback(address: str) -> None:
    assert is_loopback_address(address)


@pytest.mark.parametrize("address", ["h:1", "localhost.example:1", "10.0.0.1:1", "[fd00::1]:1"])
def test_an_address_of_one_machine_is_not_loopback(address: str) -> None:
    assert not is_loopback_address(address)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "h",
        ":1",
        "h:",
        "h:0",
        "h:65536",
        "h:99999",
        "h:1a",
        "h:+1",
        "h:\u0661",
        "x" * 64 + ":1",
        "..:1",
        "a..b:1",
        ".a:1",
        "a b:1",
        "http://h:1",
        "h\u00e4:1",
        "h\n:1",
        ".".join(["x" * 60] * 5) + ":1",
    ],
)
def test_an_invalid_address_is_rejected(address: str) -> None:
    with pytest.raises(BadRequest):
        check_address(address)
