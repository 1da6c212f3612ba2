"""Print the protobuf contract of modules as JSON: `describe_contract.py MODULE...`.

It is a separate program, because a process can hold only one definition of a message, and the
official client has its own copy of ours.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor


def main() -> None:
    described: dict[str, Any] = {}
    for module in sys.argv[1:]:
        described.update(describe(importlib.import_module(module).DESCRIPTOR))
    json.dump(described, sys.stdout)


def describe(file: FileDescriptor) -> dict[str, Any]:
    """Return every field, enum value and method of `file` by its full name."""
    described: dict[str, Any] = {}
    for enum in file.enum_types_by_name.values():
        described.update(enum_values(enum))
    for message in file.message_types_by_name.values():
        described.update(message_parts(message))
    for service in file.services_by_name.values():
        for method in service.methods:
            described[method.full_name] = [
                method.input_type.full_name,
                method.output_type.full_name,
                method.client_streaming,
                method.server_streaming,
            ]
    return described


def message_parts(message: Descriptor) -> Iterator[tuple[str, Any]]:
    yield message.full_name, "message"
    for field in message.fields:
        yield field.full_name, field_type(field)
    for enum in message.enum_types:
        yield from enum_values(enum)
    for nested in message.nested_types:
        yield from message_parts(nested)


def field_type(field: FieldDescriptor) -> list[Any]:
    named = field.message_type or field.enum_type
    return [
        field.number,
        field.type,
        field.is_repeated,
        field.has_presence,
        named.full_name if named else "",
        field.containing_oneof.name if field.containing_oneof else "",
    ]


def enum_values(enum: EnumDescriptor) -> Iterator[tuple[str, Any]]:
    for value in enum.values:
        yield f"{enum.full_name}.{value.name}", value.number


if __name__ == "__main__":
    main()
