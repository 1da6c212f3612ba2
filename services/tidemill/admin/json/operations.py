"""The JSON of operations: bulk changes that run in the background."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from pydantic import Field

from tidemill.admin.json.schema import BY, DRY_RUN, NEXT_PAGE, UNREACHABLE, AnyCaseEnum, Schema

ERRORS_MAX: Final = 100  # of an operation
_EXAMPLE: Final = "broker-0:52326"


class OperationStateView(AnyCaseEnum):
    """The state of an operation. All states but RUNNING are final."""

    RUNNING = "RUNNING"
    DONE = "DONE"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"


BY_IF_KNOWN: Final = Field(None, description=BY.description)


class OperationKindView(StrEnum):
    """The change that an operation makes."""

    REPLAY_DEAD_LETTERS = "REPLAY_DEAD_LETTERS"
    DISCARD_DEAD_LETTERS = "DISCARD_DEAD_LETTERS"
    CANCEL_TIMERS = "CANCEL_TIMERS"
    RESCHEDULE_TIMERS = "RESCHEDULE_TIMERS"
    FIRE_TIMERS = "FIRE_TIMERS"
    APPLY_DEFINITIONS = "APPLY_DEFINITIONS"
    SUPPORT_BUNDLE = "SUPPORT_BUNDLE"


class OperationErrorView(Schema):
    """An item that an operation could not change."""

    id: str = Field(
        description="Id of the dead letter or of the timer, or kind and name of a defined object.",
        examples=["broker-0:17"],
    )
    outcome: str = Field(
        description="Why. TOPIC_DELETED, DAMAGED or TOO_LARGE (for a segment) for a dead letter,"
        " which stays open. QUARANTINED (its message is damaged), TOO_LATE (beyond the maximum"
        " delay) or DAMAGED for a timer, which stays as it is. For a defined object: the reason.",
        examples=["TOO_LATE"],
    )


class OperationPartView(Schema):
    """The part of an operation at one broker group."""

    broker: str = Field(description="Name of the broker group.")
    id: str = Field(description="Id of this part.", examples=[_EXAMPLE])
    state: OperationStateView = Field(description="State of this part.")
    total: int = Field(description="Items that matched when it began.")
    done: int = Field(description="Items that it has changed.")
    failed: int = Field(description="Items that match and that it could not change.")
    ended_at_ms: int | None = Field(None, description="When it ended (Unix, ms).")
    error: str | None = Field(None, description="Why it failed.")


class OperationView(Schema):
    """An operation."""

    id: str = Field(description="Id of the operation: that of its first part.", examples=[_EXAMPLE])
    kind: OperationKindView = Field(description="The change that it makes to each item.")
    group: str | None = Field(
        None, description="Consumer group of the dead letters. Missing for timers."
    )
    topic: str | None = Field(
        None, description="Topic of the timers. Missing for all topics, and for dead letters."
    )
    state: OperationStateView = Field(
        description="RUNNING while one part runs, or while a broker group that may have a part is"
        " `unreachable`. FAILED or CANCELLED if one part is."
    )
    error: str | None = Field(
        None,
        description="Why it failed as a whole. If its admin process has ended or is another one,"
        " its caller, its end and its numbers are unknown and missing.",
    )
    by: str | None = BY_IF_KNOWN
    created_at_ms: int = Field(description="When it began (Unix, ms).")
    ended_at_ms: int | None = Field(
        None, description="When its last part ended (Unix, ms). Missing while it runs."
    )
    total: int | None = Field(None, description="Items that matched when it began.")
    done: int | None = Field(None, description="Items that it has changed.")
    failed: int | None = Field(None, description="Items that match and that it could not change.")
    skipped: int | None = Field(
        None,
        description="Of a finished operation: items that were changed by another call, delivered"
        " or removed before it looked at them.",
    )
    errors: list[OperationErrorView] | None = Field(
        None, description="The first 100 items that it could not change. Missing: none."
    )
    rate_per_second: int | None = Field(
        None, description="Maximum number of items per second. Missing without a limit."
    )
    eta_ms: int | None = Field(
        None,
        description="Shortest time to the end of its known parts at this rate, in ms. Missing if"
        " none of them runs.",
    )
    brokers: list[OperationPartView] = Field(
        [],
        description="Its known parts, by broker group. Empty for an operation of the admin process,"
        " which ends with that process.",
    )
    unreachable: list[str] | None = UNREACHABLE


class OperationPageView(Schema):
    """A page of operations, the newest first."""

    operations: list[OperationView] = Field(description="The operations of this page.")
    unreachable: list[str] | None = UNREACHABLE
    next_page_token: str | None = NEXT_PAGE


class OperationCancelView(Schema):
    """A cancelled operation. Its completed items stay."""

    dry_run: bool = DRY_RUN
    by: str = BY
    operation: OperationView = Field(
        description="The operation after the cancel. In a dry run: as it is."
    )
    warnings: list[str] | None = Field(
        None, description="Why a broker group has not ended its part. Repeat the call."
    )
    unreachable: list[str] | None = UNREACHABLE
