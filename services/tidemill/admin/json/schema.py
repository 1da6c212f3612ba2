"""The base class of all JSON models, and the field types that they share."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    WithJsonSchema,
    model_validator,
)
from pydantic.alias_generators import to_camel

EXACT_MAX = 2**53  # JSON parsers may round larger integers
Millis = Annotated[int, Field(ge=1, le=366 * 24 * 3600 * 1000)]


def _whole(text: str) -> str:
    """Reject lone surrogates, which JSON can express but UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text contains half a character (a lone surrogate)") from None
    return text


Text = Annotated[str, AfterValidator(_whole)]
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_DATE_TIME = TypeAdapter[datetime](AwareDatetime)


def _iso(value: object) -> object:
    if not isinstance(value, str) or value.strip().lstrip("+-").replace(".", "").isdecimal():
        raise ValueError("write a time with a zone, such as 2027-01-01T08:00:00Z")
    return value


def millis_of(at: datetime) -> int:
    """Return an instant in ms, rounded up, so that no message is delivered early."""
    return -((_EPOCH - at) // _MILLISECOND)


def _instant_ms(value: object) -> object:
    if isinstance(value, str) and not value.removeprefix("-").isdecimal():
        return millis_of(_DATE_TIME.validate_python(_iso(value)))
    return value


# An ISO 8601 time with a zone.
IsoTime = Annotated[AwareDatetime, BeforeValidator(_iso)]
# A query parameter in ms or ISO 8601.
Instant = Annotated[
    int,
    BeforeValidator(_instant_ms),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "description": "Unix time in ms."},
                {"type": "string", "format": "date-time"},
            ]
        }
    ),
]
# The size limit of each list and map, checked before its items: the error of each wrong item takes
# half a kilobyte. The limits of the rules for messages are lower.
ITEMS_MAX = 1_000
FIELDS_MAX = 64  # of an object, unknown fields included


def _check_size(value: object) -> object:
    if isinstance(value, list | dict) and len(value) > ITEMS_MAX:
        raise ValueError(f"{len(value)} items; at most {ITEMS_MAX} are allowed")
    return value


LimitedSize = BeforeValidator(_check_size)


class Schema(BaseModel):
    """A model with fields in camelCase that rejects unknown fields, since they may be misspelt."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def few_fields(cls, value: object) -> object:
        """Reject an object with too many fields with a single error."""
        if isinstance(value, dict) and len(value) > FIELDS_MAX:
            raise ValueError(f"{len(value)} fields; at most {FIELDS_MAX} are allowed")
        return value


BROKER = Field(description="Name of its broker group.")
BY = Field(description="Name of the caller, as the caller gives it, and its address.")
DRY_RUN = Field(description="Whether this was a dry run without changes.")
MIN_OFFSET = Field(description="Offset of the oldest message in the queue.")
MAX_OFFSET = Field(description="Offset of the next message of the queue.")
UNREACHABLE = Field(
    None,
    description="Unreachable broker groups, whose data is missing here. Missing if all answered.",
)
NEXT_PAGE = Field(None, description="`pageToken` of the next page. Missing on the last page.")
