"""The identity of a request: the user, the kind of its credential, and the address.

`access.py` makes one actor per request and stores it in the state of the request. Routes read it
with `actor_of`. The audit log and the log of the brokers name it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from fastapi import Request
from starlette.datastructures import Headers

from tidemill.common.addresses import unmapped

if TYPE_CHECKING:
    from starlette.types import Scope

BUILT_IN_USER: Final = "admin-token"  # built-in super user of admin_token_file
VIA_FILE: Final = "token-file"
CLAIMED_USER_HEADER: Final = "Tidemill-User"
CLAIMED_USER_CHARS_MAX: Final = 128
UNKNOWN_ADDRESS: Final = "an unknown address"
_UNPRINTABLE: Final = re.compile(r"[^ -~]")


@dataclass(frozen=True, slots=True)
class Actor:
    """The caller of a request."""

    user: str  # verified; "": the API needs no credential
    via: str  # kind and name of the credential, such as `token:ci`; "": none
    claimed_user: str  # of the header Tidemill-User, which nobody checks
    address: str

    @property
    def text(self) -> str:
        """The user, the claimed user and the address, for a log line."""
        name = self.user or self.claimed_user
        if self.user and self.claimed_user:
            name = f"{self.user} ({self.claimed_user})"
        return f"{name} at {self.address}" if name else self.address


def make_actor(scope: Scope, *, user: str = "", via: str = "") -> Actor:
    """Return the actor of a request with a verified user."""
    client = scope.get("client")
    claimed = Headers(scope=scope).get(CLAIMED_USER_HEADER, "")
    return Actor(
        user=user,
        via=via,
        claimed_user=_UNPRINTABLE.sub("?", claimed)[:CLAIMED_USER_CHARS_MAX],
        address=unmapped(client[0]) if client else UNKNOWN_ADDRESS,
    )


def set_actor(scope: Scope, actor: Actor) -> None:
    """Store the actor in the state of a request."""
    scope.setdefault("state", {})["actor"] = actor


def actor_of(request: Request) -> Actor:
    """Return the actor of a request; without an access control, one without a user."""
    actor = getattr(request.state, "actor", None)
    return actor if isinstance(actor, Actor) else make_actor(request.scope)
