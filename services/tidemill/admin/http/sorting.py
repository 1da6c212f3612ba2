"""The order of a list by a number: the first rows, without further pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from fastapi import Query
from fastapi.params import Query as QueryParameter

from tidemill.admin.http.paging import NamedItem, of_namespace
from tidemill.common.errors import BadRequest
from tidemill.message.namespaces import without_namespace

PREFIX: Final = Query(
    max_length=255,
    description="Only names that begin with this text; with `namespace`, names without it.",
)

T = TypeVar("T", bound=NamedItem)


def sort_query(fields: Sequence[str]) -> QueryParameter:
    """Return the query parameter `sort` for some fields with numbers."""
    found: QueryParameter = Query(
        pattern=f"^-?({'|'.join(fields)})$",
        description="Order by a number, such as `-"
        + fields[0]
        + "` for the largest first: "
        + ", ".join(fields)
        + ". Unknown numbers come last. The answer has the first `pageSize` rows and no token.",
    )
    return found


def of_prefix(items: Sequence[T], prefix: str, *, namespace: str) -> Sequence[T]:
    """Return the items of a namespace, or of all if it is empty, whose names begin with a text.

    The text is compared with the names without the namespace.
    """
    items = of_namespace(items, namespace)
    if not prefix:
        return items
    return [one for one in items if without_namespace(namespace, one.name).startswith(prefix)]


def first_by(
    items: Sequence[T],
    sort: str,
    number_of: Callable[[str, str], float | None],
    *,
    size: int,
    token: str | None,
) -> list[T]:
    """Return the first items by a number; items with equal numbers by name.

    `number_of` returns the number of a name, or None if it is unknown. Raises BadRequest.
    """
    if token is not None:
        raise BadRequest("a list with `sort` has one page: omit pageToken, or raise pageSize")
    field = re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", sort.removeprefix("-"))
    sign = -1 if sort.startswith("-") else 1

    def key(item: T) -> tuple[bool, float, str]:
        number = number_of(item.name, field)
        return number is None, sign * (number or 0), item.name

    return sorted(items, key=key)[:size]
