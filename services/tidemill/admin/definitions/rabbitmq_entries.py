"""Entries of users, from the permissions of RabbitMQ. Their number and the work have bounds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any, Final, final

from tidemill.security.acl import ENTRIES_MAX

FILE_ENTRIES_MAX: Final = 20_000  # of all permissions
_LAST: Final = "\x7f"  # after all characters of the names of groups


@final
class ConvertedEntries:
    """The entries of all users of a file."""

    def __init__(self, topics_of: Mapping[str, Iterable[str]]) -> None:
        """`topics_of` has the topics of each consumer group."""
        self._topics_of = topics_of
        self._groups = sorted(topics_of)
        self._topics: dict[str, list[str]] = {}  # by pattern of groups
        self._known: dict[str, set[tuple[str, str]]] = {}  # by user
        self.count = 0  # of all permissions, also of two with the same entry

    @property
    def reason(self) -> str:
        """The reason of an entry that was not added."""
        return (
            f"a user has at most {ENTRIES_MAX} entries, and all permissions of a file at most"
            f" {FILE_ENTRIES_MAX}: give the other rights by prefixes or roles"
        )

    def add(self, user: str, entries: list[dict[str, Any]], resource: str, *actions: str) -> bool:
        """Add an entry to those of a user, once. Return False if there is no room."""
        if self.count >= FILE_ENTRIES_MAX:
            return False
        self.count += 1
        known = self._known.setdefault(user, set())
        if (resource, actions[0]) in known:
            return True
        if len(entries) >= ENTRIES_MAX:
            return False
        known.add((resource, actions[0]))
        entries.append({"resource": resource, "actions": list(actions)})
        return True

    def let_read(self, user: str, entries: list[dict[str, Any]], names: str) -> bool:
        """Let a user read the topics of its consumer groups. Return False if there is no room."""
        if names == "*":
            return self.add(user, entries, "Topic:*", "Sub", "Get")
        topics = self._topics_of_names(names)
        # `all` stops at the first entry without room.
        return all(self.add(user, entries, f"Topic:{topic}", "Sub", "Get") for topic in topics)

    def _topics_of_names(self, names: str) -> list[str]:
        """Return the topics of one consumer group, or of those with a prefix.

        Each is looked up once, so the work does not grow with the permissions.
        """
        if names not in self._topics:
            groups = [names] if names in self._topics_of else []
            if names.endswith("*"):
                begin = names.removesuffix("*")
                first = bisect_left(self._groups, begin)
                groups = self._groups[first : bisect_left(self._groups, begin + _LAST, first)]
            self._topics[names] = sorted({t for group in groups for t in self._topics_of[group]})
        return self._topics[names]
