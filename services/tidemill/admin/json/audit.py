"""The JSON of the audit log."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field

from tidemill.admin.json.schema import NEXT_PAGE, UNREACHABLE, AnyCaseEnum, Schema


class AuditKindView(AnyCaseEnum):
    """The kinds of records."""

    CHANGE = "change"
    REFUSAL = "refusal"
    ACCESS = "access"


class AuditRecordView(Schema):
    """A change, a refused call, or an access."""

    # During an upgrade, brokers and proxies may have fields that this program does not know.
    model_config = ConfigDict(extra="ignore")

    id: str = Field(
        description="Broker group or process, and a number that grows.", examples=["broker-0:2481"]
    )
    at_ms: int = Field(description="Unix time in ms.", examples=[1_795_750_000_000])
    kind: AuditKindView = Field(
        description="`change`: recorded in the log of the broker group. `refusal`: a call that was"
        " refused, or that the mode `on` would refuse. `access`: a call of a super user, or a read"
        " of message bodies by this API.",
        examples=["change"],
    )
    user: str = Field("", description="Verified user; empty without one.", examples=["ops"])
    via: str = Field(
        "", description="Kind and name of the credential; empty without one.", examples=["token:ci"]
    )
    claimed_user: str | None = Field(
        None,
        description="Name that is not verified: the value of the header Tidemill-User, or the user"
        " or access key of wrong credentials.",
    )
    client_id: str | None = Field(
        None,
        description="Client id of a call of the public service. A record of several calls has that"
        " of the first one.",
        examples=["shop-7@1@0@k2x"],
    )
    address: str = Field(
        "", alias="from", description="Address of the caller.", examples=["10.1.2.3"]
    )
    process: str = Field("", description="Process that received the call.", examples=["admin-0"])
    call: str = Field(
        "",
        description="Method and path template of this API, or a method of the public service.",
        examples=["PUT /topics/{topic}"],
    )
    resource: str = Field("", description="Type and name.", examples=["Topic:orders"])
    action: str = Field("", description="Action on the resource.", examples=["Update"])
    before: dict[str, Any] | None = Field(
        None,
        description="State before a change, at most 4 KiB; fields that differ. `truncatedBytes` is"
        " the size of a larger state.",
        examples=[{"queues": 4}],
    )
    after: dict[str, Any] | None = Field(
        None, description="State after a change, in the same form.", examples=[{"queues": 8}]
    )
    result: str = Field(
        "",
        description="`ok`, `begun` or `failed` for changes; `refused` or `would_refuse` for"
        " refusals; `ok` for accesses.",
        examples=["ok"],
    )
    code: int = Field(
        20_000, description="Code of apache.rocketmq.v2 for the result.", examples=[20_000]
    )
    reason: str = Field("", description="Reason of a refusal or a failure.", examples=[""])
    action_id: str | None = Field(
        None, description="The same in the records before and after an action of a controller."
    )
    count: int | None = Field(
        None, description="Number of equal calls that this record stands for. Changes have none."
    )


class AuditPageView(Schema):
    """Records of all broker groups, proxies and this admin process, the newest first."""

    records: list[AuditRecordView] = Field(description="The records of this page.")
    next_page_token: str | None = NEXT_PAGE
    unreachable: list[str] | None = UNREACHABLE
