"""The key of a client: its id and its owner."""

from __future__ import annotations

from typing import NamedTuple

NO_OWNER = 0  # the owner id of calls without a user; the ids of users begin at 1


class ClientKey(NamedTuple):
    """One client. Two users that choose one client id are two clients.

    The owner is the id of the user; `NO_OWNER` stands for any owner, because the mode was off or
    the call had no credentials.
    """

    client_id: str  # "": unknown
    owner: int = NO_OWNER

    def matches(self, other: ClientKey) -> bool:
        """Whether both may be the same client."""
        is_one_owner = self.owner == other.owner or NO_OWNER in (self.owner, other.owner)
        return is_one_owner and self.client_id == other.client_id


UNKNOWN_CLIENT = ClientKey("")
