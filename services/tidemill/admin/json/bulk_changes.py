"""The JSON of bulk changes: of dead letters and timers, by ids or by a filter."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field, StrictInt, model_validator

from tidemill.admin.json.operations import OperationView
from tidemill.admin.json.schema import (
    BY,
    DRY_RUN,
    EXACT_MAX,
    UNREACHABLE,
    ExclusiveSchema,
    LimitedSize,
    Schema,
    Text,
    given,
)

IDS_MAX: Final = 1_000  # of one call
COUNT_MAX: Final = 2**32 - 1  # a u32 of the broker
ITEM_ID_PATTERN: Final = "^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}:[0-9]{1,18}$"
ItemIds = Annotated[
    list[Annotated[Text, Field(json_schema_extra={"pattern": ITEM_ID_PATTERN})]], LimitedSize
]
BEGINS_OPERATION: Final = "Begins an operation, unless it is a dry run."
_OF_A_FILTER: Final = ("asOfMs", "maxCount", "ratePerSecond")


class BulkRequest(ExclusiveSchema):
    """The items to change: by ids, or by the `filter` of a subclass."""

    exactly_one = ("ids", "filter")
    refused_objects = tuple(given("ids", field) for field in _OF_A_FILTER)

    ids: ItemIds | None = Field(
        None,
        description="Ids of the items, `BROKER:NUMBER`. They are changed at once.",
        examples=[["broker-0:17"]],
        json_schema_extra={"minItems": 1, "maxItems": IDS_MAX},
    )
    as_of_ms: StrictInt | None = Field(
        None,
        ge=1,
        le=EXACT_MAX,
        description="`asOfMs` of the dry run. Items that were stored later stay as they are."
        " Required with a filter, except in a dry run.",
    )
    max_count: StrictInt | None = Field(
        None,
        ge=1,
        le=COUNT_MAX,
        description="If more match, nothing begins. Required with a filter, except in a dry run.",
        examples=[100_000],
    )
    rate_per_second: StrictInt | None = Field(
        None,
        ge=1,
        le=10_000,
        description="Of an operation: most items per second. Default: 2,000 dead letters, or 2,500"
        " timers.",
    )

    @model_validator(mode="after")
    def of_a_filter(self) -> BulkRequest:
        """Reject fields that belong to a filter."""
        given_ = (self.as_of_ms, self.max_count, self.rate_per_second)
        if self.ids is not None and any(one is not None for one in given_):
            raise ValueError("asOfMs, maxCount and ratePerSecond belong to a filter")
        return self


class BulkChangeView(Schema):
    """The results of a bulk change."""

    dry_run: bool = DRY_RUN
    by: str = BY
    count: int = Field(
        description="Number of items that the call has changed. With a filter: that match."
    )
    bytes: int | None = Field(None, description="With a filter: bytes of the messages.")
    as_of_ms: int | None = Field(
        None, description="With a filter: the time of the count, for the change (Unix, ms)."
    )
    operation: OperationView | None = Field(
        None, description="With a filter: the operation. Missing if nothing matches."
    )
    warnings: list[str] | None = Field(
        None,
        description="Of a dry run: what the change would not do as expected. Of an operation: why"
        " a broker group has not begun its part. The other parts run.",
    )
    stopped_by: str | None = Field(
        None, description="Why the call ended early, such as a full disk."
    )
    unreachable: list[str] | None = UNREACHABLE
