"""How long from the command to the first stored message, and what does an idle standalone cost?

State machine: none; one standalone with one proxy, auto-created topic, one message of 1 KiB. The
client's own imports are not counted. Bytecode has to be compiled, as `make setup` does.

    python -m tests.perf.bench_start
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import grpc

from tests.support.processes.processes import Standalone, standalone
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2, service_pb2_grpc

STARTS = 5
SETTLE_S = 3.0
IDLE_S = 20.0
BODY = os.urandom(1024)
METADATA = (("x-mq-client-id", "bench"), ("x-mq-language", "PYTHON"))
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def store_one(address: str) -> None:
    topic = v2.Resource(name="bench")
    message = v2.Message(
        topic=topic,
        system_properties=v2.SystemProperties(message_id="01", message_type=v2.NORMAL),
        body=BODY,
    )
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.MessagingServiceStub(channel)
        stub.QueryRoute(
            service_pb2.QueryRouteRequest(topic=topic, endpoints=endpoints(address)),
            metadata=METADATA,
            timeout=10,
        )
        reply = stub.SendMessage(
            service_pb2.SendMessageRequest(messages=[message]), metadata=METADATA, timeout=10
        )
    assert reply.status.code == v2.OK, reply


def endpoints(address: str) -> v2.Endpoints:
    host, _, port = address.rpartition(":")
    return v2.Endpoints(scheme=v2.IPv4, addresses=[v2.Address(host=host, port=int(port))])


def memory_mib(running: Standalone) -> float:
    """Return the proportional set size of all processes together."""
    lines = [
        line
        for pid in running.pids()
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines()
        if line.startswith("Pss:")
    ]
    return sum(int(line.split()[1]) for line in lines) / 1024


def cpu_s(running: Standalone) -> float:
    ticks = 0
    for pid in running.pids():
        fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS_PER_S


def main() -> None:
    ready_s: list[float] = []
    stored_s: list[float] = []
    result: dict[str, float] = {}
    for _ in range(STARTS):
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            with standalone(Path(folder) / "data") as running:
                ready_s.append(time.perf_counter() - began)
                store_one(running.grpc)
                stored_s.append(time.perf_counter() - began)
                if len(stored_s) == STARTS:
                    time.sleep(SETTLE_S)
                    result["idle_pss_mib"] = round(memory_mib(running), 1)
                    before = cpu_s(running)
                    time.sleep(IDLE_S)
                    result["idle_cpu_percent"] = round(100 * (cpu_s(running) - before) / IDLE_S, 2)
    result["ready_s_median"] = round(statistics.median(ready_s), 2)
    result["first_stored_s_median"] = round(statistics.median(stored_s), 2)
    result["first_stored_s_max"] = round(max(stored_s), 2)
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
