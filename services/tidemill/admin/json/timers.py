"""The JSON of timers, which are pending delayed messages."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from tidemill.admin.json.schema import BROKER, EXACT_MAX, NEXT_PAGE, UNREACHABLE, IsoTime, Schema


class TimerStateView(StrEnum):
    """The state of a timer."""

    PENDING = "PENDING"
    DELIVERED = "DELIVERED"
    CANCELLED = "CANCELLED"
    DROPPED = "DROPPED"
    QUARANTINED = "QUARANTINED"


class TimerView(Schema):
    """A delayed message. Without its record, the fields of the message are missing."""

    timer_id: int = Field(description="Id of the timer, unique within its broker group.")
    broker: str = BROKER
    state: TimerStateView = Field(description="State of the timer.")
    topic: str | None = Field(None, description="Target topic. Missing if it was deleted.")
    queue_id: int = Field(description="Target queue, from 0.")
    due_at_ms: int = Field(description="Due time (Unix, ms).")
    scheduled_at_ms: int = Field(description="Time of storage (Unix, ms).")
    size: int = Field(description="Size in the log, in bytes.")
    message_id: str | None = Field(None, description="Id of the message.")
    tag: str | None = Field(None, description="Tag of the message.")
    keys: list[str] = Field([], description="Keys of the message.")
    born_at_ms: int | None = Field(
        None, description="Time at which the producer created the message (Unix, ms)."
    )
    born_host: str | None = Field(None, description="Host of the producer.")


class TimerPageView(Schema):
    """A page of pending timers, ordered by due time."""

    timers: list[TimerView] = Field(description="The timers of this page.")
    unreachable: list[str] | None = UNREACHABLE
    next_page_token: str | None = NEXT_PAGE


class RescheduleRequest(Schema):
    """The new due time of a timer: exactly one of `dueAtMs`, `dueAt` and `delayMs`."""

    due_at_ms: int | None = Field(
        None, ge=-EXACT_MAX, le=EXACT_MAX, strict=True, description="New due time (Unix, ms)."
    )
    due_at: IsoTime | None = Field(None, description="The same as a time with a zone.")
    delay_ms: int | None = Field(
        None, ge=0, le=EXACT_MAX, strict=True, description="Delay from now, in ms."
    )
    expected_due_at_ms: int | None = Field(
        None,
        ge=-EXACT_MAX,
        le=EXACT_MAX,
        description="Expected current due time (Unix, ms). Any other time is a conflict.",
    )
    expected_due_at: IsoTime | None = Field(None, description="The same as a time with a zone.")

    @model_validator(mode="after")
    def one_time(self) -> Self:
        """Accept exactly one time."""
        times = (self.due_at_ms, self.due_at, self.delay_ms)
        if sum(time is not None for time in times) != 1:
            raise ValueError("give exactly one of dueAtMs, dueAt and delayMs")
        if self.expected_due_at_ms is not None and self.expected_due_at is not None:
            raise ValueError("give at most one of expectedDueAtMs and expectedDueAt")
        return self
