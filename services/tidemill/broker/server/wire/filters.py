"""The filters in requests, compiled."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Final, final

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

# Compiled filters, measured: 70 KiB for one of 3,600 bytes with 620 texts.
FILTERS_MAX: Final = 1_000


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


def find_filter(tags: Collection[str], sql: str) -> MessageFilter:
    """Return the filter of a request. Raises IllegalFilter."""
    if sql:
        return _sql_filter(sql)
    return _tag_filter(frozenset(tags)) if tags else EVERY_MESSAGE


_sql_filter = functools.lru_cache(FILTERS_MAX)(SqlFilter)
_tag_filter = functools.lru_cache(FILTERS_MAX)(TagFilter)
