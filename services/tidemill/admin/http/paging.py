"""Pages of a sorted list.

    token: filter "," position

`position` is that of the last item of the previous page, such as its name. `filter` is a hash of
the path and the parameters of the list, because a token is valid for the same list, filter and
order only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from hashlib import blake2s
from typing import Annotated, Any, Final, Protocol, TypeVar, final

from fastapi import Depends as DependsOn
from fastapi import Query, Request
from fastapi.params import Depends

from tidemill.common.errors import BadRequest
from tidemill.message.namespaces import namespace_of

PageSize = Annotated[
    int, Query(alias="pageSize", ge=1, le=1000, description="Maximum number of items of the page.")
]
PAGE_SIZE = 100  # default
TOKEN_CHARS_MAX: Final = 1_040  # a client id of 1,024 characters, and the hash
HASH_BYTES: Final = 4
# Parameters that may differ from page to page.
OF_PAGES: Final = frozenset({"pageSize", "pageToken"})


def hash_of_filter(encoded: bytes) -> str:
    """Return the hash of a filter, for a token."""
    return blake2s(encoded, digest_size=HASH_BYTES).hexdigest()


def check_filter(found: str, expected: str) -> None:
    """Check the hash in a token. Raises BadRequest."""
    if found != expected:
        raise BadRequest(
            "the pageToken belongs to another filter or order; begin with the first page"
        )


@final
class PageCursor:
    """The position after which a page begins, and the tokens of the same list."""

    def __init__(self, filter_hash: str, token: str | None = None) -> None:
        """Read the token of a list. Raises BadRequest if it belongs to another list."""
        self._hash = filter_hash
        self.token = token
        self.after = ""  # the position; empty: the first page
        if token is not None:
            found, _, self.after = token.partition(",")
            check_filter(found, filter_hash)

    def next(self, position: str | None) -> str | None:
        """Return the token of the page after a position; None: there is none."""
        return None if position is None else f"{self._hash},{position}"


def cursor_query(position: str, about: str, *, chars_max: int = TOKEN_CHARS_MAX) -> Depends:
    """Return the parameter `pageToken`. Its position matches a pattern."""
    # Not in the annotation, which is a text that does not see local names.
    query: Any = Query(
        None,
        alias="pageToken",
        max_length=chars_max,
        pattern=f"^[0-9a-f]{{8}},{position}$",
        description=f"`nextPageToken` of the previous page, with the same filter: {about}.",
    )

    def cursor_of(request: Request, page_token: str | None = query) -> PageCursor:
        parameters = sorted(
            (name, value)
            for name, value in request.query_params.multi_items()
            if value and name not in OF_PAGES
        )
        encoded = json.dumps([request.scope["path"], parameters]).encode()
        return PageCursor(hash_of_filter(encoded), page_token)

    found: Depends = DependsOn(cursor_of)
    return found


FIRST_PAGE: Final = PageCursor("")  # of a call without a request
NameCursor = Annotated[PageCursor, cursor_query(".+", "the name of its last item")]


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


def page_of(items: Sequence[T], size: int, cursor: PageCursor) -> tuple[list[T], str | None]:
    """Return the items after the cursor, and the token of the next page or None."""
    after = cursor.after
    remaining = sorted((item for item in items if item.name > after), key=lambda item: item.name)
    page = remaining[:size]
    return page, cursor.next(page[-1].name) if len(remaining) > size else None


def merged(
    found: Iterable[tuple[Position, Item]], ends: Iterable[Position], size: int
) -> tuple[list[tuple[Position, Item]], str | None]:
    """Return the first items of several lists, and the position of the last one or None.

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
