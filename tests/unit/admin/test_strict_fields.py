"""Bodies of requests: a value of another type is rejected, never converted."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from tests.unit.admin.test_openapi import document
from tidemill.admin import json
from tidemill.admin.json.schema import Schema

# 2.0 is an integer in JSON. Values that pydantic would convert to a number or to a truth value.
CONVERTED: dict[type, list[object]] = {
    int: [True, False, "2", 2.5],
    float: [True, "2.5"],
    bool: [0, 1, "true", "yes"],
}


def schemas() -> dict[str, type[Schema]]:
    """Return all models of the REST API by name."""
    for module in pkgutil.iter_modules(json.__path__):
        importlib.import_module(f"{json.__name__}.{module.name}")
    found = {}
    waiting = [Schema]
    while waiting:
        for model in waiting.pop().__subclasses__():
            found[model.__name__] = model
            waiting.append(model)
    return found


def named_in(node: Any) -> Iterator[str]:
    """Yield the names of the models that a part of the OpenAPI document refers to."""
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"].rpartition("/")[2]
        for each in node.values():
            yield from named_in(each)
    elif isinstance(node, list):
        for each in node:
            yield from named_in(each)


def request_fields() -> Iterator[Any]:
    """Yield each number and truth value in the body of any request, with a wrong value."""
    api = document()
    waiting = {
        name
        for path in api["paths"].values()
        for operation in path.values()
        for name in named_in(operation.get("requestBody", {}))
    }
    known: set[str] = set()
    while waiting:
        name = waiting.pop()
        known.add(name)
        waiting |= set(named_in(api["components"]["schemas"][name])) - known
    for name, model in sorted(schemas().items()):
        if name not in known:
            continue
        for field, info in model.model_fields.items():
            # Annotated[int, Strict()] | None has the parts int and None.
            parts = [info.annotation, *get_args(info.annotation)]
            types = {part for each in parts for part in (each, *get_args(each)[:1])}
            for kind, values in CONVERTED.items():
                for value in values if kind in types else ():
                    alias = info.alias or field
                    yield pytest.param(model, alias, value, id=f"{name}.{alias}={value!r}")


@pytest.mark.parametrize(("model", "alias", "value"), list(request_fields()))
def test_a_value_of_another_type_is_rejected(
    model: type[Schema], alias: str, value: object
) -> None:
    with pytest.raises(ValidationError) as refused:
        model.model_validate({alias: value})
    assert (alias,) in [error["loc"][:1] for error in refused.value.errors()]
