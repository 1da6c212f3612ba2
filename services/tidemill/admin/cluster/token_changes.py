"""Changes of named tokens: a new token of a user, and the deletion of its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.admin.cluster.security_client import Item, SecurityClient
from tidemill.common.errors import Conflict, RoleNotFound
from tidemill.security.identities import READY_MADE_ROLES, User, check_user_name
from tidemill.security.table import ROLE, TOKEN
from tidemill.security.tokens import (
    DEFAULT_DURATION_MS,
    TOKENS_OF_A_USER_MAX,
    MadeToken,
    NamedToken,
    token_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequest:
    """The wanted token."""

    name: str
    roles: tuple[str, ...]
    expires_after_ms: int | None  # None: the default
    never_expires: bool

    def __post_init__(self) -> None:
        """Check the name. Raises BadRequest."""
        check_user_name(self.name)

    def not_after_ms(self, now_ms: int) -> int:
        """Return the end of the token; 0: none."""
        if self.never_expires:
            return 0
        return now_ms + (self.expires_after_ms or DEFAULT_DURATION_MS)


def new_token(
    request: TokenRequest,
    made: MadeToken,
    user: User,
    present: list[NamedToken],
    *,
    now_ms: int,
    caller: str,
) -> NamedToken:
    """Return a new token of a user that has the `present` ones. Raises Conflict."""
    own = [token for token in present if token.user_id == user.id]
    if any(token.name == request.name for token in own):
        raise Conflict(
            f"user {user.name} has a token {request.name}; delete it first, or choose another name"
        )
    if len(present) >= TOKENS_OF_A_USER_MAX:
        raise Conflict(
            f"user {user.name} has {len(present)} tokens, and at most {TOKENS_OF_A_USER_MAX} are"
            f" allowed; delete some first"
        )
    return NamedToken(
        id=made.id,
        name=request.name,
        user=user.name,
        user_id=user.id,
        sha256=made.sha256,
        roles=tuple(sorted(set(request.roles))),
        not_after_ms=request.not_after_ms(now_ms),
        created_at_ms=now_ms,
        changed_by=caller,
    )


async def tokens_of(items: SecurityClient, user: str) -> list[NamedToken]:
    """Return the tokens of a user, and those of former users of its name, by id.

    It reads all tokens: pages of a thousand, each decoded only if it has the name.
    """
    name = user.encode()
    found = [token_of(encoded) async for encoded in items.all(TOKEN) if name in encoded]
    return [token for token in found if token.user == user]


async def check_roles(items: SecurityClient, roles: tuple[str, ...]) -> None:
    """Check that all roles exist. Raises RoleNotFound."""
    for role in roles:
        if role not in READY_MADE_ROLES and (await items.find(ROLE, role)).encoded is None:
            raise RoleNotFound(f"there is no role {role!r}; see `tidemill role list`")


def deletion_of(token: NamedToken) -> Item:
    """Return the item that deletes a token."""
    return {"op": "deleteToken", "name": token.id}
