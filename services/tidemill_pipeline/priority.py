"""CPU priority of a job that shares a machine with brokers."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Final

LOW_NICE: Final = 10  # On a busy machine: a tenth of the CPU time of a normal process.


class Priority(StrEnum):
    """CPU priority of a job and its child processes."""

    NORMAL = "normal"
    LOW = "low"
    IDLE = "idle"


def lower_priority(priority: Priority) -> None:
    """Lower the priority of this process and its future children. This cannot be undone.

    `IDLE` uses only idle CPU time: any other process runs first, and on a busy machine the job
    waits. Outside Linux, `IDLE` is the lowest nice value.
    """
    if priority is Priority.LOW:
        os.nice(LOW_NICE)
    elif priority is Priority.IDLE:
        if hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        else:
            os.nice(19)
