"""Named tokens: list, show, create and delete them.

A user manages its own tokens, except with one of its tokens (ADR 0075).
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from tidemill.admin.audit.author import CREATE, DELETE
from tidemill.admin.cluster.security_client import FoundItem, Item
from tidemill.admin.cluster.token_changes import (
    TokenRequest,
    check_roles,
    deletion_of,
    new_token,
    tokens_of,
)
from tidemill.admin.cluster.user_changes import find_user
from tidemill.admin.http.paging import PAGE_SIZE, NameCursor, PageSize
from tidemill.admin.http.request_access import RequestAccess
from tidemill.admin.json.tokens import (
    TokenCreationView,
    TokenDeletionView,
    TokenPageView,
    TokenSettings,
    TokenView,
)
from tidemill.admin.routes import Access, Caller, ChangeAuthor, DryRun, SecurityItems
from tidemill.admin.routes.security import WallClock
from tidemill.common.errors import Conflict, TokenNotFound
from tidemill.security.acl import Action, Resource, ResourceType
from tidemill.security.identities import User, user_of
from tidemill.security.table import TOKEN, USER
from tidemill.security.tokens import NamedToken, make_token, token_of

router = APIRouter(tags=["security"])

SECURITY = Resource(ResourceType.CLUSTER, "security")
TokenId = Annotated[
    str, Path(description="Id of the token.", json_schema_extra={"pattern": "^[0-9a-f]{16}$"})
]


@router.get("/tokens", response_model_exclude_none=True)
async def list_tokens(
    items: SecurityItems, access: Access, cursor: NameCursor, page_size: PageSize = PAGE_SIZE
) -> TokenPageView:
    """List tokens by id: all of them with Get on Cluster:security, else those of the caller."""
    if access.allows(Action.GET, SECURITY):
        found = await items.page(TOKEN, cursor.after, page_size)
        tokens, has_more = [token_of(encoded) for encoded in found.encoded], found.has_more
    else:
        own = [token for token in await tokens_of(items, access.user) if _is_own(access, token)]
        own = [token for token in own if token.id > cursor.after]
        tokens, has_more = own[:page_size], len(own) > page_size
    return TokenPageView(
        tokens=[view_of(token) for token in tokens],
        next_page_token=cursor.next(tokens[-1].id) if has_more else None,
    )


@router.get("/tokens/{token}")
async def get_token(token: TokenId, items: SecurityItems, access: Access) -> TokenView:
    """Show a token."""
    known = _read(await items.find(TOKEN, token))
    if known is None or not _is_own(access, known):
        access.require(Action.GET, SECURITY)
    return view_of(_find(known, token))


@router.post("/tokens", response_model_exclude_none=True)
async def create_token(
    settings: TokenSettings,
    items: SecurityItems,
    caller: Caller,
    author: ChangeAuthor,
    access: Access,
    clock: WallClock,
    dry_run: DryRun = False,
) -> TokenCreationView:
    """Create a token of a user. The answer has the token, and shows it only here."""
    owner = access.user if settings.user is None else settings.user
    if not owner:
        raise Conflict("the request has no user of its own; name the user of the token (--user)")
    if not access.is_own(owner):
        access.require_super()
    request = TokenRequest(
        name=settings.name,
        roles=tuple(settings.roles or ()),
        expires_after_ms=settings.expires_after_ms,
        never_expires=settings.no_expiry is not None,
    )
    secret, now_ms = make_token(), clock.wall_ms()
    present: list[tuple[User, list[NamedToken]]] = []
    made: list[NamedToken] = []

    async def check() -> None:
        found = await items.find(USER, owner)
        user = find_user(None if found.encoded is None else user_of(found.encoded), owner)
        access.check_same(user)
        await check_roles(items, request.roles)
        present[:] = [(user, await tokens_of(items, owner))]

    def decide(found: FoundItem) -> list[Item]:
        if found.encoded is not None:
            raise Conflict("another token has this random id; repeat the request")
        [(user, tokens)] = present
        made[:] = [new_token(request, secret, user, tokens, now_ms=now_ms, caller=caller)]
        return [made[0].to_item()]

    version = await items.change(
        TOKEN,
        secret.id,
        decide,
        caller=caller,
        audit=author.of(f"Token:{request.name}", CREATE),
        dry_run=dry_run,
        check=check,
    )
    view = view_of(made[0], version=version)
    shown = None if dry_run else secret.text
    return TokenCreationView(**view.model_dump(), dry_run=dry_run, token=shown)


@router.delete("/tokens/{token}")
async def delete_token(
    token: TokenId,
    items: SecurityItems,
    caller: Caller,
    author: ChangeAuthor,
    access: Access,
    dry_run: DryRun = False,
) -> TokenDeletionView:
    """Delete a token. It is invalid at once, and its streams end."""
    gone = _deletable(access, _read(await items.find(TOKEN, token)), token)

    def decide(found: FoundItem) -> list[Item]:
        return [deletion_of(_deletable(access, _read(found), token))]

    await items.change(
        TOKEN,
        token,
        decide,
        caller=caller,
        audit=author.of(f"Token:{gone.name}", DELETE),
        dry_run=dry_run,
    )
    return TokenDeletionView(dry_run=dry_run, token=view_of(gone))


def _deletable(access: RequestAccess, token: NamedToken | None, token_id: str) -> NamedToken:
    """Return a token that the caller may delete. Raises Forbidden, TokenNotFound.

    Without the right, a token of another user looks like a missing one.
    """
    if token is None or not _is_own(access, token):
        access.require_super()
    return _find(token, token_id)


def _is_own(access: RequestAccess, token: NamedToken) -> bool:
    known = access.known
    return known is not None and access.is_own(token.user) and known.user.id == token.user_id


def _read(found: FoundItem) -> NamedToken | None:
    return None if found.encoded is None else token_of(found.encoded)


def _find(token: NamedToken | None, token_id: str) -> NamedToken:
    if token is None:
        raise TokenNotFound(f"there is no token with the id {token_id!r}")
    return token


def view_of(token: NamedToken, version: int | None = None) -> TokenView:
    """Return a token as the API shows it."""
    return TokenView(
        id=token.id,
        name=token.name,
        user=token.user,
        roles=list(token.roles),
        not_after_ms=token.not_after_ms,
        created_at_ms=token.created_at_ms,
        changed_by=token.changed_by,
        version=token.version if version is None else version,
    )
