"""What does it cost a broker to count by topic which timers are due soon?

One engine on a disk in memory, with --timers pending ones of 50 topics over two weeks: CPU time of
a whole count, and of its longest step, for one horizon of a minute, for eight, and for two weeks.

    python -m tests.perf.bench_due_count
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

from tests.support.worlds.timer_world import DAY_MS, MINUTE_MS, TimerWorld
from tidemill.broker.engine.layout import timer_entry
from tidemill.broker.engine.timer.config import TimerConfig
from tidemill.broker.engine.timer.status import TimerState

HORIZONS = {
    "a minute": [MINUTE_MS],
    "eight": [n * MINUTE_MS for n in range(1, 9)],
    "two weeks": [14 * DAY_MS],
}
TOPICS = 50
RUNS = 3  # the middle one counts
MESSAGE_BYTES = 1024


def schedule(world: TimerWorld, count: int) -> None:
    """Let timers wait, without the messages that they are for."""
    chance = np.random.default_rng(1)
    rows = np.zeros(count, timer_entry.DTYPE)
    rows["size"], rows["state"] = MESSAGE_BYTES, TimerState.PENDING
    rows["due"] = world.now_ms + chance.integers(0, 14 * DAY_MS, count)
    rows["topic_id"] = chance.integers(1, TOPICS + 1, count)
    index = world.engine.timers.index
    for begin, part in index.table.put_rows(0, rows):
        index.counts.add_rows(begin, part)


def measure(world: TimerWorld, within_ms: list[int]) -> tuple[float, float]:
    """Return the milliseconds of a count, and of its longest step."""
    counted = world.engine.timers.commands.count_due(within_ms, firing_ms=world.now_ms)
    steps, has_more = [], True
    while has_more:
        began_at_s = time.thread_time()
        has_more = counted.step()
        steps.append((time.thread_time() - began_at_s) * 1000)
    return sum(steps), max(steps)


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--timers", type=int, default=1_000_000)
    options = parser.parse_args()
    world = TimerWorld(timer=TimerConfig())
    schedule(world, options.timers)
    found: dict[str, Any] = {"timers": options.timers}
    for name, within_ms in HORIZONS.items():
        whole, longest = sorted(measure(world, within_ms) for _ in range(RUNS))[RUNS // 2]
        found[name] = {"count_ms": round(whole, 1), "longest_step_ms": round(longest, 2)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
