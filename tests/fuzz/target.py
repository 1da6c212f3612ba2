"""The input of the fuzzer: an end of a connection, a way to cut, and the bytes of the peer."""

from __future__ import annotations

from random import Random

from tests.support.clients import http2_peer as peer
from tests.support.clients.transport_trial import End, run_trial

HEAD_SIZE = 2


def try_input(raw: bytes) -> None:
    """Try one input; any exception is a finding."""
    if len(raw) < HEAD_SIZE:
        return
    end = End(raw[0] % len(End))
    content = raw[HEAD_SIZE:]
    # As one piece, or cut in one of 255 ways.
    run_trial(end, peer.pieces(content, Random(raw[1]), 200) if raw[1] else [content])
