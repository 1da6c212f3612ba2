"""The JSON of operations: bulk changes that run in the background."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from tidemill.admin.json.schema import BY, DRY_RUN, NEXT_PAGE, UNREACHABLE, AnyCaseEnum, Schema

_EXAMPLE = "broker-0:52326"


class OperationStateView(AnyCaseEnum):
    """The state of an operation. All states but RUNNING are final."""

    RUNNING = "RUNNING"
    DONE = "DONE"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"


class OperationKindView(StrEnum):
    """The change that an operation makes."""

    REPLAY_DEAD_LETTERS = "REPLAY_DEAD_LETTERS"
    DISCARD_DEAD_LETTERS = "DISCARD_DEAD_LETTERS"
    APPLY_DEFINITIONS = "APPLY_DEFINITIONS"
    SUPPORT_BUNDLE = "SUPPORT_BUNDLE"


class OperationPartView(Schema):
    """The part of an operation at one broker group."""

    broker: str = Field(description="Name of the broker group.")
    id: str = Field(description="Id of this part.", examples=[_EXAMPLE])
    state: OperationStateView = Field(description="State of this part.")
    total: int = Field(description="Items that matched when it began.")
    done: int = Field(description="Items that it has changed.")
    ended_at_ms: int | None = Field(None, description="When it ended (Unix, ms).")
    error: str | None = Field(None, description="Why it failed.")


class OperationView(Schema):
    """An operation."""

    id: str = Field(description="Id of the operation: that of its first part.", examples=[_EXAMPLE])
    kind: OperationKindView = Field(description="The change that it makes to each item.")
    group: str | None = Field(None, description="Consumer group of the dead letters.")
    state: OperationStateView = Field(
        description="RUNNING while one part runs, or while a broker group that may have a part is"
        " `unreachable`. FAILED or CANCELLED if one part is."
    )
    by: str = BY
    created_at_ms: int = Field(description="When it began (Unix, ms).")
    ended_at_ms: int | None = Field(
        None, description="When its last part ended (Unix, ms). Missing while it runs."
    )
    total: int = Field(description="Items that matched when it began.")
    done: int = Field(description="Items that it has changed.")
    skipped: int | None = Field(
        None,
        description="Of a finished operation: items that it did not change. Another call has"
        " changed them, or retention has removed them. A replay also skips dead letters of a"
        " deleted topic, without a body, or too large for a segment. They stay open.",
    )
    failed: int | None = Field(None, description="Items with an error. Missing if none.")
    errors: list[str] | None = Field(
        None, description="Why items could not be changed: the first 100. Missing if none."
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
