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

EXACT_MAX = 2**53  # above it a number of JSON need not be what was written
Millis = Annotated[int, Field(ge=1, le=366 * 24 * 3600 * 1000)]


def _whole(text: str) -> str:
    """Refuse halves of characters, which JSON can write and nothing else can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("it holds half a character (a lone surrogate)") from None
    return text


Text = Annotated[str, AfterValidator(_whole)]
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_DATE_TIME = TypeAdapter[datetime](AwareDatetime)


def _iso(value: object) -> object:
    if not isinstance(value, str) or value.strip().lstrip("+-").replace(".", "").isdecimal():
        raise ValueError("write a time with its zone, such as 2027-01-01T08:00:00Z")
    return value


def millis_of(at: datetime) -> int:
    """Return an instant in ms; what is finer counts up, so that nothing comes early."""
    return -((_EPOCH - at) // _MILLISECOND)


def _instant_ms(value: object) -> object:
    if isinstance(value, str) and not value.removeprefix("-").isdecimal():
        return millis_of(_DATE_TIME.validate_python(_iso(value)))
    return value


# A time as people write it, with its zone.
IsoTime = Annotated[AwareDatetime, BeforeValidator(_iso)]
# In a query: either way of writing it.
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
# Of any list or map of a request, looked at before what it holds: each wrong item is an error by
# itself, of half a kilobyte. What is allowed is less.
ITEMS_MAX = 1_000
FIELDS_MAX = 64  # of an object with known fields, the unknown ones included


def _at_most(value: object) -> object:
    if isinstance(value, list | dict) and len(value) > ITEMS_MAX:
        raise ValueError(f"it has at most {ITEMS_MAX} items, not {len(value)}")
    return value


Few = BeforeValidator(_at_most)


class Schema(BaseModel):
    """Fields in camelCase; an unknown one is an error, since it is a misspelt known one."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def few_fields(cls, value: object) -> object:
        """Refuse many unknown fields at once."""
        if isinstance(value, dict) and len(value) > FIELDS_MAX:
            raise ValueError(f"it has {len(value)} fields; none has as many")
        return value


BROKER = Field(description="Name of its broker group.")
UNREACHABLE = Field(
    None,
    description="Broker groups that could not be asked: what they have is missing here. Missing"
    " where all have answered.",
)
NEXT_PAGE = Field(None, description="`pageToken` of the next page; missing on the last one.")
