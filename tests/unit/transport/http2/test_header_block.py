"""Header blocks: the check before the decoder, Huffman padding, limits, and invalid requests."""

from __future__ import annotations

import contextlib
import re
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jh2._hazmat import Encoder

from tests.support.clients import http2_peer as peer
from tidemill.transport.http2 import header_block
from tidemill.transport.http2.frames import ConnectionFailure, ErrorCode
from tidemill.transport.http2.header_block import HeaderDecoder, MalformedHeaders
from tidemill.transport.http2.limits import Limit

LIST_BYTES_MAX = 32_768


def decode(block: bytes) -> list[tuple[str, str, bool]]:
    return HeaderDecoder(LIST_BYTES_MAX).decode(block)


def fields_of(block: bytes) -> list[tuple[str, str]]:
    return [(name, value) for name, value, _ in decode(block)]


def code_of(block: bytes) -> ErrorCode:
    with pytest.raises(ConnectionFailure) as failure:
        decode(block)
    return failure.value.code


# ---------------------------------------------------------------- what is good


def test_examples_of_the_specification_are_decoded() -> None:
    """RFC 7541 C.3 and C.4: requests on one connection, without and with Huffman code."""
    plain = HeaderDecoder(LIST_BYTES_MAX)
    coded = HeaderDecoder(LIST_BYTES_MAX)
    for block, huffman, expected in (
        (
            "828684410f7777772e6578616d706c652e636f6d",
            "828684418cf1e3c2e5f23a6ba0ab90f4ff",
            [":method GET", ":scheme http", ":path /", ":authority www.example.com"],
        ),
        (
            "828684be58086e6f2d6361636865",
            "828684be5886a8eb10649cbf",
            [
                ":method GET",
                ":scheme http",
                ":path /",
                ":authority www.example.com",
                "cache-control no-cache",
            ],
        ),
        (
            "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
            "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
            [
                ":method GET",
                ":scheme https",
                ":path /index.html",
                ":authority www.example.com",
                "custom-key custom-value",
            ],
        ),
    ):
        for decoder, raw in ((plain, block), (coded, huffman)):
            found = decoder.decode(bytes.fromhex(raw))
            assert [f"{name} {value}" for name, value, _ in found] == expected


def test_encoded_fields_decode_at_every_length_of_a_length() -> None:
    for size in (0, 1, 126, 127, 128, 254, 255, 256, 16_000):
        fields = [("x-name", "v" * size), ("n" * max(size, 1), "")]
        assert fields_of(header_block.encode(fields)) == fields
        assert header_block.encode(fields) == peer.block(fields)


def test_blocks_of_another_encoder_decode_however_it_uses_its_table() -> None:
    random = Random(7)
    encoder, decoder = Encoder(), HeaderDecoder(LIST_BYTES_MAX)
    names = [f"x-{n}" for n in range(40)]
    for _ in range(200):
        fields = [
            (random.choice(names), "".join(random.choices("abcé 019~!", k=random.randint(0, 30))))
            for _ in range(random.randint(0, 12))
        ]
        raw = [(name.encode(), value.encode(), random.random() < 0.1) for name, value in fields]
        block = encoder.encode(raw, random.random() < 0.7)
        assert [(name, value) for name, value, _ in decoder.decode(block)] == fields


# ---------------------------------------------------------------- what is broken


@pytest.mark.parametrize(
    "block",
    [
        pytest.param("00", id="a literal that ends after its first byte"),
        pytest.param("0001", id="a name that is not there"),
        pytest.param("000161", id="a value that is not there"),
        pytest.param("0001610261", id="a value that is too short"),
        pytest.param("00ff80808080808080808001", id="a length that never ends"),
        pytest.param("007fffffffff0f", id="a length beyond every block"),
        pytest.param("007fffffffffff", id="a length that the block ends"),
        pytest.param("80", id="index 0"),
        pytest.param("be", id="an index of an empty table"),
        pytest.param("ffffffffff0f", id="an index beyond every table"),
        pytest.param("0f", id="a name's index that is not complete"),
        pytest.param("7fffffffff0f0161", id="a name's index beyond every table"),
        pytest.param("3fe21f", id="a table that is too large"),
        pytest.param("8220", id="a table size after a field"),
        pytest.param("3f", id="a table size that is not complete"),
        pytest.param("000161 0181 00".replace(" ", ""), id="a field after a broken one"),
        pytest.param("000161 81 ff".replace(" ", ""), id="a string of padding only"),
        pytest.param("000161 82 1fff".replace(" ", ""), id="padding of more than 7 bits"),
        pytest.param("000161 81 18".replace(" ", ""), id="padding with zeros"),
        pytest.param("000161 84 ffffffff".replace(" ", ""), id="the end of string in a string"),
    ],
)
def test_a_broken_block_ends_the_connection(block: str) -> None:
    assert code_of(bytes.fromhex(block)) is ErrorCode.COMPRESSION_ERROR


def test_huffman_code_is_accepted_with_valid_padding_only() -> None:
    for size in range(1, 40):
        block = Encoder().encode([(b"x", b"a" * size, True)], True)  # 5 bits each: 00011
        assert decode(block)[0][1] == "a" * size
        if -5 * size % 8:  # Its last bit is padding; the bits before it are not a valid code.
            assert code_of(block[:-1] + bytes((block[-1] & 0xFE,))) is ErrorCode.COMPRESSION_ERROR


def test_no_bytes_make_the_decoder_end_the_thread() -> None:
    """The Rust decoder reads beyond the end of some blocks; the check rejects them first."""
    random = Random(11)
    good = peer.block((*peer.GRPC_REQUEST, ("x-long", "v" * 300)))
    coded = Encoder().encode([(b"x-coded", b"some text", False), (b":path", b"/a", False)], True)
    for _ in range(20_000):
        block = bytearray(random.choice((good, coded, coded * 3, random.randbytes(12))))
        for _ in range(random.randint(0, 3)):
            block[random.randrange(len(block))] = random.choice(
                (0, 0x7F, 0x80, 0xFF, random.randrange(256))
            )
        with contextlib.suppress(ConnectionFailure):
            decode(bytes(block[: random.randint(0, len(block))]))


# ---------------------------------------------------------------- limits


def test_a_long_list_from_a_small_block_is_rejected_by_its_limit() -> None:
    """A bomb: one large field in the table, and its index of one byte many times."""
    block = b"\x40\x01a" + peer._length(4_000) + b"v" * 4_000 + b"\xbe" * 9
    with pytest.raises(ConnectionFailure) as failure:
        decode(block)
    assert failure.value.code is ErrorCode.ENHANCE_YOUR_CALM
    assert failure.value.limit is Limit.HEADER_BYTES


def test_valid_names_are_cached_up_to_a_limit() -> None:
    for n in range(3_000):
        header_block.check_trailers([(f"x-{n}", "", False)])
    assert len(header_block._valid_names) <= header_block._CACHED_MAX


# ---------------------------------------------------------------- requests, responses, trailers


def check(*fields: tuple[str, str]) -> dict[str, str]:
    return header_block.check_request([(name, value, False) for name, value in fields])


def test_a_request_has_its_pseudo_fields_first() -> None:
    assert check(*peer.GRPC_REQUEST, ("x-twice", "1"), ("x-twice", "2")) == {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/test.Service/Method",
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
        "x-twice": "1,2",
    }


GET = ((":method", "GET"), (":scheme", "http"), (":path", "/"))


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(GET[1:], id="no method"),
        pytest.param(GET[:2], id="no path"),
        pytest.param((*GET[:2], (":path", "")), id="an empty path"),
        pytest.param((GET[0], GET[2]), id="no scheme"),
        pytest.param((*GET, GET[0]), id="a pseudo-field twice"),
        pytest.param((*GET, (":status", "200")), id="a response's pseudo-field"),
        pytest.param((*GET, (":what", "")), id="an unknown pseudo-field"),
        pytest.param((*GET[:2], ("a", ""), GET[2]), id="a pseudo-field after others"),
        pytest.param((*GET, ("Upper", "")), id="upper case"),
        pytest.param((*GET, ("", "")), id="no name"),
        pytest.param((*GET, ("a b", "")), id="a space in a name"),
        pytest.param((*GET, ("é", "")), id="a letter that is not ASCII"),
        pytest.param((*GET, ("connection", "close")), id="a field of HTTP/1.1"),
        pytest.param((*GET, ("transfer-encoding", "chunked")), id="chunks"),
        pytest.param((*GET, ("te", "gzip")), id="te that is not trailers"),
        pytest.param((*GET, ("a", "line\nfeed")), id="a line feed"),
        pytest.param((*GET, ("a", "\0")), id="a zero"),
        pytest.param((*GET[:2], (":path", "/\r")), id="a carriage return in the path"),
    ],
)
def test_an_invalid_request_is_malformed(fields: tuple[tuple[str, str], ...]) -> None:
    with pytest.raises(MalformedHeaders):
        check(*fields)


NAMES = [":method", ":scheme", ":path", ":authority", "te", "a", "b", "connection", "Upper"]
VALUES = ["POST", "/", "", "trailers", "a\nb", "é"]


@given(
    requests=st.lists(
        st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES), st.just(False))),
        max_size=8,
    )
)
def test_a_request_with_known_names_is_decoded_as_any_other(
    requests: list[header_block.DecodedFields],
) -> None:
    usual = [(name, "/", False) for name in NAMES[:3]]
    for decoded in ([*usual, *more] for more in (*requests, *requests)):
        known = header_block.known_request(decoded)
        try:
            checked = header_block.check_request(decoded)
        except MalformedHeaders:
            assert known is None
        else:
            assert known in (None, (checked, header_block.list_bytes(decoded)))
            is_easy = len({name for name, _, _ in decoded}) == len(decoded)
            assert (header_block.known_request(decoded) is not None) == is_easy


def test_names_of_requests_are_cached_up_to_a_limit() -> None:
    for n in range(1_000):
        check(*GET, (f"x-{n}", ""))
    check(*GET, ("x" * 4_096, ""))
    assert len(header_block._known_names) <= header_block._KNOWN_NAMES_MAX
    assert max(header_block._known_names.values()) < 4_096


def test_a_response_has_its_status_first_and_no_other_pseudo_field() -> None:
    response = [(":status", "200", False), ("a", "1", False), ("a", "2", False)]
    assert header_block.check_response(response) == {":status": "200", "a": "1,2"}
    for broken in ([*response, response[0]], [(":path", "/", False)], [("A", "", False)]):
        with pytest.raises(MalformedHeaders):
            header_block.check_response(broken)


def test_trailers_have_no_pseudo_fields() -> None:
    assert header_block.check_trailers([("a", "1", False)]) == {"a": "1"}
    with pytest.raises(MalformedHeaders):
        header_block.check_trailers([(":path", "/", False)])


@pytest.mark.parametrize("text", ["-5", "+5", "1_0", " 5", "", "5,5", "٣", "9" * 5_000])
def test_content_length_is_a_number_and_nothing_else(text: str) -> None:
    with pytest.raises(MalformedHeaders, match=re.escape("content-length is not one number")):
        header_block.content_length({"content-length": text})
    assert header_block.content_length({"content-length": "05"}) == 5
    assert header_block.content_length({}) == -1
