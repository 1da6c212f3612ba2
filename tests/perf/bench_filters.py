"""How fast does a broker compare messages with a filter, and how long is its longest turn?

A group pops from a topic. One message of a thousand matches. Each pop searches one slice. The
messages have 200 bytes and four properties.

    sql       two predicates on properties; every message is read
    required  the same with a condition on the tag; the broker compares the hash of the tag first
    tag       a tag filter

    python -m tests.perf.bench_filters [--messages 100000]
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from typing import Any

from tests.support.worlds.engine_world import World
from tidemill.broker.server.wire.filters import SqlFilter

SPARSITY = 1_000
FILTERS: dict[str, dict[str, Any]] = {
    "sql": {"sql": "price > 10 AND region = 'eu'"},
    "required": {"sql": "TAGS = 'rare' AND price > 10 AND region = 'eu'"},
    "tag": {"tags": ("rare",)},
}


def world_of(messages: int) -> World:
    """Return a store with messages; one of a thousand matches."""
    world = World(segment_bytes=64 << 20)
    for number in range(0, messages, SPARSITY):
        common = {"price": "12.5", "trace": "0123456789abcdef", "kind": "order"}
        texts = [f"m{number + n}" for n in range(SPARSITY - 1)]
        world.send(*texts, tag="usual", properties=common | {"region": "us"}, size=200)
        world.send("wanted", tag="rare", properties=common | {"region": "eu"}, size=200)
    world.checkpoint()
    return world


def measure(world: World, name: str, messages: int) -> dict[str, float]:
    """Pop all matches; return the CPU time of a message and of the longest slice."""
    found, longest_s = 0, 0.0
    began_s = time.process_time()
    while found < messages // SPARSITY:
        slice_s = time.process_time()
        found += len(world.pop(group=name, **FILTERS[name]))
        longest_s = max(longest_s, time.process_time() - slice_s)
    used_s = time.process_time() - began_s
    return {
        "message_cpu_us": round(used_s / messages * 1e6, 2),
        "per_second": round(messages / used_s),
        "longest_slice_ms": round(longest_s * 1_000, 2),
    }


def measure_compilation() -> float:
    """Return the milliseconds to compile 128 predicates."""
    text = " OR ".join(f"property{number} = 'value {number}'" for number in range(128))
    times = []
    for _ in range(20):
        began_s = time.perf_counter()
        SqlFilter(text)
        times.append(time.perf_counter() - began_s)
    return round(min(times) * 1_000, 2)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    messages = parser.parse_args().messages
    world = world_of(messages)
    gc.freeze()  # Like a process after its start.
    result: dict[str, Any] = {name: measure(world, name, messages) for name in FILTERS}
    result |= {"bench": "filters", "compile_128_predicates_ms": measure_compilation()}
    json.dump(result, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
