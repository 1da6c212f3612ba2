"""Calls of honest readers that the proxy's limits end, at full speed and behind a slow line.

One standalone, one topic of 200 MB. A consumer over each gRPC library receives and acks all
messages, with four polls at a time on one connection: once directly, and once through a relay of
5 MB/s. `ended` counts the results of the calls at the client, `answers` at the proxy. `limits`
counts the calls that the proxy ended or rejected by a limit. Tidemill causes every result except OK
and MESSAGE_NOT_FOUND.

    python -m tests.perf.bench_readers [--only grpcio grpc-go ...] [--results FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.support.clients.client_process import (
    GO_PROGRAM,
    JAVA_CLASSES,
    JAVA_LIBRARIES,
    NODE_PACKAGES,
    SCRIPTS,
)
from tests.support.clients.hostile_client import message, path_of, send_of
from tests.support.processes.processes import Standalone, standalone
from tests.support.processes.slow_relay import relaying
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service

TOPIC = "read"
# Body sizes and the number of each. With its fields the largest message is just under 4 MiB, the
# default limit of grpcio, grpc-js and tonic.
MESSAGES = {(4 << 20) - 4096: 40, 64 << 10: 480, 1 << 10: 1_000}
SLOW_BYTES_PER_S = 5_000_000
SENDERS = 4  # In parallel: enough to fill the topic soon.
RECEIVERS = 4  # Parallel polls. The largest batch has 16 MiB, and the connection holds 24.
WAIT_S = 150.0  # Three times the duration of 200 MB at 5 MB/s.
RESULTS = Path(__file__).parent / "results" / "readers.json"
RUST = Path(__file__).parent / "readers" / "rust"
RUST_PROGRAM = RUST / "target" / "release" / "reader"
# These limits end idle or old connections. They do not affect a reader.
LIMITS_OF_TIME = frozenset({"age", "idle", "keepalive"})
FINE = frozenset({"OK", "MESSAGE_NOT_FOUND"})

BenchResult = dict[str, Any]


class Reader(NamedTuple):
    """A program that reads all messages over one library."""

    # Returns the command line for home folder, endpoint and consumer group.
    command: Callable[[Path, str, str], list[str]]
    tool: str
    made: Path  # The program. Without it this reader does not run.


def arguments_of(endpoint: str, group: str) -> str:
    count = sum(MESSAGES.values())
    return json.dumps(
        {
            "endpoints": [endpoint],
            "topic": TOPIC,
            "group": group,
            "messages": count,
            "receivers": RECEIVERS,
            "wait_s": WAIT_S,
        }
    )


def python_reader(_home: Path, endpoint: str, group: str) -> list[str]:
    script = SCRIPTS / "python" / "scenarios.py"
    return [sys.executable, str(script), "consume_all", arguments_of(endpoint, group)]


def go_reader(_home: Path, endpoint: str, group: str) -> list[str]:
    return [str(GO_PROGRAM), "consumeAll", arguments_of(endpoint, group)]


def node_reader(_home: Path, endpoint: str, group: str) -> list[str]:
    script = SCRIPTS / "node" / "scenarios.mjs"
    return ["node", str(script), "consumeAll", arguments_of(endpoint, group)]


def java_reader(home: Path, endpoint: str, group: str) -> list[str]:
    classes = f"{JAVA_CLASSES}:{JAVA_LIBRARIES}/*"
    java = ["java", f"-Duser.home={home}", "-cp", classes, "Scenarios"]
    return [*java, "consumeAll", arguments_of(endpoint, group)]


def rust_reader(_home: Path, endpoint: str, group: str) -> list[str]:
    count = sum(MESSAGES.values())
    return [str(RUST_PROGRAM), endpoint, TOPIC, group, str(count), str(RECEIVERS), str(WAIT_S)]


READERS = {
    "grpcio": Reader(python_reader, "python3", SCRIPTS),
    "grpc-go": Reader(go_reader, "go", GO_PROGRAM),
    "grpc-js": Reader(node_reader, "node", NODE_PACKAGES),
    "netty": Reader(java_reader, "java", JAVA_CLASSES),
    "tonic": Reader(rust_reader, "cargo", RUST_PROGRAM),
}


def build_rust() -> None:
    """Build the consumer over tonic if cargo is installed. `make test` builds the others."""
    if shutil.which("cargo"):
        subprocess.run(["cargo", "build", "--release", "--quiet", "--locked"], cwd=RUST, check=True)


async def fill(server: Standalone) -> None:
    """Store the messages for all readers, the largest first, so that a batch has many of them."""
    sizes = [size for size, count in MESSAGES.items() for _ in range(count)]
    numbered = enumerate(sizes)

    async def send_some(send: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]) -> None:
        for number, size in numbered:
            one = message(bytes(size), TOPIC, message_id=f"01{number:032X}")
            answer = await send(
                send_of(one).SerializeToString(),
                metadata=(("x-mq-client-id", "bench"),),
                timeout=30,
            )
            code = service.SendMessageResponse.FromString(answer).status.code
            assert code == v2.OK, f"message {number} was refused: {code}"

    async with grpc.aio.insecure_channel(server.grpc) as channel:
        send: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            path_of("SendMessage")
        )
        await asyncio.gather(*(send_some(send) for _ in range(SENDERS)))


def counted(server: Standalone) -> tuple[Counter[str], Counter[str]]:
    """Return the proxy's count of each limit, and of its answers by method and code."""
    [proxy] = [child for name, child in server.processes.items() if name.startswith("proxy")]
    with httpx.Client(trust_env=False) as client:
        text = client.get(proxy.metrics).raise_for_status().text
    limits: Counter[str] = Counter()
    answers: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "rocketmq_grpc_limit_hits_total":
                limits[sample.labels["limit"]] += int(sample.value)
            elif sample.name == "rocketmq_rpc_latency_count":
                labels = sample.labels
                answers[f"{labels['request_code']}: {labels['response_code']}"] += int(sample.value)
    return limits, answers


@contextlib.asynccontextmanager
async def reached(server: Standalone, bytes_per_s: int | None) -> AsyncIterator[str]:
    """Yield an address of the proxy, direct or behind a slow line."""
    if bytes_per_s is None:
        yield server.grpc
        return
    async with relaying(server.grpc, bytes_per_s=bytes_per_s) as address:
        yield address


async def read(server: Standalone, name: str, bytes_per_s: int | None, home: Path) -> BenchResult:
    """Run one reader; return its counts and those of the proxy."""
    group = f"{name}-{'full' if bytes_per_s is None else 'slow'}"
    limits_before, answers_before = counted(server)
    async with reached(server, bytes_per_s) as endpoint:
        process = await asyncio.create_subprocess_exec(
            *READERS[name].command(home, endpoint, group),
            env={**os.environ, "HOME": str(home)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(2 * WAIT_S):
                output, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    limits, answers = counted(server)
    facts = [json.loads(line) for line in output.splitlines() if line.startswith(b"{")]
    consumed = next((fact for fact in facts if fact["fact"] == "consumed"), None)
    if consumed is None:
        raise SystemExit(f"{name} failed:\n{output.decode()}\n{errors.decode()}")
    ended = consumed["ended"]
    hits = dict(limits - limits_before)
    return {
        "messages": consumed["messages"],
        "missing": sum(MESSAGES.values()) - consumed["messages"],
        "repeated_bytes": consumed["bytes"] - sum(size * count for size, count in MESSAGES.items()),
        "took_s": round(consumed["tookS"], 1),
        "mb_per_s": round(consumed["bytes"] / 1e6 / consumed["tookS"], 1)
        if consumed["tookS"]
        else 0.0,
        "ended": ended,
        "ended_by_us": sum(
            count for outcome, count in ended.items() if outcome.partition(": ")[2] not in FINE
        ),
        "answers": dict(answers - answers_before),
        "limits": hits,
        "limits_hit": sum(count for limit, count in hits.items() if limit not in LIMITS_OF_TIME),
    }


def write(file: Path, results: BenchResult) -> None:
    file.write_text(json.dumps(results, indent=2) + "\n")


async def measure(names: list[str], home: Path, file: Path) -> BenchResult:
    """Run all readers, one after the other; write the results so far to `file`."""
    results: BenchResult = {
        "bench": "readers",
        "slow_bytes_per_s": SLOW_BYTES_PER_S,
        "polls_at_a_time": RECEIVERS,
        "messages": {str(size): count for size, count in MESSAGES.items()},
    }
    with standalone(home / "data") as server:
        for name in names:
            for pace in ("full", "slow"):
                server.put(f"groups/{name}-{pace}")
        await fill(server)
        for name in names:
            for pace, bytes_per_s in (("full", None), ("slow", SLOW_BYTES_PER_S)):
                result = await read(server, name, bytes_per_s, home)
                results.setdefault(name, {})[pace] = result
                print(name, pace, json.dumps(result), file=sys.stderr, flush=True)
                write(file, results)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=READERS, default=list(READERS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if "tonic" in arguments.only:
        build_rust()
    names = []
    for name in arguments.only:
        reader = READERS[name]
        if shutil.which(reader.tool) and reader.made.exists():
            names.append(name)
        else:
            print(f"{name}: {reader.tool} or {reader.made} is missing", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        results = asyncio.run(measure(names, Path(folder).resolve(), arguments.results))
    json.dump(results, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
