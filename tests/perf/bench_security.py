"""What do users and quotas cost the others?

`modes`: h2load sends with one signed header, which the proxy's cache knows. The mode of one running
standalone changes between off and on, so the runs of a pair meet the same process. Gives the CPU
time of a send for each process, and the ratio of on to off with its interval.

`tenant`: the latency of an honest user, alone and beside a tenant that offers ten times its limit
(`tidemill quota set`) in an open loop. Gives the percentiles of both, and how many messages of the
tenant passed.

    python -m tests.perf.bench_security [--pairs 7] [--messages 60000]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.perf.bench_end_to_end import (
    Meter,
    build_load,
    h2load,
    load_command,
    run_load,
    send_request,
)
from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, standalone
from tests.support.worlds.access_world import signed
from tools.bench_compare import interval

SEND = "/apache.rocketmq.v2.MessagingService/SendMessage"
TOPIC = "bench"
LATENCY = {"topic": "latency", "group": "latency"}
LIMIT = 200  # messages per second of the tenant
TIMES = 10  # the tenant offers this many times its limit
TENANT_S = 10


class Secured:
    """A standalone with users, whose commands need no token."""

    def __init__(self, running: Standalone, home: Path) -> None:
        self.running = running
        self._home = home

    def run(self, *arguments: str) -> Any:
        """Run a command line; return the JSON that it prints."""
        line = [sys.executable, "-m", "tidemill", "--admin", self.running.admin, "-o", "json"]
        environment = os.environ | {"HOME": str(self._home)}
        ended = subprocess.run(
            [*line, *arguments], env=environment, capture_output=True, text=True, check=True
        )
        return json.loads(ended.stdout)

    def user(self, name: str, *rights: str) -> dict[str, str]:
        """Create a user; return the headers of its calls."""
        return signed(name, self.run("user", "create", name, *rights)["secret"])


def measure_modes(
    server: Secured, headers: Mapping[str, str], folder: Path, *, messages: int, pairs: int
) -> dict[str, Any]:
    """Measure sends with the mode off and on in turn."""
    pids = {name: process.pid for name, process in server.running.processes.items()}
    request = send_request(TOPIC)
    found: dict[str, dict[str, list[float]]] = {mode: defaultdict(list) for mode in ("off", "on")}
    for number in range(pairs):
        for mode in ("off", "on") if number % 2 else ("on", "off"):
            server.run("security", *(["enable"] if mode == "on" else ["disable", "--yes"]))
            h2load(server.running.grpc, SEND, request, 2_000, folder, headers)
            meter = Meter(pids)
            rate = h2load(server.running.grpc, SEND, request, messages, folder, headers)
            found[mode]["per_second"].append(rate["per_second"])
            for name, used in meter.per_million(messages).items():
                found[mode][f"{name}_cpu_us"].append(used)
            found[mode]["all_cpu_us"].append(
                sum(found[mode][f"{name}_cpu_us"][-1] for name in pids)
            )
    ratios = {
        name: [on / off for on, off in zip(values, found["off"][name], strict=True) if off]
        for name, values in found["on"].items()
    }
    return {
        mode: {name: statistics.median(values) for name, values in figures.items()}
        for mode, figures in found.items()
    } | {
        "on_to_off": {
            name: {
                "median": round(statistics.median(values), 3),
                "interval": [round(edge, 3) for edge in interval(values)],
            }
            for name, values in ratios.items()
            if len(values) == pairs
        }
    }


def measure_tenant(
    server: Secured, load: Path, honest: Mapping[str, str], tenant: Mapping[str, str], pairs: int
) -> list[dict[str, Any]]:
    """Measure the honest user's latency alone and beside the tenant, in turn."""
    address = server.running.grpc
    server.run("quota", "set", "--user=tenant", f"--messages={LIMIT}")
    flags = {
        "topic": "tenant",
        "messages": LIMIT * TIMES * TENANT_S,
        "every": f"{1_000_000 // (LIMIT * TIMES)}us",
    }

    def is_limited() -> bool:
        few = {"topic": "tenant", "messages": 3 * LIMIT, "every": "200us"}
        return len(run_load(load, "offer", address, tenant, **few)["answers"]) > 1

    eventually(is_limited)
    runs = []
    for _ in range(pairs):
        alone = run_load(load, "latency", address, honest, messages=400, **LATENCY)
        line = load_command(load, "offer", address, tenant, flags)
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
            beside = run_load(load, "latency", address, honest, messages=400, **LATENCY)
            output, _ = process.communicate()
        offered = json.loads(output)
        passed = offered["answers"]["OK"] / (LIMIT * offered["seconds"])
        runs.append(
            {"alone": alone, "beside": beside, "tenant": offered, "passed_to_limit": passed}
        )
    return runs


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=60_000)
    parser.add_argument("--pairs", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name).resolve()
        load = build_load(folder)
        with standalone(folder / "data") as running:
            server = Secured(running, folder)
            for topic in (TOPIC, LATENCY["topic"], "tenant"):
                server.run("topic", "create", topic)
            server.run("group", "create", LATENCY["group"])
            bench = server.user("bench", f"--producer={TOPIC}")
            honest = server.user("honest", "--producer=latency", "--consumer=latency:latency")
            tenant = server.user("tenant", "--producer=tenant")
            modes = measure_modes(
                server, bench, folder, messages=arguments.messages, pairs=arguments.pairs
            )
            server.run("security", "enable")
            beside = measure_tenant(server, load, honest, tenant, 3)
    result = {"bench": "security", "cpus": os.cpu_count(), "modes": modes, "tenant": beside}
    json.dump(result, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
