"""The users that list a service account or a certificate (ADR 0079)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, TypeAlias, final

from tidemill.common.errors import Unauthorized

ACCOUNTS: Final = "serviceAccounts"  # the field of a user
CERTIFICATES: Final = "certificates"
FIELDS: Final = (ACCOUNTS, CERTIFICATES)
NOUNS: Final = {ACCOUNTS: "service account", CERTIFICATES: "certificate"}

Listed: TypeAlias = tuple[str, str]  # a field, and a value of its list


@final
class ListedIdentities:
    """The names of users by the identities that they list.

    The owner of the items notes each change.
    """

    def __init__(self) -> None:
        self._users: dict[Listed, set[str]] = {}
        self._listed: dict[str, tuple[Listed, ...]] = {}  # by user; users without any have none

    def put(self, user: str, fields: Mapping[str, Any]) -> None:
        """Take over the item of a user, decoded."""
        listed = listed_by(fields)
        if listed == self._listed.get(user, ()):
            return
        self.remove(user)
        if listed:
            self._listed[user] = listed
        for each in listed:
            self._users.setdefault(each, set()).add(user)

    def remove(self, user: str) -> None:
        """Forget a user."""
        for each in self._listed.pop(user, ()):
            users = self._users[each]
            users.discard(user)
            if not users:
                del self._users[each]

    def find(self, field: str, value: str) -> Collection[str]:
        """Return the names of the users that list a value."""
        return self._users.get((field, value), ())


def listed_by(fields: Mapping[str, Any]) -> tuple[Listed, ...]:
    """Return the identities that a user lists, by the fields of its item."""
    return tuple([(field, value) for field in FIELDS for value in fields.get(field, ())])


def only_user(names: Collection[str], field: str, value: str) -> str:
    """Return the one user that lists an identity. Raises Unauthorized."""
    if len(names) > 1:
        raise Unauthorized(
            f"the users {', '.join(sorted(names))} list the {NOUNS[field]} {value}; only one user"
            " may list it"
        )
    if not names:
        raise Unauthorized(f"no user lists the {NOUNS[field]} {value}")
    return next(iter(names))
