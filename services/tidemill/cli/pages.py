"""Listings of objects with a topic or a group, such as timers, over several pages."""

from __future__ import annotations

import typer

from tidemill.cli.rest import PAGE_SIZE, call, options_of
from tidemill.common.rest_client import Json
from tidemill.message.namespaces import namespace_of


def read_pages(
    context: typer.Context,
    items: str,
    query: dict[str, str],
    limit: int,
    *,
    path: str = "",
    named_by: str = "topic",
) -> tuple[list[Json], bool, list[str]]:
    """Return up to `limit` items, whether there are more, and unreachable broker groups.

    `items` is the field of the items, and their path if `path` is empty. With a namespace, only
    items count whose field `named_by` belongs to it.
    """
    namespace = options_of(context).namespace
    found: list[Json] = []
    unreachable: set[str] = set()
    while True:
        query["pageSize"] = str(min(limit - len(found), PAGE_SIZE))
        page = call(context, "GET", f"/{path or items}", query=query)
        found.extend(
            item
            for item in page[items]
            if not namespace or namespace_of(item.get(named_by, "")) == namespace
        )
        unreachable.update(page.get("unreachable", ()))
        token = page.get("nextPageToken")
        if not token or len(found) >= limit:
            return found, bool(token), sorted(unreachable)
        query["pageToken"] = token
