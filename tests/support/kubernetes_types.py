"""A check of objects against the Kubernetes API's own schema (OpenAPI 3).

It is stricter than the API server in one point: an unknown field is an error, because it is a
misspelt name. The API server drops it with a warning.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).resolve().parent.parent / "chart" / "kubernetes-types.json.gz"
# Types of cert-manager and the Gateway API, as published.
FOREIGN_FILE = FILE.parent / "foreign-types.json.gz"
# Python types of a YAML value by schema type. A bool does not count as a number.
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
}

Schema = dict[str, Any]


class KubernetesTypes:
    """The types of the kinds that the chart renders."""

    def __init__(self, file: Path = FILE) -> None:
        read = json.loads(gzip.decompress(file.read_bytes()))
        self._kinds: dict[str, str] = read["kinds"]
        self._types: dict[str, Schema] = read["types"]

    @classmethod
    def of_definition(cls, file: Path) -> KubernetesTypes:
        """Return the types of a CustomResourceDefinition."""
        definition = yaml.safe_load(file.read_text("utf-8"))["spec"]
        types = cls()
        for version in definition["versions"]:
            name = f"{definition['group']}/{version['name']} {definition['names']['kind']}"
            schema = version["schema"]["openAPIV3Schema"]
            # Fields of every object; definitions omit them.
            of_all = {each: {"type": "string"} for each in ("apiVersion", "kind")}
            of_all["metadata"] = {"type": "object"}
            types._kinds[name] = name
            types._types[name] = {**schema, "properties": {**schema["properties"], **of_all}}
        return types

    def knows(self, one: dict[str, Any]) -> bool:
        """Return whether the type of an object is known."""
        return f"{one['apiVersion']} {one['kind']}" in self._kinds

    def errors(self, one: dict[str, Any]) -> list[str]:
        """Return the schema violations of an object."""
        name = self._kinds[f"{one['apiVersion']} {one['kind']}"]
        return list(self._errors(one, self._types[name], one["kind"]))

    def _errors(self, value: object, schema: Schema, path: str) -> Iterator[str]:
        for part in schema.get("allOf", []):
            yield from self._errors(value, part, path)
        if reference := schema.get("$ref"):
            yield from self._errors(value, self._types[reference.rpartition("/")[2]], path)
        if one_of := schema.get("oneOf"):
            # Quantities, and fields for a number or a percentage.
            if all(list(self._errors(value, choice, path)) for choice in one_of):
                yield f"{path}: {value!r} matches no allowed type"
        elif kind := schema.get("type"):
            is_kind = isinstance(value, _TYPES[kind])
            if not is_kind or (isinstance(value, bool) and kind != "boolean"):
                yield f"{path}: {value!r} is not of type {kind}"
                return
        if "enum" in schema and value not in schema["enum"]:
            yield f"{path}: {value!r} is not one of {schema['enum']}"
        if isinstance(value, dict):
            yield from self._field_errors(value, schema, path)
        elif isinstance(value, list) and "items" in schema:
            for index, item in enumerate(value):
                yield from self._errors(item, schema["items"], f"{path}[{index}]")

    def _field_errors(self, value: dict[str, Any], schema: Schema, path: str) -> Iterator[str]:
        properties = schema.get("properties")
        more = schema.get("additionalProperties")
        for key, item in value.items():
            if properties and key in properties:
                yield from self._errors(item, properties[key], f"{path}.{key}")
            elif more:
                yield from self._errors(item, more, f"{path}.{key}")
            elif properties:
                yield f"{path}.{key} is not a field"
        for key in schema.get("required", []):
            if key not in value:
                yield f"{path}.{key} is missing"
