"""The JSON of bulk changes of timers."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Self

from pydantic import Field, StrictInt, model_validator

from tidemill.admin.json.bulk_changes import BEGINS_OPERATION, BulkChangeView, BulkRequest
from tidemill.admin.json.schema import EXACT_MAX, ExclusiveSchema, Schema, Text, missing
from tidemill.admin.json.timers import TimerTopicView, TimerView

COUNT_MAX: Final = 1_000_000  # timers of one operation
SPREAD_MS_MAX: Final = 30 * 24 * 3_600_000
_ID: Final = "Id of the timer: its broker group and its number there."
_EXAMPLE: Final = "broker-0:52326"


class TimerOutcomeView(StrEnum):
    """The result of a bulk change of one timer."""

    DONE = "DONE"
    ALREADY_DELIVERED = "ALREADY_DELIVERED"
    ALREADY_CANCELLED = "ALREADY_CANCELLED"
    QUARANTINED = "QUARANTINED"
    DROPPED = "DROPPED"
    NOT_FOUND = "NOT_FOUND"
    TOO_LATE = "TOO_LATE"
    DAMAGED = "DAMAGED"


class TimerFilterView(ExclusiveSchema):
    """Pending timers. A missing field matches all of them; `topic` or `key` is required."""

    refused_objects = (missing("topic", "key"),)

    topic: Text | None = Field(
        None,
        max_length=255,
        description="Topic of the messages. Without a topic, the caller needs its right on all"
        " topics.",
        examples=["payments"],
        min_length=1,
    )
    key: Text | None = Field(
        None,
        max_length=255,
        description="Key of the messages. Needs Sub on the topic, too. Only timers among the newest"
        " 10,000 messages with this key match.",
        min_length=1,
    )
    tag: Text | None = Field(None, min_length=1, max_length=255, description="Tag of the messages.")
    due_from_ms: StrictInt | None = Field(
        None,
        ge=0,
        le=EXACT_MAX,
        description="Due at or after this time (Unix, ms).",
        examples=[1_798_740_000_000],
    )
    due_to_ms: StrictInt | None = Field(
        None,
        ge=1,  # The broker reads 0 as no limit.
        le=EXACT_MAX,
        description="Due before this time (Unix, ms).",
        examples=[1_798_743_600_000],
    )

    @model_validator(mode="after")
    def of_a_topic_or_key(self) -> Self:
        """Reject a filter that would match the timers of all topics."""
        if not self.topic and not self.key:
            raise ValueError("give a topic or a key")
        return self


class TimersRequest(BulkRequest):
    """The timers to change: by ids, or all pending ones that match a filter."""

    filter: TimerFilterView | None = Field(None, description=BEGINS_OPERATION)
    max_count: StrictInt | None = Field(
        None,
        ge=1,
        le=COUNT_MAX,
        description="If more match, nothing begins. Required with a filter, except in a dry run.",
        examples=[100_000],
    )


class RescheduleTimersRequest(TimersRequest):
    """The timers to move, and exactly one of `dueAtMs`, `delayMs` and `shiftMs`."""

    at_most_one = ("due_at_ms", "delay_ms", "shift_ms")
    refused_objects = (*TimersRequest.refused_objects, missing("dueAtMs", "delayMs", "shiftMs"))

    due_at_ms: StrictInt | None = Field(
        None, ge=0, le=EXACT_MAX, description="New due time (Unix, ms). The past means now."
    )
    delay_ms: StrictInt | None = Field(
        None, ge=0, le=EXACT_MAX, description="Delay from the begin of the change, in ms."
    )
    shift_ms: StrictInt | None = Field(
        None,
        ge=-EXACT_MAX,
        le=EXACT_MAX,
        description="Later by this time than each timer is due now, in ms; negative: earlier."
        " Each timer is moved once, even if a broker fails meanwhile.",
        examples=[600_000],
    )
    spread_ms: StrictInt | None = Field(
        None,
        ge=0,
        le=SPREAD_MS_MAX,
        description="Spreads the new due times evenly over this time, in ms.",
    )

    @model_validator(mode="after")
    def of_one_time(self) -> Self:
        """Reject a change without a new due time."""
        if self.due_at_ms is None and self.delay_ms is None and self.shift_ms is None:
            raise ValueError("give one of dueAtMs, delayMs and shiftMs")
        return self


class TimerIdOutcomeView(Schema):
    """The result for one timer."""

    id: str = Field(description=_ID, examples=[_EXAMPLE])
    outcome: TimerOutcomeView | None = Field(
        None,
        description="DONE: changed. With the other outcomes the timer stays as it is. QUARANTINED:"
        " its message is damaged; it can be cancelled. DROPPED: its message is on `%DLQ%TIMER`."
        " TOO_LATE: the new due time is beyond the maximum delay. DAMAGED: restart the broker."
        " Missing: unknown, see `stoppedBy` and `unreachable`.",
    )


class TimerHourView(Schema):
    """Timers that are due in the same hour."""

    from_ms: int = Field(description="Begin of the hour (Unix, ms).")
    timers: int = Field(description="Timers due in it.")


class TimerChangeView(BulkChangeView):
    """The results of a bulk change of timers."""

    outcomes: list[TimerIdOutcomeView] | None = Field(
        None, description="One result for each id, in their order. Missing with a filter."
    )
    topics: list[TimerTopicView] | None = Field(
        None, description="Of a dry run with a filter: the 20 topics with most timers."
    )
    hours: list[TimerHourView] | None = Field(
        None, description="Of a dry run with a filter: the 100 fullest hours, in order of time."
    )
    sample: list[TimerView] | None = Field(
        None, description="Of a dry run with a filter: up to 10 timers, the oldest first."
    )
