"""The rate limit of a task, and the share of a machine that a job leaves to others."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import pytest

from tidemill_pipeline.pace import Pace
from tidemill_pipeline.priority import LOW_NICE, Priority, lower_priority


class SleepClock:
    """A clock that advances with each sleep."""

    def __init__(self) -> None:
        self.now_s = 5.0
        self.slept_s: list[float] = []

    def sleep(self, duration_s: float) -> None:
        self.slept_s.append(duration_s)
        self.now_s += duration_s

    def monotonic(self) -> float:
        return self.now_s


def test_a_rate_is_of_all_so_far() -> None:
    time = SleepClock()
    pace = Pace(100.0, sleep_s=time.sleep, monotonic_s=time.monotonic)
    pace.keep(50)
    pace.keep(80)
    time.now_s += 10  # Other work took long: the task makes up for almost none of it.
    pace.keep(90)
    assert time.slept_s == pytest.approx([0.5, 0.3])
    pace.keep(200)
    assert time.slept_s == pytest.approx([0.5, 0.3, 1.0])


def test_sends_without_a_rate_do_not_wait() -> None:
    time = SleepClock()
    Pace(None, sleep_s=time.sleep, monotonic_s=time.monotonic).keep(1_000_000)
    assert not time.slept_s


@pytest.mark.parametrize(
    ("priority", "policy", "nice"),
    [
        (Priority.NORMAL, os.SCHED_OTHER, 0),
        (Priority.LOW, os.SCHED_OTHER, LOW_NICE),
        (Priority.IDLE, os.SCHED_IDLE, 0),
    ],
)
def test_a_process_gives_way(priority: Priority, policy: int, nice: int) -> None:
    """Runs in a separate process, as a process cannot undo it."""
    before = os.nice(0)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send_claim, args=(priority, theirs))
    process.start()
    found = ours.recv()
    process.join()
    assert found == (policy, min(before + nice, 19))


def _send_claim(priority: Priority, pipe: Any) -> None:
    lower_priority(priority)
    pipe.send((os.sched_getscheduler(0), os.nice(0)))
