"""The JSON of timers, which are pending delayed messages."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from tidemill.admin.json.schema import BROKER, EXACT_MAX, NEXT_PAGE, UNREACHABLE, IsoTime, Schema


class TimerStateView(StrEnum):
    """What became of a delayed message."""

    PENDING = "PENDING"
    DELIVERED = "DELIVERED"
    CANCELLED = "CANCELLED"
    DROPPED = "DROPPED"
    QUARANTINED = "QUARANTINED"


class TimerView(Schema):
    """A delayed message; what it says of itself is missing when its record is gone."""

    timer_id: int = Field(description="Its number, which another broker group may have as well.")
    broker: str = BROKER
    state: TimerStateView = Field(description="What became of it.")
    topic: str | None = Field(None, description="Where it is due; missing: that is deleted.")
    queue_id: int = Field(description="The queue in which it will be.")
    due_at_ms: int = Field(description="When it is delivered (Unix, ms).")
    scheduled_at_ms: int = Field(description="When it was stored (Unix, ms).")
    size: int = Field(description="Bytes that it takes in the log.")
    message_id: str | None = Field(None, description="Id of the message.")
    tag: str | None = Field(None, description="Tag of the message.")
    keys: list[str] = Field([], description="Keys of the message.")
    born_at_ms: int | None = Field(None, description="When its producer made it (Unix, ms).")
    born_host: str | None = Field(None, description="Host of its producer.")


class TimerPageView(Schema):
    """Some pending timers, those due first first; `nextPageToken` asks for those after them."""

    timers: list[TimerView] = Field(description="The timers of this page.")
    unreachable: list[str] | None = UNREACHABLE
    next_page_token: str | None = NEXT_PAGE


class RescheduleRequest(Schema):
    """When a timer is to be due instead: exactly one of `dueAtMs`, `dueAt` and `delayMs`."""

    due_at_ms: int | None = Field(
        None, ge=-EXACT_MAX, le=EXACT_MAX, strict=True, description="At this time (Unix, ms)."
    )
    due_at: IsoTime | None = Field(None, description="The same, as a time with its zone.")
    delay_ms: int | None = Field(
        None, ge=0, le=EXACT_MAX, strict=True, description="So long from now."
    )
    expected_due_at_ms: int | None = Field(
        None,
        ge=-EXACT_MAX,
        le=EXACT_MAX,
        description="Refuse with a conflict when it is due at another time by now (Unix, ms).",
    )
    expected_due_at: IsoTime | None = Field(None, description="The same, as a time with its zone.")

    @model_validator(mode="after")
    def one_time(self) -> Self:
        """Accept exactly one time."""
        times = (self.due_at_ms, self.due_at, self.delay_ms)
        if sum(time is not None for time in times) != 1:
            raise ValueError("give either dueAtMs (or dueAt) or delayMs")
        if self.expected_due_at_ms is not None and self.expected_due_at is not None:
            raise ValueError("give at most one of expectedDueAtMs and expectedDueAt")
        return self
