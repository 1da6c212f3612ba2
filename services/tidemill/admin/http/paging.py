"""Pages of a sorted list. A page token is the position of the last item of the previous page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import Query

from tidemill.message.namespaces import namespace_of

PageSize = Annotated[
    int, Query(alias="pageSize", ge=1, le=1000, description="Maximum number of items of the page.")
]
PageToken = Annotated[
    str | None,
    Query(
        alias="pageToken",
        max_length=1024,
        description="`nextPageToken` of the previous page: the name of its last item.",
    ),
]
PAGE_SIZE = 100  # default


class NamedItem(Protocol):
    """An item with a name."""

    @property
    def name(self) -> str:
        """The name by which items are sorted."""
        ...


T = TypeVar("T", bound=NamedItem)
Position = TypeVar("Position", bound=tuple[Any, ...])  # of an item in the order of the list
Item = TypeVar("Item")


def of_namespace(items: Sequence[T], namespace: str) -> Sequence[T]:
    """Return the items of a namespace, or all items if it is empty."""
    if not namespace:
        return items
    return [item for item in items if namespace_of(item.name) == namespace]


def page_of(items: Sequence[T], size: int, token: str | None) -> tuple[list[T], str | None]:
    """Return the items after `token`, and the token of the next page or None."""
    after = token or ""
    remaining = sorted((item for item in items if item.name > after), key=lambda item: item.name)
    page = remaining[:size]
    return page, page[-1].name if len(remaining) > size else None


def merged(
    found: Iterable[tuple[Position, Item]], ends: Iterable[Position], size: int
) -> tuple[list[tuple[Position, Item]], str | None]:
    """Return the first items of several lists, and the token of the next page or None.

    `ends` are the last positions of the incomplete lists. The page ends at the first of them, since
    the items behind it are not all known.
    """
    end = min(ends, default=None)
    ordered = sorted(found, key=lambda each: each[0])
    known = [each for each in ordered if end is None or each[0] <= end]
    page = known[:size]
    if len(page) < len(known):
        end = page[-1][0]
    return page, None if end is None else ":".join(map(str, end))
