"""What do clients get out of a standalone, against a bare gRPC echo on the same machine?

Sends are replayed by h2load (Debian's nghttp2-client), receives and acks by the Go program in
tests/perf/load; both also say how busy they were themselves. Bodies of 1 KiB, one proxy process.
CPU seconds a million messages are given for each server process: on shared cores that is fairer
than a rate. Ratios are against the echo in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.support.processes.processes import Standalone, descendants, standalone
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2, service_pb2

BODY_BYTES = 1024
CONNECTIONS = 4
STREAMS = 50
TICK = os.sysconf("SC_CLK_TCK")
LOAD_FOLDER = Path(__file__).parent / "load"


def cpu_seconds(pid: int, *, is_alone: bool = False) -> float:
    """Return the CPU that a process, with its forked sync processes, has used, in seconds."""
    total = 0.0
    for process in [pid] if is_alone else descendants(pid):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / TICK
    return total


def pss_mib(pid: int) -> float:
    """Return the proportional memory of a process, in MiB."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    match = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    assert match is not None
    return int(match[1]) / 1024


def framed(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message


def send_request(topic: str) -> bytes:
    message = definition_pb2.Message(
        topic=definition_pb2.Resource(name=topic),
        body=b"x" * BODY_BYTES,
        system_properties=definition_pb2.SystemProperties(
            message_id="01" + "0A" * 16,
            message_type=definition_pb2.NORMAL,
            body_encoding=definition_pb2.IDENTITY,
            born_host="bench",
        ),
    )
    message.system_properties.born_timestamp.GetCurrentTime()
    return service_pb2.SendMessageRequest(messages=[message]).SerializeToString()


def h2load(
    port: str,
    path: str,
    body: bytes,
    requests: int,
    folder: Path,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, float]:
    """Replay one gRPC body with these headers, many in flight; return requests a second."""
    data = folder / "body.bin"
    data.write_bytes(framed(body))
    output = subprocess.run(
        [
            "h2load",
            f"-n{requests}",
            f"-c{CONNECTIONS}",
            f"-m{STREAMS}",
            "-d",
            str(data),
            "-H",
            "content-type: application/grpc",
            "-H",
            "te: trailers",
            "-H",
            "x-mq-client-id: bench",
            *(part for name, value in headers.items() for part in ("-H", f"{name}: {value}")),
            f"http://{port}{path}",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    rate = re.search(r"finished in .*?, ([\d.]+) req/s", output)
    done = re.search(r"(\d+) succeeded, (\d+) failed", output)
    assert rate is not None
    assert done is not None
    assert int(done[1]) == requests, output
    return {"per_second": float(rate[1])}


@contextmanager
def echo_server() -> Iterator[tuple[str, int]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.perf.echo_server", "grpcio"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield f"127.0.0.1:{process.stdout.readline().strip()}", process.pid
    finally:
        process.terminate()
        process.wait()


def build_load(folder: Path) -> Path:
    program = folder / "load"
    subprocess.run(["go", "build", "-o", str(program), "."], cwd=LOAD_FOLDER, check=True)
    return program


def load_command(
    program: Path, mode: str, address: str, headers: Mapping[str, str], flags: Mapping[str, object]
) -> list[str]:
    """Return the command line of the load generator."""
    return [
        str(program),
        mode,
        f"-address={address}",
        *(f"-header={name}={value}" for name, value in headers.items()),
        *(f"-{name.replace('_', '-')}={value}" for name, value in flags.items()),
    ]


def run_load(
    program: Path,
    mode: str,
    address: str,
    headers: Mapping[str, str] = MappingProxyType({}),
    **flags: object,
) -> dict[str, Any]:
    """Run the load generator; return its result."""
    line = load_command(program, mode, address, headers, flags)
    output = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True).stdout
    result = json.loads(output)
    assert isinstance(result, dict)
    return result


class Meter:
    """CPU of each server process over a stretch of work."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self._before = {name: cpu_seconds(pid) for name, pid in pids.items()}

    def per_million(self, messages: int) -> dict[str, float]:
        return {
            name: round((cpu_seconds(pid) - self._before[name]) / messages * 1e6, 1)
            for name, pid in self._pids.items()
        }


def measure_rates(server: Standalone, load: Path, folder: Path, messages: int) -> dict[str, Any]:
    address = server.grpc
    pids = {name: process.pid for name, process in server.processes.items()}
    results: dict[str, Any] = {}
    request = send_request("bench")
    path = "/apache.rocketmq.v2.MessagingService/SendMessage"
    h2load(address, path, request, 2_000, folder)  # Creates the topic, warms up.
    with echo_server() as (echo_address, echo_pid):
        echo_path = "/tidemill.perf.Echo/Echo"
        h2load(echo_address, echo_path, request, 2_000, folder)
        meter = Meter({"echo": echo_pid})
        results["echo"] = h2load(echo_address, echo_path, request, messages, folder)
        results["echo"]["cpu_s_per_million"] = meter.per_million(messages)
    meter = Meter(pids)
    results["send"] = h2load(address, path, request, messages, folder)
    results["send"]["cpu_s_per_million"] = meter.per_million(messages)
    meter = Meter(pids)
    results["receive_32_batch_ack"] = run_load(
        load, "receive", address, topic="bench", group="batch", messages=messages, consumers=48
    )
    results["receive_32_batch_ack"]["cpu_s_per_million"] = meter.per_million(messages)
    singles = messages // 4
    meter = Meter(pids)
    results["receive_1_ack"] = run_load(
        load,
        "receive",
        address,
        topic="bench",
        group="single",
        messages=singles,
        batch=1,
        consumers=64,
    )
    results["receive_1_ack"]["cpu_s_per_million"] = meter.per_million(singles)
    echo = results["echo"]["per_second"]
    results["send_against_echo"] = round(results["send"]["per_second"] / echo, 2)
    batch = results["receive_32_batch_ack"]["per_second"]
    results["receive_against_echo"] = round(batch / echo, 2)
    return results


def measure_idle(server: Standalone, load: Path, seconds: float) -> dict[str, Any]:
    address = server.grpc
    latency = run_load(load, "latency", address, topic="latency", group="latency", messages=300)
    pids = server.pids()
    time.sleep(2)  # Let what the latency run left behind settle before idleness is measured.
    before = sum(cpu_seconds(pid, is_alone=True) for pid in pids)
    time.sleep(seconds)
    used = sum(cpu_seconds(pid, is_alone=True) for pid in pids) - before
    return {
        "latency": latency,
        "idle_pss_mib": round(sum(pss_mib(pid) for pid in pids), 1),
        "idle_cpu_percent": round(used / seconds * 100, 2),
    }


def measure_start(folder: Path) -> float:
    """Return seconds from the command to the first stored message, on an empty directory."""
    request = send_request("first")
    began = time.perf_counter()
    with standalone(folder) as server:
        path = "/apache.rocketmq.v2.MessagingService/SendMessage"
        import grpc

        with grpc.insecure_channel(server.grpc) as channel:
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path)
            answer = call(request, metadata=(("x-mq-client-id", "bench"),))
        response = service_pb2.SendMessageResponse.FromString(answer)
        assert response.status.code == definition_pb2.OK, response
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=60_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--idle-seconds", type=float, default=10)
    arguments = parser.parse_args()
    for tool in ("h2load", "go"):
        if shutil.which(tool) is None:
            sys.exit(f"this bench needs {tool} (Debian: nghttp2-client, golang)")
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name).resolve()
        load = build_load(folder)
        starts = [measure_start(folder / f"start{n}") for n in range(arguments.runs)]
        runs = []
        for n in range(arguments.runs):
            with standalone(folder / f"r{n}") as server:
                runs.append(measure_rates(server, load, folder, arguments.messages))
        with standalone(folder / "idle") as server:
            idle = measure_idle(server, load, arguments.idle_seconds)
    for key in ("send_against_echo", "receive_against_echo"):
        idle[key] = statistics.median(run[key] for run in runs)
    result = {
        "bench": "end_to_end",
        "cpus": os.cpu_count(),
        "start_s": round(statistics.median(starts), 2),
        **idle,
        "runs": runs,
    }
    json.dump(result, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
