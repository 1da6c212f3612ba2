"""Giving way: with which claim to the processors a job runs beside brokers on one machine."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Final

LOW_NICE: Final = 10  # a tenth of what others of one session have where all want more than there is


class Priority(StrEnum):
    """Which claim to the processors a job has, with all that it starts."""

    NORMAL = "normal"
    LOW = "low"
    IDLE = "idle"


def lower_priority(priority: Priority) -> None:
    """Lower the claim of this process, and of those it starts from now on; for good.

    `IDLE` takes only what nobody else wants at that moment: whoever wakes up goes first. A machine
    that is busy for long keeps such a job waiting for as long. Where the system has no such class
    (outside Linux), it is the lowest claim that there is.
    """
    if priority is Priority.LOW:
        os.nice(LOW_NICE)
    elif priority is Priority.IDLE:
        if hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        else:
            os.nice(19)
