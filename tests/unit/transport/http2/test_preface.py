"""The first bytes of a client: HTTP/2, and other protocols that the port recognises."""

from __future__ import annotations

import json
import struct

import pytest

from tidemill.transport.http2.frames import PREFACE, ConnectionFailure
from tidemill.transport.http2.preface import read_preface


def remoting_frame(encoding: int = 0) -> bytes:
    """Return a request of a RocketMQ 4 client: the route of a topic."""
    header = json.dumps({"code": 105, "language": "JAVA", "opaque": 0}).encode()
    head = struct.pack(">I", 4 + len(header)) + bytes([encoding]) + len(header).to_bytes(3)
    return head + header


@pytest.mark.parametrize("encoding", [0, 1])
def test_a_remoting_client_is_recognised_at_its_first_bytes(encoding: int) -> None:
    frame = remoting_frame(encoding)
    for count in range(1, 8):
        assert read_preface(frame[:count]) == 0, "more bytes decide"
    for count in (8, len(frame)):
        with pytest.raises(ConnectionFailure, match="remoting protocol of RocketMQ 4"):
            read_preface(frame[:count])


@pytest.mark.parametrize(
    "data", [b"\0" * 8, b"\0\0\0\x05\2\0\0\1", b"\0\0\0\x05\0\0\0\x09", b"SSH-2.0"]
)
def test_other_bytes_are_no_remoting(data: bytes) -> None:
    with pytest.raises(ConnectionFailure, match="this is not HTTP/2"):
        read_preface(data)


def test_the_preface_of_http2_is_accepted() -> None:
    assert read_preface(PREFACE + b"more") == len(PREFACE)
