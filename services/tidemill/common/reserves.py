"""A limit that many users share: its last part is reserved for users with little.

One user alone gets nearly all of it. Whatever the large users take, a small one finds room.
"""

from __future__ import annotations

from typing import Final

RESERVED_PART: Final = 1 / 8  # of a limit
LITTLE_PART: Final = 1 / 128  # a user with less may take from the reserve


def has_little(used: int, limit: int) -> bool:
    """Return whether a user of `used` may take from the reserve of a limit."""
    return used < int(limit * LITTLE_PART)


def unreserved(limit: int) -> int:
    """Return the part of a limit that every user may take from."""
    return limit - int(limit * RESERVED_PART)
