"""Parse a file of definitions in slices: a large one would block the event loop for long."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from tidemill.admin.json.definitions import (
    Definitions,
    GroupDefinition,
    QuotaDefinition,
    RoleDefinition,
    TopicDefinition,
    UserDefinition,
)
from tidemill.common.slices import run_in_turns

# The model of an object of each list, in the order of the file.
MODELS: Final[dict[str, type[BaseModel]]] = {
    "roles": RoleDefinition,
    "users": UserDefinition,
    "topics": TopicDefinition,
    "groups": GroupDefinition,
    "quotas": QuotaDefinition,
}
ERRORS_MAX: Final = 10  # more do not explain a file better


async def parse_definitions(body: bytes) -> Definitions:
    """Return the file of a body in JSON. Raises RequestValidationError."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestValidationError([_problem("json_invalid", f"not JSON: {error}")]) from None
    if not isinstance(given, dict):
        raise RequestValidationError([_problem("dict_type", "it is not an object")])
    parsed: dict[str, list[BaseModel]] = {}
    errors: list[Any] = []
    await run_in_turns(parsing(given, parsed, errors))
    try:
        file = Definitions.model_validate({**given, **{field: [] for field in parsed}})
    except ValidationError as error:
        errors = [_placed(each) for each in error.errors()] + errors
    if errors:
        raise RequestValidationError(errors)
    return file.model_copy(update=parsed)


def parsing(
    given: dict[str, Any], parsed: dict[str, list[BaseModel]], errors: list[Any]
) -> Iterator[None]:
    """Parse the objects of all lists, one per step, into `parsed` or `errors`."""
    for field, model in MODELS.items():
        listed = given.get(field)
        if not isinstance(listed, list):
            continue  # It is missing, null or wrong.
        objects = parsed.setdefault(field, [])
        for place, each in enumerate(listed):
            try:
                objects.append(model.model_validate(each))
            except ValidationError as error:
                errors += [_placed(one, field, place) for one in error.errors()]
                if len(errors) >= ERRORS_MAX:
                    return
            yield


def _placed(error: Any, *place: str | int) -> dict[str, Any]:
    """Return an error of a part with its place in the body."""
    return {**error, "loc": ("body", *place, *error["loc"])}


def _problem(type_: str, text: str) -> dict[str, Any]:
    return {"type": type_, "loc": ("body",), "msg": text, "input": None}
