"""Pages of a sorted list: a token names the last item of the page before."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Annotated, Protocol, TypeVar

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


class Named(Protocol):
    """Something with a name."""

    @property
    def name(self) -> str:
        """Its name."""
        ...


T = TypeVar("T", bound=Named)


def page_of(items: Sequence[T], size: int, token: str | None) -> tuple[list[T], str | None]:
    """Return the items after `token`, and the token of the next page unless this is the last."""
    after = "" if token is None else decode_token(token)
    rest = sorted((item for item in items if item.name > after), key=lambda item: item.name)
    page = rest[:size]
    return page, encode_token(page[-1].name) if len(rest) > size else None


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
