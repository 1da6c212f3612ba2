"""Cost of a hostile client for others: memory of proxy and broker, and an honest client's P99.

By default a scenario is one connection that sends about a megabyte to a new standalone.
`added_mib` is the peak growth of a process. `honest` is a client that sends a message every 10 ms,
timed from the planned send time.

    python -m tests.perf.bench_strangers [--only NAME ...]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from tests.perf.bench_end_to_end import cpu_seconds
from tests.support.clients import http2_peer as peer
from tests.support.clients.hostile_client import (
    CLOSED,
    GROUP,
    TOPIC,
    Peaks,
    Stranger,
    fields_of,
    honest,
    memory_mib,
    message,
    path_of,
    poll,
    send_of,
)
from tests.support.processes.processes import Standalone, standalone
from tidemill.message.wire import bytes_field
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.transport.http2 import frames
from tidemill.transport.http2.frames import Setting

HOLD_S = 6.0  # For how long a stranger holds its responses.
WIDE_OPEN = (
    frames.PREFACE
    + peer.settings({Setting.INITIAL_WINDOW_SIZE: 2**31 - 1})
    + peer.window_update(0, 2**30)
)
_UNKNOWN_FIELD = 15  # In any request: skipped by the parser, but inflated.

BenchResult = dict[str, Any]
Scenario = Callable[[Standalone], BenchResult]


def result_of(stranger: Stranger) -> BenchResult:
    return {
        "sent_kb": stranger.sent_bytes // 1000,
        "answers": dict(stranger.answers()),
        "codes": {str(code): count for code, count in stranger.codes().items()},
    }


def hold(stranger: Stranger, calls: list[bytes], hold_s: float = HOLD_S) -> BenchResult:
    """Start all calls at once and read for a while."""
    stranger.begin(*calls)
    stranger.read_for(hold_s)
    return result_of(stranger)


def padding(size: int) -> bytes:
    return bytes_field(_UNKNOWN_FIELD, bytes(size))


# ---------------------------------------------------------------- memory


def gzip_polls(server: Standalone) -> BenchResult:
    """Poll a hundred times, each poll with 8 KB of gzip for 8 MB of zeros."""
    with Stranger(server.grpc) as stranger:
        raw = poll().SerializeToString() + padding(8_300_000)
        calls = [stranger.call_of("ReceiveMessage", raw, is_deflated=True) for _ in range(100)]
        return hold(stranger, calls)


def gzip_telemetry(server: Standalone) -> BenchResult:
    """Open a hundred telemetry streams with a command of 8 MB of zeros each."""
    with Stranger(server.grpc) as stranger:
        raw = service.TelemetryCommand(
            settings=v2.Settings(
                client_type=v2.PUSH_CONSUMER,
                subscription=v2.Subscription(group=v2.Resource(name=GROUP)),
            )
        ).SerializeToString() + padding(8_300_000)
        calls = [
            stranger.call_of("Telemetry", raw, is_deflated=True, is_last=False) for _ in range(100)
        ]
        return hold(stranger, calls)


def gzip_sends(server: Standalone) -> BenchResult:
    """Send a hundred messages of 4 MB of zeros each, and a hundred of 1 MB."""
    with Stranger(server.grpc) as stranger:
        large, small = send_of(message(bytes(4_000_000))), send_of(message(bytes(1_000_000)))
        calls = [
            stranger.call_of("SendMessage", request, is_deflated=True)
            for _ in range(100)
            for request in (large, small)
        ]
        return hold(stranger, calls)


def closed_windows(server: Standalone) -> BenchResult:
    """Receive 80 times 8 MB without a window, and sometimes give each stream one byte."""
    with Stranger(server.grpc, CLOSED) as stranger:
        pops = poll(wait_s=5)
        pops.batch_size = 2
        stranger.begin(b"".join(stranger.call_of("ReceiveMessage", pops) for _ in range(80)))
        for _ in range(int(HOLD_S)):
            stranger.read_for(1.0)
            windows = b"".join(peer.window_update(2 * n + 1, 1) for n in range(80))
            stranger.begin(windows)
        return result_of(stranger)


def _fill(server: Standalone) -> None:
    """Store a backlog of 640 MB for a consumer group."""
    server.put(f"groups/{GROUP}")
    with grpc.insecure_channel(server.grpc) as channel:
        send: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            path_of("SendMessage")
        )
        request = send_of(message(bytes(4_000_000))).SerializeToString()
        for _ in range(160):
            send(request, metadata=(("x-mq-client-id", "bench"),), timeout=30)


def cancelled_sends(server: Standalone) -> BenchResult:
    """Start sends of 4 MB of zeros and cancel each at once."""
    with Stranger(server.grpc) as stranger:
        request = send_of(message(bytes(4_000_000)))
        calls = []
        for n in range(150):
            call = stranger.call_of("SendMessage", request, is_deflated=True)
            calls.append(call + peer.rst_stream(2 * n + 1))
        return hold(stranger, calls)


def cancelled_polls(server: Standalone) -> BenchResult:
    """Poll with 8 MB of zeros and cancel half a second later, repeatedly."""
    with Stranger(server.grpc) as stranger:
        raw = poll().SerializeToString() + padding(8_300_000)
        for round_number in range(8):
            first = round_number * 12
            stranger.begin(
                b"".join(
                    stranger.call_of("ReceiveMessage", raw, is_deflated=True) for _ in range(12)
                )
            )
            stranger.read_for(0.5)
            stranger.begin(b"".join(peer.rst_stream(2 * n + 1) for n in range(first, first + 12)))
        return hold(stranger, [], 2.0)


# ---------------------------------------------------------------- fields and counts


def attempt_ids(server: Standalone) -> BenchResult:
    """Poll twenty times with an attempt id of 8 MB."""
    with Stranger(server.grpc) as stranger:
        request = poll(attempt_id="a" * 8_000_000)
        calls = [stranger.call_of("ReceiveMessage", request, is_deflated=True) for _ in range(20)]
        return hold(stranger, calls)


def messages_a_send(server: Standalone) -> BenchResult:
    """Send 150,000 messages in one request of some kilobytes, ten times."""
    with Stranger(server.grpc) as stranger:
        one = message()
        one.system_properties.ClearField("born_timestamp")
        raw = bytes_field(1, one.SerializeToString()) * 80_000
        calls = [stranger.call_of("SendMessage", raw, is_deflated=True) for _ in range(10)]
        empty = [
            stranger.call_of("SendMessage", b"\x0a\x00" * 2_000_000, is_deflated=True)
            for _ in range(10)
        ]
        return hold(stranger, calls + empty)


def message_keys(server: Standalone) -> BenchResult:
    """Send messages of two million empty keys."""
    with Stranger(server.grpc) as stranger:
        properties = message().system_properties.SerializeToString() + b"\x12\x00" * 2_000_000
        raw = bytes_field(
            1,
            bytes_field(1, bytes_field(2, TOPIC.encode()))
            + bytes_field(3, properties)
            + bytes_field(4, b"x"),
        )
        calls = [stranger.call_of("SendMessage", raw, is_deflated=True) for _ in range(20)]
        return hold(stranger, calls)


def route_endpoints(server: Standalone) -> BenchResult:
    """Request a route with 200,000 endpoints, 30 times."""
    with Stranger(server.grpc) as stranger:
        request = service.QueryRouteRequest(
            topic=v2.Resource(name=TOPIC),
            endpoints=v2.Endpoints(
                scheme=v2.IPv4, addresses=[v2.Address(host="10.0.0.1", port=8081)] * 200_000
            ),
        )
        calls = [stranger.call_of("QueryRoute", request, is_deflated=True) for _ in range(30)]
        return hold(stranger, calls)


def route_namespace(server: Standalone) -> BenchResult:
    """Request a route in a namespace of 4 MB, which every queue repeats."""
    with Stranger(server.grpc) as stranger:
        request = service.QueryRouteRequest(
            topic=v2.Resource(name=TOPIC, resource_namespace="n" * 4_000_000),
            endpoints=v2.Endpoints(scheme=v2.IPv4, addresses=[v2.Address(host="::", port=1)]),
        )
        calls = [stranger.call_of("QueryRoute", request, is_deflated=True) for _ in range(20)]
        return hold(stranger, calls)


def tag_filters(server: Standalone) -> BenchResult:
    """Park a thousand polls with filters of four thousand tags each."""
    with Stranger(server.grpc) as stranger:
        calls = []
        for n in range(1_000):
            tags = "||".join(f"{n:x}.{tag:x}" for tag in range(1_600))
            request = poll(filter_expression=v2.FilterExpression(type=v2.TAG, expression=tags))
            calls.append(stranger.call_of("ReceiveMessage", request, is_deflated=True))
        return hold(stranger, calls)


def heartbeat_groups(server: Standalone) -> BenchResult:
    """Send heartbeats as 800 clients with ids of 30 KB, in groups with names of a megabyte."""
    with Stranger(server.grpc) as stranger:
        for n in range(400):
            request = service.HeartbeatRequest(
                client_type=v2.PUSH_CONSUMER, group=v2.Resource(name=f"{n}" + "g" * 1_000_000)
            )
            stranger.begin(
                stranger.call_of("Heartbeat", request, is_deflated=True, client_id=f"c{n}")
            )
        return hold(stranger, [])


def client_ids(server: Standalone) -> BenchResult:
    """Send heartbeats as 4,000 clients with ids of 15 KB; the stranger pays the same cost."""
    with Stranger(server.grpc) as stranger:
        for n in range(4_000):
            request = service.HeartbeatRequest(client_type=v2.PRODUCER)
            stranger.begin(stranger.call_of("Heartbeat", request, client_id=f"{n}" + "c" * 15_000))
        return hold(stranger, [], 3.0)


def born_hosts(server: Standalone) -> BenchResult:
    """Send 400 messages with born host names of a megabyte."""
    with Stranger(server.grpc) as stranger:
        for n in range(400):
            request = send_of(message(born_host=f"{n}" + "h" * 1_000_000))
            stranger.begin(stranger.call_of("SendMessage", request, is_deflated=True))
        return hold(stranger, [])


# ---------------------------------------------------------------- turns of the loop


def flood_of_calls(server: Standalone) -> BenchResult:
    """Keep a thousand heartbeats in flight, as fast as the proxy takes them."""
    with Stranger(server.grpc) as stranger:
        request = service.HeartbeatRequest(client_type=v2.PRODUCER)
        end_s = time.monotonic() + HOLD_S
        answered = 0
        while time.monotonic() < end_s and not stranger.is_ended:
            calls = [stranger.call_of("Heartbeat", request) for _ in range(900)]
            stranger.begin(*calls)
            left = 900
            while left > 0 and not stranger.is_ended:
                left -= sum(one.kind == 1 and one.is_last for one in stranger.read())
            answered += 900 - left
            stranger.frames.clear()
        return {**result_of(stranger), "answered": answered}


def flood_of_frames(server: Standalone) -> BenchResult:
    """Write megabytes of frames of one byte of data, on one stream."""
    with Stranger(server.grpc) as stranger:
        stranger.begin(stranger.call_of("Telemetry", b"", is_last=False)[:-14])
        piece = peer.data(1, b"\0") * 7_000
        end_s = time.monotonic() + HOLD_S
        while time.monotonic() < end_s and not stranger.is_ended:
            stranger.begin(piece)
            stranger.read_for(0.001)
            if stranger.answers():
                break
        stranger.read_for(0.5)
        return result_of(stranger)


def bad_header(server: Standalone) -> BenchResult:
    """Poll, and send a header list of 40 KB on another stream; check that the poll continues."""
    with Stranger(server.grpc) as stranger:
        stranger.begin(stranger.call_of("ReceiveMessage", poll(wait_s=5)))
        block = peer.block(fields_of("Heartbeat", *[(f"x-{n}", "v" * 1_000) for n in range(40)]))
        pieces = [block[at : at + 16_000] for at in range(0, len(block), 16_000)]
        stranger.begin(
            peer.frame(frames.HEADERS, pieces[0], stream_id=3),
            *(peer.continuation(3, piece, is_complete=False) for piece in pieces[1:-1]),
            peer.continuation(3, pieces[-1], is_complete=True),
        )
        stranger.read_for(7.0)
        return result_of(stranger)


# ---------------------------------------------------------------- pulls


def unread_pulls(server: Standalone) -> BenchResult:
    """Pull a megabyte 400 times without a window, from the first message on."""
    with Stranger(server.grpc, CLOSED) as stranger:
        stranger.begin(*[stranger.call_of("PullMessage", pull(0)) for _ in range(400)])
        stranger.read_for(HOLD_S)
        return result_of(stranger)


def pulls_without_end(server: Standalone) -> BenchResult:
    """Keep 32 pulls of a megabyte in flight and read them."""
    with Stranger(server.grpc, WIDE_OPEN) as stranger:
        end_s, answered, read_bytes = time.monotonic() + HOLD_S, 0, 0
        stranger.begin(*[stranger.call_of("PullMessage", pull(0)) for _ in range(32)])
        while time.monotonic() < end_s and not stranger.is_ended:
            stranger.read_for(0.01)
            ended = sum(one.kind == frames.HEADERS and one.is_last for one in stranger.frames)
            size = sum(len(one.payload) for one in stranger.frames if one.kind == frames.DATA)
            stranger.frames.clear()
            answered, read_bytes = answered + ended, read_bytes + size
            again = [stranger.call_of("PullMessage", pull(0)) for _ in range(ended)]
            stranger.begin(*again, *([peer.window_update(0, size)] if size else []))
        return {**result_of(stranger), "answered": answered, "read_mb": read_bytes // 1_000_000}


def pull(offset: int, topic: str = TOPIC) -> service.PullMessageRequest:
    return service.PullMessageRequest(
        message_queue=v2.MessageQueue(topic=v2.Resource(name=topic)), offset=offset, batch_size=1024
    )


def _fill_small(server: Standalone) -> None:
    """Store 20 MB of messages of a kilobyte."""
    with grpc.insecure_channel(server.grpc) as channel:
        send: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            path_of("SendMessage")
        )
        request = send_of(*[message(bytes(1_000))] * 256).SerializeToString()
        for _ in range(80):
            send(request, metadata=(("x-mq-client-id", "bench"),), timeout=30)


# ---------------------------------------------------------------- crowds


def burst_of_polls(server: Standalone) -> BenchResult:
    """Park 20,000 polls of twenty connections on twenty topics at once."""
    with contextlib.ExitStack() as opened:
        return result_of(_park(server, opened, HOLD_S)[0])


def parked_polls(server: Standalone) -> BenchResult:
    """Measure an honest client while 20,000 polls are parked."""
    with contextlib.ExitStack() as opened:
        before = {name: memory_mib(child.pid) for name, child in server.processes.items()}
        strangers = _park(server, opened, 10.0)
        with honest(server.grpc) as beside:
            strangers[0].read_for(3.0)
            calm = beside.stop()
        after = {name: memory_mib(child.pid) for name, child in server.processes.items()}
        added = {name: round(after[name] - before[name], 1) for name in before}
        return {**result_of(strangers[0]), "added_mib": added, "honest_beside": calm}


def _park(server: Standalone, opened: contextlib.ExitStack, hold_s: float) -> list[Stranger]:
    strangers = [opened.enter_context(Stranger(server.grpc)) for _ in range(20)]
    for number, stranger in enumerate(strangers):
        request = poll(wait_s=20)
        request.message_queue.topic.name = f"topic{number}"
        stranger.begin(*(stranger.call_of("ReceiveMessage", request) for _ in range(1_000)))
    for stranger in strangers:
        stranger.read_for(hold_s / 20)
    return strangers


def overload(server: Standalone) -> BenchResult:
    """Send messages of 4 MB from 64 honest clients: one in flight each, then five, then twenty.

    `cpu_ms_per_mb` is the CPU time per stored megabyte and process, also on a shared machine.
    """
    pids = {name: child.pid for name, child in server.processes.items() if name != "admin"}
    pids["clients"] = os.getpid()
    levels: BenchResult = {}

    def used_s() -> dict[str, float]:
        # The server's processes are children of the client process.
        return {name: cpu_seconds(pid, is_alone=name == "clients") for name, pid in pids.items()}

    for in_flight in (1, 5, 20):
        before_s = used_s()
        level = asyncio.run(_send_large(server.grpc, in_flight))
        stored_mb = max(level["outcomes"].get("OK", 0), 1) * LARGE_BYTES / 1e6
        level["cpu_ms_per_mb"] = {
            name: round((seconds - before_s[name]) * 1e3 / stored_mb, 2)
            for name, seconds in used_s().items()
        }
        levels[f"{in_flight * CLIENTS}_in_flight"] = level
    return levels


CLIENTS = 64
LARGE_BYTES = 4_000_000
OVERLOAD_S = 6.0
# The pause after a rejection doubles each time, as in a producer's settings. Official clients give
# up after three attempts. Then the application sends again.
RETRY_MIN_S, RETRY_MAX_S = 0.01, 1.0


async def _send_large(address: str, in_flight: int) -> BenchResult:
    request = send_of(message(bytes(LARGE_BYTES))).SerializeToString()
    outcomes: Counter[str] = Counter()
    end_s = time.monotonic() + OVERLOAD_S

    async def send(call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]) -> None:
        retry_s = RETRY_MIN_S
        while time.monotonic() < end_s:
            try:
                answer = await call(request, metadata=(("x-mq-client-id", "honest"),), timeout=10)
                code = service.SendMessageResponse.FromString(answer).status.code
                outcome = v2.Code.Name(code)
            except grpc.aio.AioRpcError as error:
                outcome = error.code().name
            outcomes[outcome] += 1
            if outcome == "OK":
                retry_s = RETRY_MIN_S
                continue
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, RETRY_MAX_S)

    async with contextlib.AsyncExitStack() as channels:
        calls: list[grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]] = []
        for number in range(CLIENTS):
            options = (("grpc.use_local_subchannel_pool", 1), ("tidemill.client", number))
            channel = grpc.aio.insecure_channel(address, options=options)
            await channels.enter_async_context(channel)
            calls.append(channel.unary_unary(path_of("SendMessage")))
        begun_s = time.monotonic()
        await asyncio.gather(*(send(call) for call in calls for _ in range(in_flight)))
        took_s = time.monotonic() - begun_s
    rate = outcomes["OK"] * LARGE_BYTES / took_s / 1e6
    return {"mb_per_second": round(rate, 1), "outcomes": dict(outcomes)}


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        gzip_polls,
        gzip_telemetry,
        gzip_sends,
        closed_windows,
        cancelled_sends,
        cancelled_polls,
        attempt_ids,
        messages_a_send,
        message_keys,
        route_endpoints,
        route_namespace,
        tag_filters,
        heartbeat_groups,
        client_ids,
        born_hosts,
        flood_of_calls,
        flood_of_frames,
        bad_header,
        unread_pulls,
        pulls_without_end,
        burst_of_polls,
        parked_polls,
        overload,
    )
}


PREPARED: dict[Scenario, Callable[[Standalone], None]] = {
    closed_windows: _fill,
    unread_pulls: _fill_small,
    pulls_without_end: _fill_small,
}


def measure(scenario: Scenario, folder: Path) -> BenchResult:
    with standalone(folder) as server:
        with Stranger(server.grpc) as first:
            first.send(first.call_of("SendMessage", send_of(message())))
            first.read_for(0.5)
        pids = {name: child.pid for name, child in server.processes.items() if name != "admin"}
        if scenario in PREPARED:
            PREPARED[scenario](server)
        with honest(server.grpc) as beside:
            time.sleep(0.5)
            peaks = Peaks(pids)
            try:
                result = scenario(server)
            finally:
                added = peaks.stop()
            told_honest = beside.stop()
    return {"added_mib": added, "honest": told_honest, "stranger": result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=SCENARIOS, default=list(SCENARIOS))
    arguments = parser.parse_args()
    results: BenchResult = {"bench": "strangers"}
    for name in arguments.only:
        with tempfile.TemporaryDirectory(dir=".") as folder:
            results[name] = measure(SCENARIOS[name], Path(folder).resolve() / "data")
        print(name, json.dumps(results[name]), file=sys.stderr, flush=True)
    json.dump(results, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
