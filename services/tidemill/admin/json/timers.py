"""The JSON of timers, which are pending delayed messages."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, StrictInt

from tidemill.admin.json.schema import (
    BROKER,
    EXACT_MAX,
    NEXT_PAGE,
    UNREACHABLE,
    AnyCaseEnum,
    ExclusiveSchema,
    IsoTime,
    Schema,
)


class TimerStateView(AnyCaseEnum):
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


class TimerCancellationView(TimerView):
    """A cancelled timer."""

    outcome: Literal["DONE", "ALREADY_CANCELLED"] = Field(
        description="ALREADY_CANCELLED: an earlier call has cancelled it. In a dry run: the outcome"
        " that the call would have."
    )


class TimerPageView(Schema):
    """A page of pending timers, ordered by due time."""

    timers: list[TimerView] = Field(description="The timers of this page.")
    unreachable: list[str] | None = UNREACHABLE
    next_page_token: str | None = NEXT_PAGE


class HistogramStep(AnyCaseEnum):
    """The width of a bucket, and with it the time that a histogram covers."""

    SECOND = "1s"
    TEN_MINUTES = "10m"
    HOUR = "1h"
    DAY = "1d"


class TimerTopicView(Schema):
    """The pending timers of a topic."""

    name: str = Field(description="Name of the topic.")
    timers: int = Field(description="Pending timers.")


class TimerPeakView(Schema):
    """The fullest bucket of a histogram."""

    at_ms: int = Field(description="Begin of the bucket (Unix, ms).")
    timers: int = Field(description="Timers due in it.")


class TimerHistogramView(Schema):
    """Pending timers by due time."""

    step: HistogramStep = Field(description="Width of a bucket.")
    step_ms: int = Field(description="Width of a bucket, in ms.")
    as_of_ms: int = Field(description="Time of the count (Unix, ms).")
    from_ms: int = Field(
        description="Begin of the first bucket (Unix, ms). It contains the time of the count."
    )
    counts: list[int] = Field(description="Timers due in each bucket.")
    overdue: int = Field(description="Timers due before the first bucket.")
    later: int = Field(description="Timers due after the last bucket.")
    peak: TimerPeakView | None = Field(None, description="The fullest bucket. Missing: none.")
    topics: list[TimerTopicView] | None = Field(
        None, description="The 20 topics with most timers. Missing in a histogram of one topic."
    )
    unreachable: list[str] | None = UNREACHABLE


class RescheduleRequest(ExclusiveSchema):
    """The new due time of a timer: exactly one of `dueAtMs`, `dueAt` and `delayMs`."""

    exactly_one = ("due_at_ms", "due_at", "delay_ms")
    at_most_one = ("expected_due_at_ms", "expected_due_at")

    due_at_ms: StrictInt | None = Field(
        None, ge=-EXACT_MAX, le=EXACT_MAX, description="New due time (Unix, ms)."
    )
    due_at: IsoTime | None = Field(None, description="The same as a time with a zone.")
    delay_ms: StrictInt | None = Field(
        None, ge=0, le=EXACT_MAX, description="Delay from now, in ms."
    )
    expected_due_at_ms: StrictInt | None = Field(
        None,
        ge=-EXACT_MAX,
        le=EXACT_MAX,
        description="Expected current due time (Unix, ms). Any other time is a conflict.",
    )
    expected_due_at: IsoTime | None = Field(None, description="The same as a time with a zone.")
