"""The JSON of quotas."""

from __future__ import annotations

from pydantic import Field, StrictInt

from tidemill.admin.json.schema import NEXT_PAGE, AnyCaseEnum, Schema
from tidemill.security.quotas import LIMIT_MAX, STOCK_MAX


class QuotaKindView(AnyCaseEnum):
    """The kind of a subject with a quota."""

    USER = "user"
    CLIENT = "client"
    TOPIC = "topic"
    PREFIX = "prefix"
    GROUP = "group"


class QuotaFields(Schema):
    """The limits of a subject."""

    publish_messages_per_s: StrictInt = Field(
        0, ge=0, le=LIMIT_MAX, description="Sent messages per second. Default: 0, no limit."
    )
    publish_bytes_per_s: StrictInt = Field(
        0, ge=0, le=LIMIT_MAX, description="Sent bytes per second. Default: 0, no limit."
    )
    dispatch_messages_per_s: StrictInt = Field(
        0,
        ge=0,
        le=LIMIT_MAX,
        description="Delivered messages per second, of a consumer group. Default: 0, no limit.",
    )
    dispatch_bytes_per_s: StrictInt = Field(
        0,
        ge=0,
        le=LIMIT_MAX,
        description="Delivered bytes per second, of a consumer group. Default: 0, no limit.",
    )
    stored_bytes: StrictInt = Field(
        0,
        ge=0,
        le=STOCK_MAX,
        description="Bytes of stored messages, of a topic or a prefix. Default: 0, no limit.",
    )
    pending_timers: StrictInt = Field(
        0,
        ge=0,
        le=STOCK_MAX,
        description="Delayed messages that are not due yet, of a topic or a prefix."
        " Default: 0, no limit.",
    )


class QuotaSettings(QuotaFields):
    """The limits of a subject."""

    if_version: StrictInt | None = Field(
        None,
        ge=0,
        description="Change the quota only if it has this version; 0: only if it is new.",
    )


class QuotaView(Schema):
    """A quota."""

    name: str = Field(description="Name of the quota, as metrics and the audit log show it.")
    kind: QuotaKindView = Field(description="Kind of the subject.")
    subject: str = Field(
        description="Name of the user, topic or consumer group, id of the client, or the begin of"
        " topic names."
    )
    publish_messages_per_s: int = Field(description="Sent messages per second; 0: no limit.")
    publish_bytes_per_s: int = Field(description="Sent bytes per second; 0: no limit.")
    dispatch_messages_per_s: int = Field(description="Delivered messages per second; 0: no limit.")
    dispatch_bytes_per_s: int = Field(description="Delivered bytes per second; 0: no limit.")
    stored_bytes: int = Field(description="Bytes of stored messages; 0: no limit.")
    pending_timers: int = Field(description="Delayed messages that are not due yet; 0: no limit.")
    of_deleted_user: bool = Field(
        description="Whether its user was deleted. The quota does not apply to a later user of the"
        " name."
    )
    version: int = Field(description="Version of the security items with its last change.")
    created_at_ms: int = Field(description="Time of its creation, ms since 1970.")
    changed_at_ms: int = Field(description="Time of its last change, ms since 1970.")
    changed_by: str = Field(description="The caller of the last change.")


class QuotaPageView(Schema):
    """A page of quotas."""

    quotas: list[QuotaView] = Field(description="Quotas by name.")
    next_page_token: str | None = NEXT_PAGE


class QuotaDeletionView(Schema):
    """A deleted quota, or one that would be deleted."""

    dry_run: bool = Field(description="Whether nothing has changed.")
    quota: QuotaView = Field(description="The quota before the deletion.")
