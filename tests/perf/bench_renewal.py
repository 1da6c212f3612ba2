"""Repeated deliveries to live push consumers after a process is killed.

50 clients with one connection each receive 10,000 messages of 100 bytes as push consumers, at most
16 per receive (`auto_renew`: hidden for 60 s, then extended), and keep them. A second later a
process is killed with SIGKILL, without other load:

    proxy     the proxy of all clients; they continue at a second proxy of the same broker
    broker    the broker and its proxy's links start again

For 135 s, two deadlines of 60 s, the clients send only heartbeats and polls. The goal is 0 repeated
deliveries. Then each client acks all its messages.

    python -m tests.perf.bench_renewal
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from tests.support.clients.api import METADATA, Api, ack_request, api, message, receive_request
from tests.support.processes.children import two_proxies
from tests.support.processes.killing import kill
from tests.support.processes.processes import standalone
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service

TOPIC, GROUP = "jobs", "workers"
BODY_BYTES = 100
BATCH = 16
BEFORE_KILL_S = 1.0
HEARTBEAT_S = 10.0
POLL_MS = 10_000
CALL_S = 30.0


class Client:
    """A push consumer that holds its messages."""

    def __init__(self, number: int) -> None:
        self._headers = (("x-mq-client-id", f"client-{number}"), *METADATA[1:])
        self.held: dict[bytes, str] = {}  # body -> receipt handle
        self.again = 0

    async def take(self, one: Api, *, until_count: int) -> None:
        while len(self.held) < until_count:
            await self.receive(one, min(BATCH, until_count - len(self.held)))

    async def receive(self, one: Api, count: int) -> int:
        request = receive_request(TOPIC, GROUP, poll_ms=POLL_MS, batch_size=count)
        request.ClearField("invisible_duration")
        request.auto_renew = True
        call = one.stub.ReceiveMessage(request, metadata=self._headers, timeout=CALL_S)
        messages = [item.message async for item in call if item.HasField("message")]
        for each in messages:
            self.held[each.body] = each.system_properties.receipt_handle
        return len(messages)

    async def live_on(self, one: Api) -> None:
        """Send heartbeats and polls until cancelled."""
        polling = asyncio.create_task(self._poll(one))
        request = service.HeartbeatRequest(
            group=v2.Resource(name=GROUP), client_type=v2.PUSH_CONSUMER
        )
        try:
            while True:
                # Polls wait while the broker starts.
                await one.stub.Heartbeat(request, metadata=self._headers, timeout=CALL_S)
                await asyncio.sleep(HEARTBEAT_S)
        finally:
            polling.cancel()

    async def _poll(self, one: Api) -> None:
        while True:
            self.again += await self.receive(one, BATCH)

    async def settle(self, one: Api) -> Counter[str]:
        results: Counter[str] = Counter()
        handles = list(self.held.values())
        for first in range(0, len(handles), BATCH):
            request = ack_request(TOPIC, GROUP, handles[first : first + BATCH])
            answer = await one.stub.AckMessage(request, metadata=self._headers, timeout=CALL_S)
            results.update(v2.Code.Name(entry.status.code) for entry in answer.entries)
        return results


async def measure(
    before: str, after: str, kill_one: Callable[[], Coroutine[Any, Any, None]], options: Any
) -> dict[str, object]:
    """Receive all messages at one endpoint, kill a process, and count repeats at another."""
    async with api(before) as one:
        for first in range(0, options.messages, 500):
            await asyncio.gather(
                *(
                    one.send(message(TOPIC, b"%d" % n + bytes(BODY_BYTES - 8)))
                    for n in range(first, min(first + 500, options.messages))
                )
            )
    clients = [Client(n) for n in range(options.clients)]
    share = options.messages // options.clients
    began_s = time.monotonic()
    async with connected(before, options.clients) as ends:
        await asyncio.gather(
            *(each.take(end, until_count=share) for each, end in zip(clients, ends, strict=True))
        )
        taken_s = time.monotonic() - began_s
        await asyncio.sleep(BEFORE_KILL_S)
        await kill_one()
    async with connected(after, options.clients) as ends:
        living = [
            asyncio.create_task(each.live_on(end)) for each, end in zip(clients, ends, strict=True)
        ]
        done, _ = await asyncio.wait(
            living, timeout=options.watch_s, return_when=asyncio.FIRST_EXCEPTION
        )
        for task in living:
            task.cancel()
        failures = [repr(task.exception())[:200] for task in done]
        began_s = time.monotonic()
        acked = await asyncio.gather(
            *(each.settle(end) for each, end in zip(clients, ends, strict=True))
        )
    return {
        "in_flight": sum(len(each.held) for each in clients),
        "taken_s": round(taken_s, 1),
        "redelivered": sum(each.again for each in clients),
        "acks": dict(sum(acked, Counter())),
        "acked_s": round(time.monotonic() - began_s, 1),
        "failures": failures,
    }


@contextlib.asynccontextmanager
async def connected(address: str, count: int) -> AsyncIterator[list[Api]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(api(address)) for _ in range(count)]


def proxy_killed(folder: Path, options: Any) -> dict[str, object]:
    with two_proxies(folder) as (first, second):

        async def kill_first() -> None:
            first.process.send_signal(signal.SIGKILL)

        return asyncio.run(measure(first.grpc, second.grpc, kill_first, options))


def broker_killed(folder: Path, options: Any) -> dict[str, object]:
    with standalone(folder / "data") as running:

        async def kill_broker() -> None:
            await kill(running, "broker-0")

        return asyncio.run(measure(running.grpc, running.grpc, kill_broker, options))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--watch-s", type=float, default=135.0)
    options = parser.parse_args()
    found: dict[str, object] = {
        "bench": "renewal",
        "cpus": os.cpu_count(),
        "clients": options.clients,
        "watched_s": options.watch_s,
    }
    for name, scenario in {"proxy": proxy_killed, "broker": broker_killed}.items():
        with tempfile.TemporaryDirectory() as folder:
            found[f"{name}_killed"] = scenario(Path(folder), options)
    json.dump(found, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
