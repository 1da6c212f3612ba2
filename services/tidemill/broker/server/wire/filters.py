"""The filters in requests, compiled."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Final, TypeAlias, TypeVar, final

from google.protobuf.message import DecodeError

from tidemill.broker.engine.message_filter import (
    EVALUATION_ITEMS,
    EVERY_MESSAGE,
    MessageFilter,
    TagFilter,
)
from tidemill.message import stored_message
from tidemill.message.sql92.compiled import CompiledFilter
from tidemill.message.sql92.grammar import parse

FILTERS_MAX: Final = 1_000
# Measured: a filter of 4 KiB has up to 185 KiB.
FILTER_BYTES_MAX: Final = 16 << 20
_TAG_BYTES: Final = 300  # of a tag in a filter, with its hash
_EMPTY_TAG_FILTER_BYTES: Final = 1_024
# Python strings have up to four bytes a character.
_CHAR_BYTES: Final = 4
# The text of an SQL filter, or tags.
_FilterKey: TypeAlias = str | frozenset[str]
_KeyT = TypeVar("_KeyT", str, frozenset[str])


@final
class SqlFilter:
    """The messages that match an SQL92 filter."""

    language = "sql"

    def __init__(self, text: str) -> None:
        """Compile a filter. Raises IllegalFilter."""
        self._compiled = CompiledFilter(parse(text))
        self.expression = self._compiled.canonical
        tags = self._compiled.required_tags
        self.tag_hashes = None if tags is None else frozenset(map(stored_message.tag_hash, tags))
        self.memory_bytes = self._compiled.memory_bytes + _TAG_BYTES * len(tags or ())
        self._hash = hash(self.expression)

    def cost_items(self, blob: bytes | memoryview) -> int:
        """Return the items of a slice. Raises ValueError if the message is damaged."""
        return EVALUATION_ITEMS + self._compiled.cost_steps(blob)

    def evaluate(self, blob: bytes | memoryview) -> int:
        """Return the result for a stored message. Raises ValueError if it is damaged."""
        try:
            return self._compiled.evaluate(blob)
        except DecodeError as error:
            raise ValueError(str(error)) from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SqlFilter) and self.expression == other.expression

    def __hash__(self) -> int:
        return self._hash


@final
class FilterCache:
    """The compiled filters that were used last, up to a number and an estimated memory."""

    def __init__(self, *, bytes_max: int = FILTER_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        # Each filter with its memory, the one used longest ago first.
        self._filters: OrderedDict[_FilterKey, tuple[MessageFilter, int]] = OrderedDict()
        self.memory_bytes = 0

    def __len__(self) -> int:
        """Return the number of filters."""
        return len(self._filters)

    def find(self, tags: Collection[str], sql: str) -> MessageFilter:
        """Return the filter of a request. Raises IllegalFilter."""
        if sql:
            return self._find(sql, _sql_filter)
        return self._find(frozenset(tags), _tag_filter) if tags else EVERY_MESSAGE

    def _find(
        self, key: _KeyT, compiled: Callable[[_KeyT], tuple[MessageFilter, int]]
    ) -> MessageFilter:
        known = self._filters.get(key)
        if known is not None:
            self._filters.move_to_end(key)
            return known[0]
        found, memory_bytes = self._filters[key] = compiled(key)
        self.memory_bytes += memory_bytes
        while len(self._filters) > FILTERS_MAX or self.memory_bytes > self._bytes_max:
            _, (_, freed_bytes) = self._filters.popitem(last=False)
            self.memory_bytes -= freed_bytes
        return found


def _sql_filter(text: str) -> tuple[MessageFilter, int]:
    found = SqlFilter(text)
    return found, found.memory_bytes


def _tag_filter(tags: frozenset[str]) -> tuple[MessageFilter, int]:
    tag_bytes = sum(_TAG_BYTES + _CHAR_BYTES * len(tag) for tag in tags)
    return TagFilter(tags), _EMPTY_TAG_FILTER_BYTES + tag_bytes


_filters: Final = FilterCache()
find_filter: Final = _filters.find
