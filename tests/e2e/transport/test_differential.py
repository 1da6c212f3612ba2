"""The same calls, as bytes, to our server and to one of grpcio; their outcomes must be the same.

A seed chooses the calls and the cuts of their bytes. `DIFFERENCES` lists the known differences with
their reasons.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import pytest

from tests.support.clients import http2_peer as peer
from tests.support.clients.binary_fields import encode_binary
from tests.support.clients.grpcio_server import grpcio_server
from tests.support.clients.http2_peer import grpc_message
from tests.support.clients.rpc_server import SERVICE, RawClient, request_to, rpc_server
from tests.support.seeds import seed_base
from tidemill.transport.grpc.messages import PREFIX_SIZE
from tidemill.transport.http2 import frames

pytestmark = [pytest.mark.heavy, pytest.mark.hostile]

SEED = seed_base()
RUNS = 4  # of each kind of call
MESSAGE_BYTES_MAX = 1 << 20
# Fields without information about the call; grpcio lists its encodings in them.
IGNORED = {"content-type", "grpc-accept-encoding", "accept-encoding", "date", "server"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a call at its client."""

    http_status: str | None
    messages: tuple[bytes, ...]
    status: str  # grpc-status; `reset` or `closed` if there was none
    has_message: bool
    trailers: tuple[tuple[str, str], ...] = ()


Script = list[bytes]  # frames, with a possible pause between them


# ---------------------------------------------------------------- the calls


def script(
    random: Random, fields: peer.Fields, content: bytes | None, *, is_ended: bool = True
) -> Script:
    """Return the frames of a call with this content, cut at random places."""
    if content is None:
        return [peer.headers(1, fields, is_last=is_ended)]
    frame_bytes = random.choice((100, 3_000, frames.DEFAULT_FRAME_BYTES))
    parts = [
        piece[at : at + frames.DEFAULT_FRAME_BYTES]
        for piece in peer.pieces(content, random, frame_bytes)
        for at in range(0, len(piece), frames.DEFAULT_FRAME_BYTES)
    ]
    ends_apart = not parts or random.random() < 0.3
    sent = [peer.headers(1, fields)]
    for index, part in enumerate(parts, 1):
        is_last = is_ended and index == len(parts) and not ends_apart
        sent.append(peer.data(1, part, is_last=is_last))
    if is_ended and ends_apart:
        sent.append(peer.data(1, is_last=True))
    return sent


def some_bytes(random: Random) -> bytes:
    return random.randbytes(random.choice((0, 1, 10, 1_000, random.randint(0, 20_000))))


def unary(random: Random) -> Script:
    return script(random, request_to("Echo"), grpc_message(some_bytes(random)))


def batch(random: Random) -> Script:
    return script(random, request_to("Batch"), grpc_message(random.randbytes(500)))


def exchange(random: Random) -> Script:
    content = b"".join(grpc_message(random.randbytes(900)) for _ in range(random.randint(0, 9)))
    return script(random, request_to("Exchange"), content)


def a_status(random: Random) -> Script:
    text = random.choice(("", "plain", "100 % grün", "🌊 wave", "tab\tand\nline", "a" * 1_000))
    request = f"{random.randint(0, 16)} {text}".encode()
    return script(random, request_to("Fail"), grpc_message(request))


def a_handler_that_raises(random: Random) -> Script:
    return script(random, request_to("Raise"), grpc_message(b"secret"))


def an_unknown_method(random: Random) -> Script:
    path = random.choice((f"/{SERVICE}/Nothing", "/no.Service/Echo", f"/{SERVICE}/echo", "/", "/a"))
    fields = tuple((n, path if n == ":path" else v) for n, v in peer.GRPC_REQUEST)
    return script(random, fields, grpc_message(b"x"))


def no_message(random: Random) -> Script:
    return script(random, request_to("Echo"), random.choice((None, b"")))


def no_messages_of_a_stream(random: Random) -> Script:
    return script(random, request_to("Exchange"), random.choice((None, b"")))


def two_messages(random: Random) -> Script:
    return script(random, request_to("Echo"), grpc_message(b"one") + grpc_message(b"two"))


def too_large(random: Random) -> Script:
    content = grpc_message(b"begun", length=MESSAGE_BYTES_MAX + random.randint(1, 1 << 30))
    return script(random, request_to("Echo"), content, is_ended=random.random() < 0.5)


def compressed(random: Random) -> Script:
    content = grpc_message(gzip.compress(some_bytes(random)), compressed=1)
    return script(random, request_to("Echo", ("grpc-encoding", "gzip")), content)


def not_compressed_though_it_might_be(random: Random) -> Script:
    encoding = random.choice(("gzip", "identity"))
    return script(random, request_to("Echo", ("grpc-encoding", encoding)), grpc_message(b"plain"))


def a_bomb(random: Random) -> Script:
    content = grpc_message(gzip.compress(bytes(MESSAGE_BYTES_MAX + 1)), compressed=1)
    return script(random, request_to("Echo", ("grpc-encoding", "gzip")), content)


def compressed_badly(random: Random) -> Script:
    content = grpc_message(random.choice((b"no gzip", gzip.compress(b"cut")[:-9])), compressed=1)
    return script(random, request_to("Echo", ("grpc-encoding", "gzip")), content)


def compressed_without_a_name(random: Random) -> Script:
    content = grpc_message(gzip.compress(b"text"), compressed=1)
    return script(random, request_to("Echo"), content)


def an_unknown_encoding(random: Random) -> Script:
    fields = request_to("Echo", ("grpc-encoding", "snappy"))
    return script(random, fields, grpc_message(b"text", compressed=random.randint(0, 1)))


def a_strange_flag(random: Random) -> Script:
    content = grpc_message(b"text", compressed=random.randint(2, 255))
    return script(random, request_to("Echo"), content)


def a_message_that_is_cut(random: Random) -> Script:
    whole = grpc_message(b"a message")
    return script(random, request_to("Echo"), whole[: random.randint(1, len(whole) - 1)])


def a_later_message_that_is_cut(random: Random) -> Script:
    whole = grpc_message(b"one") + grpc_message(b"two")
    return script(random, request_to("Batch"), whole[: random.randint(9, len(whole) - 1)])


def a_deadline_in_time(random: Random) -> Script:
    timeout = random.choice(("1H", "2M", "30S", "99999999m", "99999999u"))
    fields = request_to("Echo", ("grpc-timeout", timeout))
    return script(random, fields, grpc_message(b"in time"))


def a_deadline_that_passes(random: Random) -> Script:
    fields = request_to("Hang", ("grpc-timeout", random.choice(("50m", "90000u", "99999999n"))))
    return script(random, fields, grpc_message(b"hangs"))


def a_deadline_that_has_passed(random: Random) -> Script:
    fields = request_to("Hang", ("grpc-timeout", random.choice(("0n", "1n", "0S", "1u"))))
    return script(random, fields, grpc_message(b"late"))


def a_malformed_deadline(random: Random) -> Script:
    timeout = random.choice(("", "S", "1", "1x", "-1S", "1.5S"))
    return script(random, request_to("Echo", ("grpc-timeout", timeout)), grpc_message(b"x"))


def a_timeout_of_many_digits(random: Random) -> Script:
    fields = request_to("Echo", ("grpc-timeout", f"{random.randint(10**8, 10**12)}S"))
    return script(random, fields, grpc_message(b"x"))


def metadata(random: Random) -> Script:
    name = random.choice(("x-text", "x-data-bin"))
    values = ("some text", "~!@#$") if name == "x-text" else (encode_binary(random.randbytes(20)),)
    sent = [(name, value) for value in random.sample(values, random.randint(1, len(values)))]
    return script(random, request_to("Meta", *sent), grpc_message(name.encode()))


def binary_metadata_with_padding(random: Random) -> Script:
    text = encode_binary(random.randbytes(random.randint(0, 9)))
    sent = ("x-data-bin", text + "=" * (-len(text) % 4))
    return script(random, request_to("Meta", sent), grpc_message(b"x-data-bin"))


def binary_metadata_twice(random: Random) -> Script:
    sent = [("x-data-bin", encode_binary(random.randbytes(9))) for _ in range(2)]
    return script(random, request_to("Meta", *sent), grpc_message(b"x-data-bin"))


def a_content_type_of_grpc(random: Random) -> Script:
    content_type = random.choice(("application/grpc", "application/grpc+proto"))
    fields = dict(request_to("Echo")) | {"content-type": content_type}
    return script(random, tuple(fields.items()), grpc_message(b"x"))


def another_content_type(random: Random) -> Script:
    fields = dict(request_to("Echo")) | {"content-type": random.choice(("application/json", "a"))}
    return script(random, tuple(fields.items()), grpc_message(b"x"))


def another_method(random: Random) -> Script:
    fields = dict(request_to("Echo")) | {":method": random.choice(("GET", "PUT", "HEAD"))}
    return script(random, tuple(fields.items()), random.choice((None, grpc_message(b"x"))))


def no_te(random: Random) -> Script:
    fields = [field for field in request_to("Echo") if field[0] != "te"]
    return script(random, fields, grpc_message(b"x"))


def a_malformed_request(random: Random) -> Script:
    fields = request_to("Echo", random.choice((("Upper", "x"), ("connection", "close"))))
    return script(random, fields, grpc_message(b"x"))


def cancelled(random: Random) -> Script:
    sent = script(random, request_to("Hang"), grpc_message(b"hangs"))
    return [*sent, peer.rst_stream(1)]


KINDS: tuple[Callable[[Random], Script], ...] = (
    unary,
    batch,
    exchange,
    a_status,
    a_handler_that_raises,
    an_unknown_method,
    no_message,
    no_messages_of_a_stream,
    two_messages,
    too_large,
    compressed,
    not_compressed_though_it_might_be,
    a_bomb,
    compressed_badly,
    compressed_without_a_name,
    an_unknown_encoding,
    a_strange_flag,
    a_message_that_is_cut,
    a_later_message_that_is_cut,
    a_deadline_in_time,
    a_deadline_that_passes,
    a_deadline_that_has_passed,
    a_malformed_deadline,
    a_timeout_of_many_digits,
    metadata,
    binary_metadata_with_padding,
    binary_metadata_twice,
    a_content_type_of_grpc,
    another_content_type,
    another_method,
    no_te,
    a_malformed_request,
)


@dataclass(frozen=True, slots=True)
class Difference:
    """Our result if grpcio has another one, and the reason."""

    http_status: str | None
    status: str
    reason: str
    does_grpcio_answer: bool = True


_NEVER_ANSWERED = "grpcio does not answer and holds the call until the client gives up"
DIFFERENCES: dict[Callable[[Random], Script], Difference] = {
    no_message: Difference("200", "13", _NEVER_ANSWERED, does_grpcio_answer=False),
    a_message_that_is_cut: Difference("200", "13", _NEVER_ANSWERED, does_grpcio_answer=False),
    a_strange_flag: Difference(
        "200",
        "13",
        "the flag must be 0 or 1; grpcio accepts other values or does not answer",
        does_grpcio_answer=False,
    ),
    two_messages: Difference(
        "200", "13", "a unary call has one request; grpcio silently drops the others"
    ),
    a_later_message_that_is_cut: Difference(
        "200", "13", "a cut request is incomplete; grpcio serves the messages before the cut"
    ),
    an_unknown_encoding: Difference(
        "200", "12", "the specification requires UNIMPLEMENTED; grpcio returns INTERNAL"
    ),
    a_timeout_of_many_digits: Difference(
        "200", "13", "the specification allows 8 digits; grpcio accepts more"
    ),
    another_content_type: Difference(
        "415", "none", "the specification requires 415; grpcio serves any type"
    ),
    another_method: Difference(
        "405", "none", "people with a browser get a sentence; grpcio resets or returns INTERNAL"
    ),
    no_te: Difference(
        "200", "0", "te shows that no proxy drops trailers; a missing te is harmless"
    ),
    a_malformed_request: Difference(
        None, "reset", "RFC 9113 requires a reset (section 8.1.1); grpcio serves it"
    ),
}


# ---------------------------------------------------------------- both servers


@pytest.fixture(scope="module")
def ports() -> Iterator[tuple[int, int]]:
    """Return the addresses of our server and of grpcio's."""
    with (
        rpc_server(message_bytes_max=MESSAGE_BYTES_MAX) as ours,
        grpcio_server(MESSAGE_BYTES_MAX) as theirs,
    ):
        yield ours.port, theirs


@pytest.mark.parametrize(
    "kind", [one for one in KINDS if one not in DIFFERENCES], ids=lambda kind: kind.__name__
)
def test_a_call_has_the_same_outcome_on_both_servers(
    kind: Callable[[Random], Script], ports: tuple[int, int]
) -> None:
    for run in range(RUNS):
        seed = f"{SEED} {kind.__name__} {run}"
        ours, theirs = (outcome(port, kind(Random(seed)), Random(seed)) for port in ports)
        assert ours == theirs, f"seed {seed!r}"


@pytest.mark.parametrize("kind", DIFFERENCES, ids=lambda kind: kind.__name__)
def test_a_call_with_a_known_difference_has_the_intended_outcome(
    kind: Callable[[Random], Script], ports: tuple[int, int]
) -> None:
    meant = DIFFERENCES[kind]
    ours_port, their_port = ports
    for run in range(RUNS):
        seed = f"{SEED} {kind.__name__} {run}"
        ours = outcome(ours_port, kind(Random(seed)), Random(seed))
        assert (ours.http_status, ours.status) == (meant.http_status, meant.status), (
            f"seed {seed!r}"
        )
        if meant.does_grpcio_answer:
            assert ours != outcome(their_port, kind(Random(seed)), Random(seed)), f"seed {seed!r}"


def test_a_cancelled_call_leaves_the_connection_to_others(ports: tuple[int, int]) -> None:
    for run in range(RUNS):
        random = Random(f"{SEED} cancelled {run}")
        for port in ports:
            with RawClient(port) as client:
                send(client, cancelled(random), random)
                assert client.call(3) == grpc_message(b"hello")
                assert not any(map(ends_the_call, client.frames))


def send(client: RawClient, sent: Script, random: Random) -> None:
    """Send frames in pieces; sometimes wait until the server has read all earlier ones."""
    for one in sent:
        if random.random() < 0.1:
            client.pong()
        for piece in peer.pieces(one, random, size_max=1_000):
            client.send_if_open(piece)


def outcome(port: int, sent: Script, random: Random) -> Outcome:
    with RawClient(port) as client:
        send(client, sent, random)
        while not client.is_ended and not any(map(ends_the_call, client.frames)):
            client.read()
        found = [one for one in client.frames if one.stream_id == 1]
    fields: dict[str, str] = {}
    for one in peer.of(frames.HEADERS, found):
        fields |= peer.fields_of(one.payload)
    status = fields.pop("grpc-status", None)
    if status is None:
        # After a whole response, a reset only means that the remaining request is not read.
        is_reset = any(
            one.kind == frames.RST_STREAM and one.number != frames.ErrorCode.NO_ERROR
            for one in found
        )
        status = "reset" if is_reset else "none" if found else "closed"
    http_status = fields.pop(":status", None)
    has_message = bool(fields.pop("grpc-message", ""))
    is_grpc = "grpc" in fields.get("content-type", "grpc")
    return Outcome(
        http_status=http_status,
        messages=tuple(messages_of(peer.content(found, 1))) if is_grpc else (),
        status=status,
        has_message=has_message,
        trailers=tuple(sorted((n, v) for n, v in fields.items() if n not in IGNORED)),
    )


def ends_the_call(one: peer.Frame) -> bool:
    is_end = one.kind == frames.RST_STREAM or (
        one.kind in (frames.HEADERS, frames.DATA) and one.is_last
    )
    return one.kind == frames.GOAWAY or (is_end and one.stream_id == 1)


def messages_of(content: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(content):
        length = int.from_bytes(content[at + 1 : at + PREFIX_SIZE], "big")
        yield content[at + PREFIX_SIZE : at + PREFIX_SIZE + length]
        at += PREFIX_SIZE + length
