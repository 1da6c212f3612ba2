"""Messages in the content of a stream: split at any byte, validly and invalidly compressed."""

from __future__ import annotations

import gzip
import zlib
from itertools import pairwise
from random import Random

import pytest

from tests.support.clients.http2_peer import grpc_message, pieces
from tidemill.transport.grpc import messages
from tidemill.transport.grpc.messages import CompleteMessage, MessageAssembler
from tidemill.transport.grpc.status import RpcCode, RpcError

MESSAGE_BYTES_MAX = 100_000


def reader(encoding: str = "") -> MessageAssembler:
    return MessageAssembler(encoding, MESSAGE_BYTES_MAX)


def fed(taken: MessageAssembler, piece: bytes) -> list[bytes]:
    return [whole.message for whole in taken.feed(piece)]


def refusal(raw: bytes, encoding: str = "gzip") -> RpcCode:
    with pytest.raises(RpcError) as refused:
        reader(encoding).feed(raw)
    return refused.value.code


def test_messages_do_not_depend_on_the_cuts() -> None:
    sent = [b"", b"a", b"bc" * 1_000, bytes(50_000), b"", b"last"]
    raw = b"".join(map(grpc_message, sent))
    assert messages.encode_all(sent) == raw == b"".join(map(messages.encode, sent))
    for seed in range(20):
        taken, received = reader(), []
        for piece in pieces(raw, Random(seed), size_max=2_000):
            received += fed(taken, piece)
        assert received == sent
        assert taken.is_empty


def test_an_assembler_knows_the_number_of_missing_bytes() -> None:
    taken = reader()
    assert (taken.is_empty, taken.missing_bytes) == (True, 5)
    taken.feed(grpc_message(bytes(1_000))[:3])
    assert (taken.is_empty, taken.missing_bytes) == (False, 2)
    taken.feed(grpc_message(bytes(1_000))[3:10])
    assert taken.missing_bytes == 995
    assert fed(taken, bytes(995) + b"\0") == [bytes(1_000)]
    assert (taken.is_empty, taken.missing_bytes) == (False, 4)


def test_small_pieces_cost_little_more_than_their_bytes() -> None:
    """A piece of two bytes once cost 44: an object and an entry of a list."""
    taken = reader()
    taken.feed(grpc_message(b"", length=60_000))
    for _ in range(25_000):
        taken.feed(b"ab")
    assert len(taken._parts) < 30
    assert fed(taken, b"ab" * 5_000) == [b"ab" * 30_000]


def test_the_fast_path_needs_exactly_one_message() -> None:
    raw = grpc_message(b"whole")
    assert messages.whole_message(raw) == b"whole"
    assert messages.whole_message(grpc_message(b"")) == b""
    for other in (b"", raw[:4], raw[:-1], raw + b"x", grpc_message(b"whole", compressed=1)):
        assert messages.whole_message(other) is None


def test_a_message_over_the_limit_is_rejected_by_its_length() -> None:
    assert refusal(grpc_message(b"", length=MESSAGE_BYTES_MAX + 1)) is RpcCode.RESOURCE_EXHAUSTED
    assert fed(reader(), grpc_message(bytes(MESSAGE_BYTES_MAX))) == [bytes(MESSAGE_BYTES_MAX)]


# ---------------------------------------------------------------- compression


def test_a_compressed_message_is_decompressed() -> None:
    raw = grpc_message(gzip.compress(b"text" * 100), compressed=1) + grpc_message(b"plain")
    packed = gzip.compress(b"text" * 100)
    assert reader("gzip").feed(raw) == [
        CompleteMessage(b"text" * 100, 5 + len(packed), is_inflated=True),
        CompleteMessage(b"plain", 10, is_inflated=False),
    ]


def test_a_message_may_grow_to_the_limit_and_no_further() -> None:
    exact = gzip.compress(bytes(MESSAGE_BYTES_MAX))
    assert fed(reader("gzip"), grpc_message(exact, compressed=1)) == [bytes(MESSAGE_BYTES_MAX)]
    bomb = gzip.compress(bytes(MESSAGE_BYTES_MAX + 1))
    assert refusal(grpc_message(bomb, compressed=1)) is RpcCode.RESOURCE_EXHAUSTED


def test_a_message_of_any_size_does_not_inflate_beyond_its_limit() -> None:
    """The windows of a connection do not limit the inflated size."""
    taken = MessageAssembler("gzip", 130 << 20)
    bomb = gzip.compress(bytes(messages.INFLATED_BYTES_MAX + 1))
    with pytest.raises(RpcError, match="inflated") as refused:
        taken.feed(grpc_message(bomb, compressed=1))
    assert refused.value.code is RpcCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    "packed",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"text", id="no gzip"),
        pytest.param(zlib.compress(b"text"), id="zlib"),
        pytest.param(gzip.compress(b"text")[:-1], id="cut"),
        pytest.param(gzip.compress(b"text")[:-8] + bytes(8), id="a wrong checksum"),
    ],
)
def test_a_message_that_is_not_gzip_is_rejected(packed: bytes) -> None:
    assert refusal(grpc_message(packed, compressed=1)) is RpcCode.INTERNAL


def test_a_compressed_message_needs_a_known_encoding_and_a_flag_of_0_or_1() -> None:
    packed = gzip.compress(b"text")
    for encoding in ("", "identity"):
        assert refusal(grpc_message(packed, compressed=1), encoding) is RpcCode.INTERNAL
    assert refusal(grpc_message(packed, compressed=2)) is RpcCode.INTERNAL


def test_a_message_stays_whole_at_every_single_cut() -> None:
    raw = grpc_message(b"one") + grpc_message(gzip.compress(b"two"), compressed=1)
    for first, second in pairwise((0, *range(1, len(raw)), len(raw))):
        taken = reader("gzip")
        received = [
            one
            for part in (raw[:first], raw[first:second], raw[second:])
            for one in fed(taken, part)
        ]
        assert received == [b"one", b"two"]
