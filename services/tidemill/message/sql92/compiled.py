"""SQL92 filters, compiled for the evaluation of stored messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, final

from tidemill.message import stored_message
from tidemill.message.sql92.conditions import (
    And,
    Comparison,
    Condition,
    In,
    Property,
    PropertyNumbers,
    Values,
)
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

# Names that are not those of user properties, which may not have them.
TAGS: Final = "TAGS"
KEYS: Final = "KEYS"
# Bytes of properties that take one step of an evaluation, measured with the costliest properties:
# to search a text in a value takes 2.6 ns a byte, and to decode properties takes 11 ns a byte.
SCANNED_BYTES_A_STEP: Final = 128
DECODED_BYTES_A_STEP: Final = 32
_EMPTY_BYTES: Final = 2_048  # of a filter without conditions
_CHAR_BYTES: Final = 8  # of the canonical text, and of the names and texts in it


@final
class CompiledFilter:
    """A SQL92 filter that evaluates stored messages."""

    def __init__(self, condition: Condition) -> None:
        """Compile a condition. The longest filters take two milliseconds."""
        numbers = PropertyNumbers()
        self._evaluate = condition.compiled(numbers)
        self._names = tuple(numbers.by_name)
        self._has_system_names = not {TAGS, KEYS}.isdisjoint(self._names)
        self._has_user_names = not {TAGS, KEYS}.issuperset(self._names)
        self._cost = condition.cost
        self.canonical = condition.canonical()
        # Without one of these tags, no message matches. None: it may match without a tag.
        self.required_tags = required_tags(condition)

    def evaluate(self, blob: bytes | memoryview) -> int:
        """Return FALSE, UNKNOWN or TRUE. Raises ValueError if `blob` is not a stored message."""
        return self._evaluate(self._values(blob))

    @property
    def memory_bytes(self) -> int:
        """The estimated memory of this filter."""
        return _EMPTY_BYTES + self._cost.memory_bytes + _CHAR_BYTES * len(self.canonical)

    def cost_steps(self, blob: bytes | memoryview) -> int:
        """Return the highest cost of the evaluation of a message, in half microseconds.

        Raises ValueError if `blob` is not a stored message.
        """
        steps, scans, _ = self._cost
        system_wire, user_wire = stored_message.wires_of(blob)
        size = self._has_user_names * len(user_wire) + self._has_system_names * len(system_wire)
        return steps + size // DECODED_BYTES_A_STEP + scans * size // SCANNED_BYTES_A_STEP

    def _values(self, blob: bytes | memoryview) -> Values:
        system_wire, user_wire = stored_message.wires_of(blob)
        found: Mapping[str, str] = {}
        if self._has_user_names:
            found = v2.Message.FromString(bytes(user_wire)).user_properties
        if not self._has_system_names:
            return list(map(found.get, self._names))
        system = v2.SystemProperties.FromString(bytes(system_wire))
        own = {TAGS: system.tag or None, KEYS: " ".join(system.keys) or None}
        return [own[name] if name in own else found.get(name) for name in self._names]


def required_tags(condition: Condition) -> frozenset[str] | None:
    """Return the tags that a condition requires: those of a top-level AND; None if it has none."""
    if isinstance(condition, And):
        required = [tags for part in condition.parts if (tags := required_tags(part)) is not None]
        return frozenset.intersection(*required) if required else None
    if isinstance(condition, In) and condition.subject.name == TAGS and not condition.is_negated:
        return condition.texts
    if (
        isinstance(condition, Comparison)
        and condition.left == Property(TAGS)
        and condition.operator == "="
        and isinstance(condition.right, str)
    ):
        return frozenset({condition.right})
    return None
