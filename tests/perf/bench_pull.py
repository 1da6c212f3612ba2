"""What does reading beside consumers cost, by PullMessage and by ranges?

A small client of grpcio on the same machine reads all queues of a topic once, bodies of 1 KiB:
pulls of 512 messages one after the other, and ranges (`PipelineSource.ReadMessages`) with and
without bodies. CPU microseconds a message are given for each process: on shared cores that is
fairer than a rate.

    python -m tests.perf.bench_pull [--messages N]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from tests.perf.bench_end_to_end import cpu_seconds
from tests.support.clients.pulling import PullClient, message_of
from tests.support.processes.processes import Standalone, standalone
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2_grpc

TOPIC, QUEUES = "read", 8
BODY_BYTES = 1024
BATCH = 512
OPTIONS = [("grpc.max_receive_message_length", 16 << 20)]


def pulls(channel: grpc.Channel) -> int:
    """Pull each queue to its end; return how many messages came."""
    client, count = PullClient(channel), 0
    for queue_id in range(QUEUES):
        offset, code = 0, v2.OK
        while code == v2.OK:
            pulled = client.pull(TOPIC, offset, queue_id=queue_id, batch_size=BATCH)
            count, offset = count + len(pulled.messages), pulled.next_offset
            code = v2.Code.ValueType(pulled.code)
    return count


def ranges(channel: grpc.Channel, *, without_bodies: bool = False) -> int:
    """Read each queue as one range; return how many messages came."""
    source, count = pipeline_pb2_grpc.PipelineSourceStub(channel), 0
    for queue_id in range(QUEUES):
        request = pb.ReadMessagesRequest(
            topic=TOPIC, broker="broker-0", queue_id=queue_id, without_bodies=without_bodies
        )
        count += sum(len(reply.messages) for reply in source.ReadMessages(request))
    return count


WAYS: dict[str, Callable[[grpc.Channel], int]] = {
    "pulls": pulls,
    "ranges": ranges,
    "ranges_without_bodies": lambda channel: ranges(channel, without_bodies=True),
}


def measure(server: Standalone, way: Callable[[grpc.Channel], int]) -> dict[str, Any]:
    with grpc.insecure_channel(server.grpc, options=OPTIONS) as channel:
        before = {name: cpu_seconds(each.pid) for name, each in server.processes.items()}
        own_s, began_s = time.process_time(), time.monotonic()
        count = way(channel)
        took_s = time.monotonic() - began_s
        return {
            "messages": count,
            "per_second": round(count / took_s),
            "client_cpu_us": round((time.process_time() - own_s) / count * 1e6, 1),
            "cpu_us": {
                name: round((cpu_seconds(each.pid) - before[name]) / count * 1e6, 1)
                for name, each in server.processes.items()
            },
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    arguments = parser.parse_args()
    body = bytes(BODY_BYTES)
    with tempfile.TemporaryDirectory() as folder, standalone(Path(folder) / "data") as server:
        server.put(f"topics/{TOPIC}", queues=QUEUES)
        with grpc.insecure_channel(server.grpc) as channel:
            PullClient(channel).send_all(
                [message_of(TOPIC, body, message_id=f"{n}") for n in range(arguments.messages)]
            )
        results = {name: measure(server, way) for name, way in WAYS.items()}
    json.dump({"bench": "pull", **results}, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
