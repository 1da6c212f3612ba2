"""Time without sends after the loss of a master, and the cost of three replicas.

    faults    a standalone with three replicas under constant sends; the master is killed --count
              times (or stopped, with or without its supervisor, or moved), each time once all
              replicas are in sync again. Result per fault: the longest time without a successful
              send, from just before the fault until all are in sync. For comparison: the longest
              such time without a fault, which the machine causes
    in-flight the same faults on a group with many messages in flight and as many messages that are
              delayed for weeks: the new master has both in its tables
    rates     three replicas against one, both running and measured in turn on the same machine:
              sends per second, and CPU per message of all processes together

`python -m tests.perf.bench_failover [faults|in-flight|rates] --count 10 --fault kill`. The output
includes the load average. On a shared machine, quote it with the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import grpc

from tests.perf.bench_end_to_end import cpu_seconds, h2load, send_request
from tests.support.clients.api import Api, api, message
from tests.support.processes.processes import Standalone, standalone
from tests.support.processes.replicated_standalone import FLAGS, ReplicatedStandalone, send_signal
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

SEND: Final = "/apache.rocketmq.v2.MessagingService/SendMessage"
SENDERS: Final = 4
QUIET_S: Final = 5.0  # Sends without a fault, before the first one.
SETTLE_S: Final = 1.0  # Sends between two faults.
PAUSE_S: Final = 0.005  # Between two sends of one sender: it measures times, not rates.
MESSAGES: Final = 10_000  # Per turn of `rates`.
WARM_UP: Final = 2_000
START_S: Final = 120.0
CALL_S: Final = 60.0  # Timeout while filling a topic: a shared machine may be slow.
FILLERS: Final = 16
AT_ONCE: Final = 32  # Messages per call.
HIDDEN_MS: Final = 12 * 3_600_000  # The maximum of a delivery.
FAR_S: Final = 20 * 86_400  # Until the first delayed message is due.
SPREAD_S: Final = 86_400  # Between the first and the last delayed message.
BODY: Final = b"x" * 128
FAULTS: Final = ("kill", "kill-all", "stop", "stop-all", "transfer")


class Senders:
    """Clients that send one message after the other, with the times of successful answers."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self.ok_at: list[float] = []
        self.errors: list[str] = []
        self._names = map(str, itertools.count())

    async def run(self) -> None:
        async with api(self._endpoint) as client:
            while True:
                await self._send(client)
                await asyncio.sleep(PAUSE_S)

    async def _send(self, client: Api) -> None:
        try:
            # A unique key: after a lost answer, the broker finds the repeated message by it.
            answer = await client.send(message("bench", BODY, message_id=next(self._names)))
        except grpc.aio.AioRpcError as error:
            self.errors.append(error.code().name)
            return
        if answer.status.code == v2.OK:
            self.ok_at.append(time.monotonic())
        else:
            self.errors.append(v2.Code.Name(answer.status.code))

    def longest_gap_s(self, since: float) -> float:
        """Return the longest time without an OK. The first gap begins at the OK before `since`."""
        before = [at for at in self.ok_at if at <= since][-1:]
        times = [*before, *(at for at in self.ok_at if at > since)]
        return max(later - earlier for earlier, later in itertools.pairwise(times))


async def fault(group: ReplicatedStandalone, kind: str) -> list[int]:
    """Apply a fault to the master; return the processes that are stopped."""
    if kind == "transfer":
        await asyncio.to_thread(group.transfer)
        return []
    supervisor, broker, *helpers = group.pids(group.master())
    if kind == "kill":
        send_signal([broker], signal.SIGKILL)
        return []
    if kind == "kill-all":
        send_signal([supervisor, broker], signal.SIGKILL)
        return []
    stopped = [broker, *helpers] if kind == "stop" else [supervisor, broker, *helpers]
    send_signal(stopped, signal.SIGSTOP)
    return stopped


async def measure_faults(running: Standalone, kind: str, count: int) -> dict[str, Any]:
    group = ReplicatedStandalone(running)
    senders = Senders(running.grpc)
    gaps_s: list[float] = []
    await group.in_sync()
    async with asyncio.TaskGroup() as tasks:
        runs = [tasks.create_task(senders.run()) for _ in range(SENDERS)]
        await asyncio.sleep(SETTLE_S)
        began = time.monotonic()
        await asyncio.sleep(QUIET_S)
        quiet_s = senders.longest_gap_s(began)
        for _ in range(count):
            epoch = (await asyncio.to_thread(group.status))["epoch"]
            began = time.monotonic()
            stopped = await fault(group, kind)
            if stopped:
                await until_epoch(group, epoch + 1)
                await asyncio.sleep(SETTLE_S)
                send_signal(stopped, signal.SIGCONT)
            await group.in_sync(after_epoch=epoch)
            await asyncio.sleep(SETTLE_S)
            gaps_s.append(senders.longest_gap_s(began))
            print(f"{kind}: {gaps_s[-1]:.3f} s", file=sys.stderr)
        for run in runs:
            run.cancel()
    ordered = sorted(gaps_s)
    return {
        "fault": kind,
        "count": count,
        "p50_s": round(statistics.median(ordered), 3),
        "p99_s": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 3),
        "without_a_fault_s": round(quiet_s, 3),
        "sent": len(senders.ok_at),
        "errors": {name: senders.errors.count(name) for name in sorted(set(senders.errors))},
        "reasons": [one["reason"] for one in group.status()["history"]],
    }


async def until_epoch(group: ReplicatedStandalone, epoch: int) -> None:
    """Wait for an epoch, which only the controller reports."""
    while (await asyncio.to_thread(group.status)).get("epoch", 0) < epoch:  # noqa: ASYNC110
        await asyncio.sleep(0.1)


async def put_in_flight(endpoint: str, count: int) -> None:
    """Send `count` messages and receive them with an invisible duration beyond the benchmark."""
    received = 0

    async def take(client: Api) -> None:
        nonlocal received
        while received < count:
            found = await client.receive("held", "bench", invisible_ms=HIDDEN_MS)
            received += len(found)

    async with api(endpoint, call_s=CALL_S) as client:
        await send_all(client, [("held", 0)] * count)
        await asyncio.gather(*(take(client) for _ in range(FILLERS)))


async def put_timers(endpoint: str, count: int) -> None:
    """Send `count` messages that are due in weeks, spread over a day."""
    first_s = int(time.time()) + FAR_S
    due_ms = [(first_s + number * SPREAD_S // count) * 1000 for number in range(count)]
    async with api(endpoint, call_s=CALL_S) as client:
        await send_all(client, [("delayed", each) for each in due_ms])


async def send_all(client: Api, wanted: Sequence[tuple[str, int]]) -> None:
    """Send a message for each topic and due time (ms since 1970; 0: now), many per call."""
    starts = iter(range(0, len(wanted), AT_ONCE))

    async def fill() -> None:
        for start in starts:
            some = wanted[start : start + AT_ONCE]
            answer = await client.send(
                *(
                    message(topic, BODY, message_id=str(start + number), due_at_ms=due_ms)
                    for number, (topic, due_ms) in enumerate(some)
                )
            )
            assert answer.status.code == v2.OK, answer.status

    await asyncio.gather(*(fill() for _ in range(FILLERS)))


def measure_in_flight(
    running: Standalone, kind: str, count: int, *, in_flight: int, timers: int
) -> dict[str, Any]:
    """Measure faults of a broker group with many deliveries in flight and many timers."""
    running.put("topics/held", queues=16)
    running.put("topics/delayed", messageType="DELAY", queues=16)
    asyncio.run(put_in_flight(running.grpc, in_flight))
    asyncio.run(put_timers(running.grpc, timers))
    result = asyncio.run(measure_faults(running, kind, count))
    left = running.lag("bench")
    assert left == in_flight, f"{left} of {in_flight} are in flight afterwards"
    return {"in_flight": in_flight, "timers": timers, **result}


def measure_rates(messages: int, turns: int, folder: Path) -> dict[str, Any]:
    """Measure one replica and three in turn; return medians and the ratio of each turn."""
    rates: dict[int, list[float]] = {1: [], 3: []}
    cpu_us: dict[int, list[float]] = {1: [], 3: []}
    with (
        standalone(folder / "one", start_s=START_S) as one,
        standalone(folder / "three", *FLAGS, start_s=START_S) as three,
    ):
        asyncio.run(ReplicatedStandalone(three).in_sync())
        servers = {1: one, 3: three}
        for server in servers.values():
            server.put("topics/bench", queues=4)
            h2load(server.grpc, SEND, send_request("bench"), WARM_UP, folder)
        for turn in range(turns):
            # The order alternates, so that other load on the machine affects both.
            for replicas, server in sorted(servers.items(), reverse=bool(turn % 2)):
                before_s = cpu_seconds(server.process.pid)
                done = h2load(server.grpc, SEND, send_request("bench"), messages, folder)
                rates[replicas].append(done["per_second"])
                used_s = cpu_seconds(server.process.pid) - before_s
                cpu_us[replicas].append(used_s / messages * 1e6)
    ratios = [mine / base for mine, base in zip(rates[3], rates[1], strict=True)]
    return {
        "messages_a_turn": messages,
        "turns": turns,
        "per_second": {str(n): round(statistics.median(rates[n])) for n in rates},
        "ratio": round(statistics.median(ratios), 2),
        "ratios": [round(ratio, 2) for ratio in ratios],
        "cpu_us_a_message": {str(n): round(statistics.median(cpu_us[n])) for n in cpu_us},
        "ratio_of_cpu": round(sum(cpu_us[3]) / sum(cpu_us[1]), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=["faults", "in-flight", "rates"])
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--fault", choices=FAULTS, default="kill")
    parser.add_argument("--in-flight", type=int, default=1_000_000)
    parser.add_argument("--timers", type=int, default=1_000_000)
    parser.add_argument("--messages", type=int, default=MESSAGES)
    parser.add_argument("--turns", type=int, default=7)
    arguments = parser.parse_args()
    load = [round(average, 1) for average in os.getloadavg()]
    result: dict[str, Any] = {"bench": "failover", "cpus": os.cpu_count(), "load_before": load}
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name).resolve()
        if arguments.what in {None, "faults"}:
            with standalone(folder / "data", *FLAGS, start_s=START_S) as running:
                running.put("topics/bench", queues=4)
                result["faults"] = asyncio.run(
                    measure_faults(running, arguments.fault, arguments.count)
                )
        if arguments.what == "in-flight":
            with standalone(folder / "held", *FLAGS, start_s=START_S) as running:
                running.put("topics/bench", queues=4)
                result["in_flight"] = measure_in_flight(
                    running,
                    arguments.fault,
                    arguments.count,
                    in_flight=arguments.in_flight,
                    timers=arguments.timers,
                )
        if arguments.what in {None, "rates"}:
            result["rates"] = measure_rates(arguments.messages, arguments.turns, folder)
    result["load_after"] = [round(average, 1) for average in os.getloadavg()]
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
