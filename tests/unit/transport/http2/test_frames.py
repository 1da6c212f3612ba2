"""Frames on the wire, as RFC 9113 draws them."""

from __future__ import annotations

import pytest

from tests.support.clients import http2_peer as peer
from tidemill.transport.http2 import frames
from tidemill.transport.http2.frames import ErrorCode, Setting


def test_settings_are_six_bytes_each() -> None:
    raw = frames.encode_settings({Setting.MAX_FRAME_SIZE: 16_384, Setting.ENABLE_PUSH: 0})
    assert raw == bytes.fromhex("00000c 04 00 00000000 0005 00004000 0002 00000000")
    assert frames.decode_settings(raw[9:]) == [(5, 16_384), (2, 0)]


def test_small_frames_have_the_bytes_of_the_protocol() -> None:
    assert frames.encode_ping(b"12345678", is_ack=True) == peer.ping(is_ack=True)
    assert frames.encode_rst_stream(5, ErrorCode.CANCEL) == peer.rst_stream(5)
    assert frames.encode_window_update(0, 7) == peer.window_update(0, 7)
    assert frames.encode_goaway(9, ErrorCode.NO_ERROR, "why") == peer.goaway(9, 0, b"why")
    assert frames.SETTINGS_ACK == peer.SETTINGS_ACK


def test_goaway_is_read_without_the_reserved_bit_and_written_with_a_short_reason() -> None:
    assert frames.decode_goaway(bytes.fromhex("80000003 0000000b") + b"text") == (3, 11, b"text")
    assert len(frames.encode_goaway(1, ErrorCode.NO_ERROR, "é" * 500)) == 9 + 8 + 200


@pytest.mark.parametrize("size", [0, 9, 10, 11, 20, 25])
def test_a_header_block_is_continued_in_as_many_frames_as_it_takes(size: int) -> None:
    block = bytes(range(size))
    found = peer.parse(frames.encode_headers(3, block, 10, is_last=True))
    assert b"".join(one.payload for one in found) == block
    assert [one.kind for one in found[1:]] == [frames.CONTINUATION] * (len(found) - 1)
    assert len(found) == max(1, -(-size // 10))
    assert found[0].kind == frames.HEADERS
    assert found[0].is_last
    assert [bool(one.flags & frames.END_HEADERS) for one in found] == [False] * (len(found) - 1) + [
        True
    ]
    assert {one.stream_id for one in found} == {3}
