"""Changes of users that would lock administrators out of the REST API."""

from __future__ import annotations

from typing import final

from tidemill.admin.cluster.security_client import SecurityClient
from tidemill.common.errors import Conflict
from tidemill.security.identities import User, UserType, user_of
from tidemill.security.table import USER


def is_administrator(user: User) -> bool:
    """Whether a user may change users by the REST API, which refuses users with certificates."""
    return user.type is UserType.SUPER and user.is_enabled and not user.certificates


@final
class LockOutCheck:
    """The check of one change of a user in the mode `on`."""

    def __init__(self, items: SecurityClient, name: str, *, caller: str) -> None:
        """`name` is the changed user. `caller` is the user that changes it; "": none."""
        self._items = items
        self._name = name
        self._caller = caller
        self._has_others = False

    async def find_others(self) -> None:
        """Find out whether the cluster has another administrator. It may read all users."""
        self._has_others = False
        async for encoded in self._items.all(USER):
            user = user_of(encoded)
            if user.name != self._name and is_administrator(user):
                self._has_others = True
                return

    def check(self, old: User | None, new: User | None) -> None:
        """Check a change. A deletion has no new user. Raises Conflict."""
        if old is None or not is_administrator(old):
            return
        if new is not None and is_administrator(new):
            return
        if not self._has_others:
            raise Conflict(
                f"{old.name} is the last enabled super user without certificates, so no user"
                " could change users afterwards; create another super user first, or repeat it with"
                " force (--force)"
            )
        if old.name == self._caller:
            raise Conflict(
                f"the change takes its rights from user {old.name}, which sends this request;"
                " repeat it with force (--force)"
            )
