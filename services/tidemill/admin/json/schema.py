"""The base class of all JSON models, and the field types that they share."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from enum import StrEnum
from itertools import combinations
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    TypeAdapter,
    WithJsonSchema,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue

from tidemill.admin.http.nearest import UnknownField

EXACT_MAX = 2**53  # JSON parsers may round larger integers
Millis = Annotated[int, Field(strict=True, ge=1, le=366 * 24 * 3600 * 1000)]


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
        # No message is older than the epoch. 0 would mean that there is no limit.
        return max(1, millis_of(_DATE_TIME.validate_python(_iso(value))))
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
                {
                    "type": "integer",
                    "minimum": 0,
                    "maximum": EXACT_MAX,
                    "description": "Unix time in ms.",
                },
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


def _integral(value: object) -> object:
    """Return 5 for 5.0, also in a list: JSON has one type of numbers."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list) and len(value) <= ITEMS_MAX:
        return [_integral(item) if isinstance(item, float) else item for item in value]
    return value


LimitedSize = BeforeValidator(_check_size)


class Schema(BaseModel):
    """A model with fields in camelCase that rejects unknown fields, since they may be misspelt."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def few_fields(cls, value: object) -> object:
        """Reject an object with too many fields with a single error. Read 5.0 as the integer 5."""
        if not isinstance(value, dict):
            return value
        if len(value) > FIELDS_MAX:
            raise ValueError(f"{len(value)} fields; at most {FIELDS_MAX} are allowed")
        for name in value:
            if name not in cls.model_fields and name not in cls._known():
                raise UnknownField(str(name), cls._known())
        return {name: _integral(field) for name, field in value.items()}

    @classmethod
    def _known(cls) -> list[str]:
        """Return the names of the fields in JSON."""
        return [field.alias or name for name, field in cls.model_fields.items()]


class AnyCaseEnum(StrEnum):
    """An enum of a request: its values match in any case."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        text = str(value).casefold()
        return next((each for each in cls if each.value.casefold() == text), None)


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


LowerCase = BeforeValidator(_lower)  # for words of a Literal, in any case


class ExclusiveSchema(Schema):
    """An object with fields that exclude each other. A field with null is missing.

    The document names the refused combinations. Its `not` keeps one class per model in generated
    clients; `oneOf` would give one per choice.
    """

    exactly_one: ClassVar[tuple[str, ...]] = ()  # names of fields
    one_choice: ClassVar[tuple[str, ...]] = ()  # exactly one of these, too
    at_most_one: ClassVar[tuple[str, ...]] = ()
    # What the validators of a subclass refuse, for the document.
    refused_objects: ClassVar[tuple[JsonSchemaValue, ...]] = ()

    @model_validator(mode="after")
    def one_of_each(self) -> Self:
        """Reject an object with several of the fields, or with none if one is required."""
        for quantity, fields in (
            ("exactly", self.exactly_one),
            ("exactly", self.one_choice),
            ("at most", self.at_most_one),
        ):
            count = sum(getattr(self, field) is not None for field in fields)
            if count > 1 or (fields and not count and quantity == "exactly"):
                names = [to_camel(field) for field in fields]
                choice = f"{', '.join(names[:-1])} and {names[-1]}"
                raise ValueError(f"give {quantity} one of {choice}")
        return self

    @classmethod
    def __get_pydantic_json_schema__(
        cls,
        core_schema: Any,  # pydantic_core.CoreSchema
        handler: GetJsonSchemaHandler,
    ) -> JsonSchemaValue:
        schema = handler(core_schema)
        choices = [
            [to_camel(field) for field in fields]
            for fields in (cls.exactly_one, cls.one_choice, cls.at_most_one)
        ]
        refused = [given(*pair) for some in choices for pair in combinations(some, 2)]
        refused[:0] = [missing(*required) for required in choices[:2] if required]
        refused += cls.refused_objects
        handler.resolve_ref_schema(schema).update(refuse(*refused))
        return schema


def given(*fields: str) -> dict[str, Any]:
    """Return the JSON Schema of objects that have all these fields."""
    return {
        "required": list(fields),
        "properties": {field: {"not": {"type": "null"}} for field in fields},
    }


def missing(*fields: str) -> dict[str, Any]:
    """Return the JSON Schema of objects that have none of these fields."""
    return {"properties": {field: {"type": "null"} for field in fields}}


def refuse(*refused: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema that refuses objects of any of the schemas `refused`."""
    return {"not": {"anyOf": list(refused)}}


BROKER = Field(description="Name of its broker group.")
BY = Field(description="Name of the caller, as the caller gives it, and its address.")
DRY_RUN = Field(description="Whether this was a dry run without changes.")
MIN_OFFSET = Field(description="Offset of the oldest message in the queue.")
MAX_OFFSET = Field(description="Offset of the next message of the queue.")
UNREACHABLE = Field(
    None,
    description="Unreachable broker groups, whose data is missing here. Missing if all answered.",
)
CLIENTS = Field(
    description="Ids of connected clients that use it, at most 100. Their requests fail after the"
    " deletion, and do not create it again for `recreate_block_ms`."
)
NEXT_PAGE = Field(None, description="`pageToken` of the next page. Missing on the last page.")
