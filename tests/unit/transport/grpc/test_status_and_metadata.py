"""Values in header fields: statuses, timeouts, bytes."""

from __future__ import annotations

import pytest

from tests.support.clients import http2_peer as peer
from tidemill.transport.grpc import metadata, status
from tidemill.transport.grpc.status import RpcCode, RpcError
from tidemill.transport.http2.frames import ErrorCode


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1H", 3600), ("2M", 120), ("3S", 3), ("4m", 0.004), ("5u", 5e-6), ("6n", 6e-9), ("0n", 0)],
)
def test_a_timeout_is_a_number_and_a_unit(text: str, seconds: float) -> None:
    assert metadata.parse_timeout(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "1", "S", "123456789S", "-1S", "+1S", "1s", "1 S", "٣S", "1S\n", "1.5S"]
)
def test_an_invalid_timeout_is_rejected(text: str) -> None:
    with pytest.raises(RpcError) as refused:
        metadata.parse_timeout(text)
    assert refused.value.code is RpcCode.INTERNAL


@pytest.mark.parametrize(
    "message", ["", "plain", "100 %", "grün 🌊", "tab\there\r\n", "~ !", "%41"]
)
def test_a_status_message_survives_encoding(message: str) -> None:
    encoded = status.encode_message(message)
    assert encoded.isascii()
    assert encoded.isprintable()
    assert status.decode_message(encoded) == message


def test_a_badly_encoded_status_message_stays_as_it_is() -> None:
    assert status.decode_message("100% %4 %zz %41") == "100% %4 %zz A"
    assert status.decode_message("%ff") == "\N{REPLACEMENT CHARACTER}"
    assert status.encode_message("\ud800") == "?"


@pytest.mark.parametrize("character", ["a", "é", "淘", "🌊", "%"])
def test_a_status_message_is_cut_so_that_clients_accept_its_trailers(character: str) -> None:
    """Clients reject header lists of 8 KiB, and a character may need twelve bytes."""
    encoded = status.encode_message(character * 5_000)
    assert len(encoded) <= 4_096
    decoded = status.decode_message(encoded)
    assert set(decoded) == {character}
    assert len(decoded) > 300


def test_trailers_of_ok_have_no_message_and_others_have_one() -> None:
    assert peer.fields_of(status.encode_trailers(RpcCode.OK, "ignored")) == {"grpc-status": "0"}
    assert peer.fields_of(status.encode_trailers(RpcCode.NOT_FOUND, "no é")) == {
        "grpc-status": "5",
        "grpc-message": "no %C3%A9",
    }
    assert peer.fields_of(status.encode_trailers_only(RpcCode.INTERNAL, "")) == {
        ":status": "200",
        "content-type": "application/grpc",
        "grpc-status": "13",
        "grpc-message": "",
    }


def test_numbers_of_statuses_and_resets_are_known_or_unknown() -> None:
    assert [status.code_of(str(code.value)) for code in RpcCode] == list(RpcCode)
    assert {status.code_of(text) for text in ("17", "-1", "", "x")} == {RpcCode.UNKNOWN}
    assert status.code_of_reset(ErrorCode.REFUSED_STREAM) is RpcCode.UNAVAILABLE
    assert status.code_of_reset(ErrorCode.CANCEL) is RpcCode.CANCELLED
    assert status.code_of_reset(ErrorCode.NO_ERROR) is RpcCode.INTERNAL
    assert status.code_of_reset(0xFFFF) is RpcCode.INTERNAL
