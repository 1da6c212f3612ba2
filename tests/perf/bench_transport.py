"""What does our gRPC transport cost, against grpcio's, in one run?

CPU of the server process for a bare echo (see echo_server.py) of 1.1 KiB:

- a unary call, many in flight (h2load, 4 connections x 50 streams)
- a message of a server stream, 32 of 1 KiB a call
- a request on a bidirectional stream, one in flight, 1.3 KiB, as on the link between proxy and
  broker when it is idle: both ends, each with its own client and server

The ratios are what is to be compared: both servers meet the same neighbours on a shared machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop

from tests.perf.bench_end_to_end import cpu_seconds, h2load
from tests.perf.echo_server import BATCH_SIZE, SERVICE

UNARY_BYTES = 1_126
STREAMED_BYTES = 1_024
LINK_BYTES = 1_300
SERVERS = ("native", "grpcio")


@contextmanager
def echo_server(kind: str) -> Iterator[tuple[str, int]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.perf.echo_server", kind], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        with process.stdout:
            port = process.stdout.readline().strip()
            if not port:
                raise SystemExit(f"the {kind} echo server did not start; its error is above")
            yield f"127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait()


def measure_calls(kind: str, method: str, size: int, calls: int, folder: Path) -> dict[str, float]:
    """Return microseconds of server CPU a call, and calls a second."""
    with echo_server(kind) as (address, pid):
        path, body = f"/{SERVICE}/{method}", b"x" * size
        h2load(address, path, body, calls // 10, folder)
        before = cpu_seconds(pid)
        result = h2load(address, path, body, calls, folder)
        return {
            "us": round((cpu_seconds(pid) - before) / calls * 1e6, 2),
            "per_second": result["per_second"],
        }


async def exchange_native(address: str, requests: int) -> None:
    """Send requests one by one on a stream of our own client."""
    from tidemill.transport.aio.channel import connected
    from tidemill.transport.http2.limits import Limits

    answered = asyncio.Event()
    left, body = requests, b"x" * LINK_BYTES

    def on_message(_message: bytes) -> None:
        nonlocal left
        left -= 1
        if left:
            stream.write(body)
        else:
            answered.set()

    async with connected(address, Limits(), message_bytes_max=1 << 20, timeout_s=5) as channel:
        stream = channel.open(f"/{SERVICE}/Exchange", on_message)
        stream.write(body)
        await answered.wait()
        stream.cancel()


async def exchange_grpcio(address: str, requests: int) -> None:
    """Send requests one by one on a stream of grpcio's client."""
    import grpc

    body = b"x" * LINK_BYTES
    async with grpc.aio.insecure_channel(address) as channel:
        exchange: grpc.aio.StreamStreamMultiCallable[bytes, bytes]
        exchange = channel.stream_stream(f"/{SERVICE}/Exchange")
        call = exchange()
        for _ in range(requests):
            await call.write(body)
            await call.read()
        call.cancel()


def measure_link(kind: str, requests: int) -> dict[str, float]:
    """Return microseconds of CPU a request, of both ends."""
    exchange = {"native": exchange_native, "grpcio": exchange_grpcio}[kind]
    with echo_server(kind) as (address, pid):
        uvloop.run(exchange(address, requests // 10))
        before_s, own_before_s = cpu_seconds(pid), sum(os.times()[:2])
        uvloop.run(exchange(address, requests))
        server_s, client_s = cpu_seconds(pid) - before_s, sum(os.times()[:2]) - own_before_s
    return {
        "client_us": round(client_s / requests * 1e6, 1),
        "server_us": round(server_s / requests * 1e6, 1),
        "us": round((client_s + server_s) / requests * 1e6, 1),
    }


def measure(calls: int, folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = {"unary": {}, "streamed": {}, "link": {}}
    for kind in SERVERS:
        result["unary"][kind] = measure_calls(kind, "Echo", UNARY_BYTES, calls, folder)
        batches = measure_calls(kind, "Batch", STREAMED_BYTES, calls // 8, folder)
        result["streamed"][kind] = {"us": round(batches["us"] / BATCH_SIZE, 2)}
        result["link"][kind] = measure_link(kind, calls // 4)
    for question in result.values():
        question["native_against_grpcio"] = round(
            question["native"]["us"] / question["grpcio"]["us"], 3
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=60_000)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [measure(arguments.calls, Path(folder)) for _ in range(arguments.runs)]
    result = {
        "bench": "transport",
        "cpus": os.cpu_count(),
        **{
            question: statistics.median(run[question]["native_against_grpcio"] for run in runs)
            for question in ("unary", "streamed", "link")
        },
        "runs": runs,
    }
    json.dump(result, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
