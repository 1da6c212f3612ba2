"""Invalid requests, made from valid ones by a seeded random number generator."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

BYTES_MAX = 400  # random bytes in place of a request
COPIED_BYTES_MAX = 20_000  # largest entry that is repeated a thousand times
_INT32 = (-(1 << 31), -1, 0, 1, 32, 33, 1 << 20, (1 << 31) - 1)
_INT64 = (-(1 << 63), -1, 0, 1, 253_402_300_800, (1 << 62), (1 << 63) - 1)
_TEXTS = (
    "",
    " ",
    "a b",
    "a.b",
    "a/../b",
    "..",
    "\0",
    "a\nb",
    "\x7f",
    "ä",
    "🌊" * 40,
    "|",
    "a||b",
    "||",
    "%",
    "%RETRY%fuzz",
    "%DLQ%fuzz",
    "rmq_sys_x",
    "TBW102",
    "DEFAULT_CONSUMER",
    "a" * 63,
    "a" * 64,
    "a" * 120,
    "a" * 121,
    "a" * 127,
    "a" * 128,
    "a" * 70_000,
    "KEYS",
    "'; DROP TABLE x; --",
    "{}",
    "${jndi:x}",
    "-1",
    "1 = 1",
    "*",
    "* || *",
)
_BODIES = (b"", b"\0", b"\xff" * 1000, b"x" * (4 << 20), b"x" * ((4 << 20) + 1))
_BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"


def random_bytes(rng: random.Random) -> bytes:
    """Return meaningless bytes."""
    return rng.randbytes(rng.randint(0, BYTES_MAX))


def mutated(rng: random.Random, request: Message) -> bytes:
    """Return a request with up to three changed fields, and sometimes changed bytes."""
    changed = type(request)()
    changed.CopyFrom(request)
    for _ in range(rng.randint(1, 3)):
        _change_a_field(rng, changed)
    encoded = changed.SerializeToString()
    return _mutated_bytes(rng, encoded) if rng.random() < 0.3 else encoded


def mutated_handle(rng: random.Random, handle: str) -> str:
    """Return a text that resembles a receipt handle but differs from `handle`."""
    at = rng.randrange(len(handle))
    other = rng.choice(_BASE64)
    texts: list[Callable[[], str]] = [
        lambda: handle[:at] + other + handle[at + 1 :],
        lambda: handle[:at] + other + handle[at + 1 : -1] + rng.choice(_BASE64),
        lambda: handle[:at] + other + handle[at:],
        lambda: handle[:at] + handle[at + 1 :],
        lambda: handle[:at],
        lambda: handle + rng.choice(("=", "==", " ", "\n", "A", "AAAA")),
        lambda: rng.choice((" ", "\0", "ä")) + handle[1:],
        lambda: handle[:at] + rng.choice("+/=ä🌊\0 ") + handle[at + 1 :],
        handle.swapcase,
        lambda: handle[::-1],
        lambda: "".join(rng.choices(_BASE64, k=len(handle))),
        lambda: "".join(rng.choices(_BASE64, k=rng.randint(0, 300))),
        lambda: rng.choice(_TEXTS),
    ]
    text = handle
    while text == handle:
        text = rng.choice(texts)()
    return text


def _change_a_field(rng: random.Random, message: Message) -> None:
    # The library has two classes of containers with the same interface.
    field = cast("FieldDescriptor", rng.choice([*message.DESCRIPTOR.fields]))
    chance = rng.random()
    if chance < 0.15:
        message.ClearField(field.name)
    elif field.message_type and field.message_type.GetOptions().map_entry:
        properties = getattr(message, field.name)
        for n in range(rng.choice((1, 1, 129))):
            properties[rng.choice((f"key-{n}", rng.choice(_TEXTS)))] = rng.choice(_TEXTS)
    elif field.is_repeated:
        _change_a_list(rng, field, getattr(message, field.name))
    elif field.message_type:
        _change_a_field(rng, getattr(message, field.name))
        getattr(message, field.name).SetInParent()
    else:
        setattr(message, field.name, _value(rng, field))


def _change_a_list(rng: random.Random, field: FieldDescriptor, values: Any) -> None:
    if field.message_type is None:
        values.extend(_value(rng, field) for _ in range(rng.choice((1, 1, 200))))
    elif values and rng.random() < 0.7:
        _change_a_field(rng, rng.choice(values))
    else:
        first = values[0] if values else values.add()
        # Many large entries would measure this machine, not the server.
        is_small = first.ByteSize() < COPIED_BYTES_MAX
        for _ in range(rng.choice((1, 2, 1100)) if is_small else 1):
            values.add().CopyFrom(first)


def _value(rng: random.Random, field: FieldDescriptor) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            # Large values are rare, because they slow the test down.
            return rng.choice(_BODIES if rng.random() < 0.05 else _BODIES[:3])
        case FieldDescriptor.CPPTYPE_STRING:
            return rng.choice(_TEXTS)
        case FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice((-1, 0, 1, 2, 3, 4, 99, (1 << 31) - 1))
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return rng.choice((float("nan"), float("inf"), -1.0, 1e30))
        case FieldDescriptor.CPPTYPE_INT64 | FieldDescriptor.CPPTYPE_UINT64:
            return rng.choice(_INT64)
        case _:
            return rng.choice(_INT32)


def _mutated_bytes(rng: random.Random, encoded: bytes) -> bytes:
    data = bytearray(encoded[: 1 << 16])
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(data))
        match rng.randrange(4):
            case 0:
                data[at : at + rng.randint(1, 8)] = b""
            case 1:
                data[at:at] = rng.randbytes(rng.randint(1, 8))
            case 2:
                data[at : at + 1] = rng.randbytes(1)
            case _:
                del data[at:]
    return bytes(data)
