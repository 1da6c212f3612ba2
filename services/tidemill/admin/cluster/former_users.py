"""Bans and quotas of users that were deleted: they do not apply to a later user of the name."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Protocol

from tidemill.admin.cluster.security_client import SecurityClient
from tidemill.security.table import USER

# Up to this number, users are read one by one instead of all of them.
SINGLE_READS_MAX = 10


class UserItem(Protocol):
    """A ban or a quota."""

    @property
    def name(self) -> str:
        """The name of the item."""

    @property
    def value(self) -> str:
        """The name of the user, if the item is about one."""

    @property
    def user_id(self) -> int:
        """The id of the user; 0: the item is not about a user."""


async def of_deleted_users(items: SecurityClient, found: Collection[UserItem]) -> frozenset[str]:
    """Return the names of the items whose user was deleted."""
    named = {item.value for item in found if item.user_id}
    ids: dict[str, int] = {}
    if len(named) <= SINGLE_READS_MAX:
        for name in named:
            encoded = (await items.find(USER, name)).encoded
            if encoded is not None:
                ids[name] = json.loads(encoded)[USER]["id"]
    else:
        async for encoded in items.all(USER):
            item = json.loads(encoded)
            if item["name"] in named:
                ids[item["name"]] = item[USER]["id"]
    return frozenset(
        item.name for item in found if item.user_id and ids.get(item.value) != item.user_id
    )
