"""The kinds of messages of the looping clients: topics, roles, and expected deliveries.

The programs in tests/e2e contain the same rules. All rules depend on the number at the end of a
message's key, so each client gives the same answer for the messages of all clients.

topic        message with number n
normal       no options
delayed      a delivery time
ordered      a message group
transaction  the producer commits n % 4 == 0 and rolls back n % 4 == 1; if asked, the checker
             commits even numbers and rolls back odd numbers
priority     priority n % 4
dedup        two sends with the same dedup key
filtered     a tag by n % 3, and the user property `level` with the value n % 10
"""

from __future__ import annotations

from collections.abc import Collection

BASIC_TOPICS = ("normal", "delayed", "ordered")  # the default of the clients
TOPICS = (*BASIC_TOPICS, "transaction", "priority", "dedup", "filtered")
_PLAIN = ("normal", "delayed", "transaction", "priority", "dedup")
# Consumer groups with the name of the role, and the topics that they read.
ROLES = {
    "simple": _PLAIN,
    "push": _PLAIN,
    "ordered-simple": ("ordered",),
    "ordered-push": ("ordered",),
    "tag-simple": ("filtered",),  # the filter is `red || green`
    "sql-push": ("filtered",),  # the filter is `level >= 5`
}
FILTERED_ROLES = ("tag-simple", "sql-push")
TAGS = ("red", "green", "blue")  # by n % 3
LEVELS = 10
LEVEL_MIN = 5  # of the role `sql-push`


def roles_of(topics: Collection[str]) -> list[str]:
    """Return the roles that read at least one of these topics."""
    return [role for role, read in ROLES.items() if set(read) & set(topics)]


def is_rolled_back(topic: str, key: str) -> bool:
    """Return whether the clients roll back the message."""
    return topic == "transaction" and _number_of(key) % 2 == 1


def reason_to_withhold(role: str, topic: str, key: str) -> str:
    """Return why the role must not receive the message; "": it must receive the message."""
    if is_rolled_back(topic, key):
        return "was rolled back"
    if role == "tag-simple" and TAGS[_number_of(key) % len(TAGS)] == "blue":
        return "does not match the tag filter"
    if role == "sql-push" and _number_of(key) % LEVELS < LEVEL_MIN:
        return "does not match the SQL filter"
    return ""


def _number_of(key: str) -> int:
    return int(key.rpartition("/")[2])
