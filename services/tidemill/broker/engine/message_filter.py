"""The messages that a poll wants. The engine knows no filter language (ADR 0082)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, Protocol, final

from tidemill.message import stored_message

# Results of an evaluation. Only MATCH delivers the message.
NO_MATCH: Final = 0
UNKNOWN: Final = 1  # a property is missing, or cannot be compared
MATCH: Final = 2
# Items of a slice that one evaluation counts at least; a compared hash counts one.
EVALUATION_ITEMS: Final = 64
TAG_EVALUATION_ITEMS: Final = 16  # of a tag filter, which decodes only the tag


class MessageFilter(Hashable, Protocol):
    """A filter. Two filters are equal if they want the same messages."""

    @property
    def language(self) -> str:
        """`tag` or `sql`, for metrics."""

    @property
    def tag_hashes(self) -> frozenset[int] | None:
        """The hashes of the tags of which a message needs one.

        None: the tag does not decide, so each message has to be read.
        """

    @property
    def expression(self) -> str:
        """The filter as text, in its canonical form."""

    def cost_items(self, blob: bytes | memoryview) -> int:
        """Return the items of a slice that the evaluation of a stored message counts.

        Raises ValueError if the message is damaged.
        """

    def evaluate(self, blob: bytes | memoryview) -> int:
        """Return the result for a stored message. Raises ValueError if it is damaged."""


@final
class TagFilter:
    """The messages with one of some tags; without tags, every message."""

    language = "tag"

    def __init__(self, tags: frozenset[str] = frozenset()) -> None:
        self.tags = tags
        self.tag_hashes = frozenset(map(stored_message.tag_hash, tags))
        self._hash = hash(tags)

    @property
    def expression(self) -> str:
        """The tags in order."""
        return " || ".join(sorted(self.tags)) or "*"

    def cost_items(self, _blob: bytes | memoryview) -> int:
        """Return the items of a slice, which do not depend on the message."""
        return TAG_EVALUATION_ITEMS

    def evaluate(self, blob: bytes | memoryview) -> int:
        """Compare the tag of a stored message; its hash has matched already."""
        is_wanted = not self.tags or stored_message.tag_of(blob) in self.tags
        return MATCH if is_wanted else NO_MATCH

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TagFilter) and self.tags == other.tags

    def __hash__(self) -> int:
        return self._hash


EVERY_MESSAGE: Final = TagFilter()
