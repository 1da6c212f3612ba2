"""Many calls do not increase the memory of the server.

The server has its own process. The test reads its memory before and after many calls. `make soak`
makes a million of each kind (TRANSPORT_SOAK_CALLS).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.perf.echo_server import SERVICE
from tests.support.clients import http2_peer as peer
from tests.support.clients.http2_peer import Frame
from tests.support.clients.rpc_server import RawClient
from tidemill.transport.http2 import frames

pytestmark = pytest.mark.heavy

CALLS = int(os.environ.get("TRANSPORT_SOAK_CALLS", "50000"))
WARM_UP_CALLS = 20_000  # until allocators and caches are full
BATCH_SIZE = 100  # concurrent calls
# A leak of 100 bytes per call would be 5 MB in the shorter run.
GROWTH_BYTES_MAX = 3 << 20
STREAMS_A_CONNECTION = 200_000  # calls


@pytest.fixture
def server() -> Iterator[tuple[int, int]]:
    """Run the echo server of the benchmarks; yield its port and process id."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.perf.echo_server", "native"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline()), process.pid
    finally:
        process.kill()
        process.communicate()


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def is_end_of(stream_id: int, one: Frame) -> bool:
    return one.is_last and one.stream_id == stream_id


def make_calls(port: int, count: int, call: Callable[[int], bytes]) -> None:
    """Make calls, a batch at a time, on connections that are sometimes replaced."""
    while count > 0:
        with RawClient(port) as client:
            for first in range(0, min(count, STREAMS_A_CONNECTION), BATCH_SIZE):
                ids = [2 * (first + n) + 1 for n in range(BATCH_SIZE)]
                client.send(b"".join(map(call, ids)))
                last = ids[-1]
                client.until(partial(is_end_of, last))
                assert sum(one.kind == frames.HEADERS and one.is_last for one in client.frames) == (
                    BATCH_SIZE
                )
                client.frames.clear()
        count -= STREAMS_A_CONNECTION


def request(stream_id: int, *more: tuple[str, str]) -> bytes:
    fields = dict(peer.GRPC_REQUEST) | {":path": f"/{SERVICE}/Echo"}
    return peer.request(stream_id, b"x" * 100, (*fields.items(), *more))


def plain(stream_id: int) -> bytes:
    return request(stream_id)


def with_a_deadline(stream_id: int) -> bytes:
    return request(stream_id, ("grpc-timeout", "5S"))


def without_success(stream_id: int) -> bytes:
    """Calls of unknown methods with new names."""
    fields = dict(peer.GRPC_REQUEST) | {":path": f"/nobody/{stream_id}"}
    return peer.request(stream_id, b"x", tuple(fields.items()))


def with_names_of_its_own(stream_id: int) -> bytes:
    return request(stream_id, (f"x-{stream_id}", "value"))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="there is no /proc")
@pytest.mark.parametrize("call", [plain, with_a_deadline, without_success, with_names_of_its_own])
def test_calls_do_not_increase_the_servers_memory(
    server: tuple[int, int], call: Callable[[int], bytes]
) -> None:
    port, pid = server
    make_calls(port, WARM_UP_CALLS, call)
    before = resident_bytes(pid)
    make_calls(port, CALLS, call)
    growth = resident_bytes(pid) - before
    assert growth < GROWTH_BYTES_MAX, f"{growth} bytes more after {CALLS} calls"
