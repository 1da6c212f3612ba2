"""Pages of a sorted list. A page token names the last item of the previous page."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import Query

from tidemill.common.errors import BadRequest

PageSize = Annotated[
    int, Query(alias="pageSize", ge=1, le=1000, description="Maximum number of items of the page.")
]
PageToken = Annotated[
    str | None,
    Query(alias="pageToken", max_length=1024, description="`nextPageToken` of the previous page."),
]
PAGE_SIZE = 100  # default
INVALID_TOKEN = "pageToken is not valid; use nextPageToken of the previous page"  # noqa: S105  # an error text


class NamedItem(Protocol):
    """An item with a name."""

    @property
    def name(self) -> str:
        """The name by which items are sorted."""
        ...


T = TypeVar("T", bound=NamedItem)
Position = TypeVar("Position", bound=tuple[Any, ...])  # of an item in the order of the list
Item = TypeVar("Item")


def page_of(items: Sequence[T], size: int, token: str | None) -> tuple[list[T], str | None]:
    """Return the items after `token`, and the token of the next page or None."""
    after = "" if token is None else decode_token(token)
    remaining = sorted((item for item in items if item.name > after), key=lambda item: item.name)
    page = remaining[:size]
    return page, encode_token(page[-1].name) if len(remaining) > size else None


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
    return page, None if end is None else encode_token(":".join(map(str, end)))


def encode_token(name: str) -> str:
    """Return the token of the page after the item `name`."""
    return base64.urlsafe_b64encode(name.encode()).decode().rstrip("=")


def decode_token(token: str) -> str:
    """Return the name in a token of `encode_token`; raise BadRequest for other tokens."""
    try:
        padded = token + "=" * (-len(token) % 4)
        return base64.b64decode(padded, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise BadRequest(INVALID_TOKEN) from error
