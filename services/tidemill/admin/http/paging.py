"""Pages of a sorted list: a token names the last item of the page before."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import Query

from tidemill.common.errors import BadRequest

PageSize = Annotated[
    int, Query(alias="pageSize", ge=1, le=1000, description="At most so many of them.")
]
PageToken = Annotated[
    str | None,
    Query(alias="pageToken", max_length=1024, description="`nextPageToken` of the page before."),
]
PAGE_SIZE = 100  # where none is asked for


class NamedItem(Protocol):
    """Something with a name."""

    @property
    def name(self) -> str:
        """Its name."""
        ...


T = TypeVar("T", bound=NamedItem)
Position = TypeVar("Position", bound=tuple[Any, ...])  # where an item stands, as places are ordered
Item = TypeVar("Item")


def page_of(items: Sequence[T], size: int, token: str | None) -> tuple[list[T], str | None]:
    """Return the items after `token`, and the token of the next page unless this is the last."""
    after = "" if token is None else decode_token(token)
    rest = sorted((item for item in items if item.name > after), key=lambda item: item.name)
    page = rest[:size]
    return page, encode_token(page[-1].name) if len(rest) > size else None


def merged(
    found: Iterable[tuple[Position, Item]], ends: Iterable[Position], size: int
) -> tuple[list[tuple[Position, Item]], str | None]:
    """Return the first items of several lists, and the token of the next page if there is one.

    `ends` are the places up to which the lists go that have more: what others have behind the first
    of them waits for the next page.
    """
    end = min(ends, default=None)
    ordered = sorted(found, key=lambda each: each[0])
    known = [each for each in ordered if end is None or each[0] <= end]
    page = known[:size]
    if len(page) < len(known):
        end = page[-1][0]
    return page, None if end is None else encode_token(":".join(map(str, end)))


def encode_token(name: str) -> str:
    """Return the token of the page after what `name` says."""
    return base64.urlsafe_b64encode(name.encode()).decode().rstrip("=")


def decode_token(token: str) -> str:
    """Return what `encode_token` was given; raise BadRequest for anything else."""
    try:
        padded = token + "=" * (-len(token) % 4)
        return base64.b64decode(padded, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise BadRequest("pageToken is not one that this API gave out") from error
