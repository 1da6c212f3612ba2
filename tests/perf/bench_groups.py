"""What do several broker groups cost a proxy that serves as much as with one?

    rates     3 groups against 1, both up side by side and measured in turn, so that both have the
              same machine: sends a second, receives with acks a second, and CPU of the processes
    idle      one consumer that gets nothing, polls of 2 and of 20 s, at 1, 3, 16 and 64 groups:
              requests to brokers a second and group, to be at most 1

On few cores several groups cannot be faster than one, since brokers and proxy share them: `rates`
asks that they are not slower by more than 15 %. On a machine that others use, the ratio of the CPU
that all turns took says more than that of the rates. Sends are replayed by h2load, receives by the
Go program in tests/perf/load. `python -m tests.perf.bench_groups [rates|idle]`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.perf import bench_polling
from tests.perf.bench_end_to_end import Meter, build_load, h2load, run_load, send_request
from tests.support.processes.processes import Standalone, standalone

SEND = "/apache.rocketmq.v2.MessagingService/SendMessage"
GROUPS = 3
CONSUMERS = 48
MESSAGES = 20_000  # a turn: a second or two
IDLE_POLLS_S = (2, 20)
IDLE_S = 40  # at least two of the longest polls
IDLE_GROUPS = (1, 3, 16, 64)
# A broker takes about 0.8 s of CPU to start, nearly all of it imports, and 64 share two cores.
START_S = 300.0


def send(server: Standalone, messages: int, folder: Path) -> float:
    """Return sends a second."""
    return h2load(server.grpc, SEND, send_request("bench"), messages, folder)["per_second"]


def receive(server: Standalone, load: Path, messages: int, group: str) -> float:
    """Return receives a second, in batches of 32, each acked."""
    done = run_load(
        load,
        "receive",
        server.grpc,
        topic="bench",
        group=group,
        messages=messages,
        consumers=CONSUMERS,
    )
    return float(done["per_second"])


def measure_rates(messages: int, turns: int, folder: Path) -> dict[str, Any]:
    """Measure one group and several in turn; return medians, and the ratio of each turn."""
    load = build_load(folder)
    rates: dict[str, dict[int, list[float]]] = {"send": {}, "receive": {}}
    cpu: dict[str, dict[int, Counter[str]]] = {"send": {}, "receive": {}}
    with (
        standalone(folder / "one") as one,
        standalone(folder / "several", f"--groups={GROUPS}") as several,
    ):
        servers = {1: one, GROUPS: several}
        for server in servers.values():
            server.put("topics/bench", queues=4)
            server.put("groups/readers")
            send(server, 2_000, folder)
            receive(server, load, 2_000, "readers")
        for turn in range(turns):
            # The other one first each time: what the machine does meanwhile hits both.
            for groups, server in sorted(servers.items(), reverse=bool(turn % 2)):
                pids = {name: process.pid for name, process in server.processes.items()}

                def measure(what: str, do: Callable[[], float]) -> None:
                    meter = Meter(pids)  # noqa: B023  # called at once
                    rates[what].setdefault(groups, []).append(do())  # noqa: B023
                    used = meter.per_million(messages * turns)
                    cpu[what].setdefault(groups, Counter()).update(used)  # noqa: B023

                measure("send", lambda: send(server, messages, folder))  # noqa: B023
                measure("receive", lambda: receive(server, load, messages, "readers"))  # noqa: B023
    found: dict[str, Any] = {"groups": GROUPS, "messages_a_turn": messages, "turns": turns}
    for what, each in rates.items():
        used = {groups: sum(parts.values()) for groups, parts in cpu[what].items()}
        ratios = [mine / base for mine, base in zip(each[GROUPS], each[1], strict=True)]
        found[what] = {
            "per_second_1": round(statistics.median(each[1])),
            f"per_second_{GROUPS}": round(statistics.median(each[GROUPS])),
            "ratio": round(statistics.median(ratios), 2),
            "ratios": [round(ratio, 2) for ratio in ratios],
            "ratio_of_cpu": round(used[1] / used[GROUPS], 2),
            "cpu_s_per_million": {
                str(groups): {name: round(value, 1) for name, value in parts.items()}
                for groups, parts in cpu[what].items()
            },
        }
    return found


async def measure_idle(running: Standalone, poll_s: int) -> float:
    """Return requests to brokers a second of one consumer that gets nothing."""
    async with bench_polling.stub(running.grpc) as reader:
        await bench_polling.receive(reader, poll_s=1)
        before = bench_polling.polls_of_brokers(running)
        began_s = time.monotonic()
        while time.monotonic() - began_s < IDLE_S:
            await bench_polling.receive(reader, poll_s=poll_s)
        took_s = time.monotonic() - began_s
        return (bench_polling.polls_of_brokers(running) - before) / took_s


def measure_all_idle(counts: list[int], folder: Path) -> list[dict[str, Any]]:
    """Measure at so many broker groups each."""
    found = []
    for groups in counts:
        began_s = time.monotonic()
        at = folder / f"idle-{groups}"
        with standalone(at, f"--groups={groups}", start_s=START_S) as running:
            start_s = time.monotonic() - began_s
            bench_polling.prepare(running)
            for poll_s in IDLE_POLLS_S:
                calls = asyncio.run(measure_idle(running, poll_s))
                found.append(
                    {
                        "groups": groups,
                        "poll_s": poll_s,
                        "start_s": round(start_s, 1),
                        "calls_per_second": round(calls, 2),
                        "calls_per_second_and_group": round(calls / groups, 3),
                    }
                )
                print(found[-1], file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=["rates", "idle"])
    parser.add_argument("--messages", type=int, default=MESSAGES)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--groups", type=int, nargs="*", default=IDLE_GROUPS)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"bench": "groups", "cpus": os.cpu_count()}
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name).resolve()
        if arguments.what in {None, "rates"}:
            result["rates"] = measure_rates(arguments.messages, arguments.turns, folder)
        if arguments.what in {None, "idle"}:
            result["idle"] = measure_all_idle(list(arguments.groups), folder)
    json.dump(result, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
