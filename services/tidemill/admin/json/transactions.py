"""The JSON of transactions: half messages and their results."""

from __future__ import annotations

from pydantic import Field, StrictInt

from tidemill.admin.json.schema import (
    BROKER,
    BY,
    DRY_RUN,
    EXACT_MAX,
    NEXT_PAGE,
    UNREACHABLE,
    AnyCaseEnum,
    Schema,
    Text,
)


class TransactionStateView(AnyCaseEnum):
    """The state of a transaction. All states but OPEN are final."""

    OPEN = "OPEN"
    COMMITTED = "COMMITTED"
    ROLLED_BACK = "ROLLED_BACK"
    EXPIRED = "EXPIRED"
    RECOVERED = "RECOVERED"


class ListedTransactionState(AnyCaseEnum):
    """The states of which there are lists."""

    OPEN = "OPEN"
    EXPIRED = "EXPIRED"


class TransactionView(Schema):
    """A transaction: a half message, and its result."""

    transaction_id: str | None = Field(
        None, description="Id of the transaction. Missing while its message is not readable."
    )
    broker: str = BROKER
    state: TransactionStateView = Field(
        description="OPEN: there is no decision yet. EXPIRED: no producer decided in time, and the"
        " message is on `%DLQ%HALF`. RECOVERED: it had expired, and its message is open again under"
        " another id."
    )
    topic: str | None = Field(None, description="Target topic. Missing if it is unknown.")
    topic_deleted: bool = Field(False, description="Whether the topic was deleted.")
    message_id: str | None = Field(None, description="Id of the message.")
    client_id: str | None = Field(
        None, description="Client that sent the half message. Missing if an operator recovered it."
    )
    sent_at_ms: int | None = Field(
        None, description="Time of the send, or of the recovery (Unix, ms)."
    )
    checks: int = Field(description="Checks that producers got.")
    checks_max: int = Field(description="Checks after which the message expires.")
    next_check_at_ms: int | None = Field(
        None, description="Time of the next check (Unix, ms). Only of an open transaction."
    )
    ended_at_ms: int | None = Field(
        None, description="Time of the final state (Unix, ms). Missing of an open transaction."
    )


class TransactionPageView(Schema):
    """A page of transactions, the oldest first."""

    transactions: list[TransactionView] = Field(description="The transactions of this page.")
    unreachable: list[str] | None = UNREACHABLE
    next_page_token: str | None = NEXT_PAGE


class TransactionChangeView(Schema):
    """A change of a transaction."""

    dry_run: bool = DRY_RUN
    by: str = BY
    state_before: TransactionStateView = Field(description="State before the change.")
    transaction: TransactionView = Field(
        description="The transaction after the change. In a dry run: as it is."
    )
    recovered: TransactionView | None = Field(
        None, description="The open transaction with the recovered message, under its new id."
    )
    has_producer: bool | None = Field(
        None,
        description="Only of a check: whether a producer of the topic is connected. Without one the"
        " check waits for a producer.",
    )


class TransactionRecoveryRequest(Schema):
    """The expired transactions to recover."""

    topic: Text = Field(max_length=127, description="Topic of the transactions.")
    older_than_ms: StrictInt = Field(
        0,
        ge=0,
        le=EXACT_MAX,
        description="Only transactions that were sent longer ago, in ms. Default: all of them.",
    )


class TransactionRecoveryView(Schema):
    """The expired transactions of a topic that are recovered."""

    dry_run: bool = DRY_RUN
    by: str = BY
    topic: str = Field(description="Topic of the transactions.")
    count: int = Field(
        description="Number of recovered transactions, at most 1,000. In a dry run: of those that"
        " would be recovered."
    )
    transactions: list[TransactionView] = Field(
        description="The first 20 of them, as they were before."
    )
    has_more: bool = Field(
        description="Whether more transactions than these are expired. Repeat the call for them."
    )
    stopped_by: str | None = Field(
        None, description="Why the recovery ended early, such as a full disk."
    )
    unreachable: list[str] | None = UNREACHABLE
