"""Roles: list, create, change, show and delete them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Path

from tidemill.admin.audit.author import DELETE
from tidemill.admin.cluster.security_client import FoundItem, Item, SecurityClient
from tidemill.admin.cluster.user_changes import check_size, check_version
from tidemill.admin.http.paging import PAGE_SIZE, NameCursor, PageSize
from tidemill.admin.http.preconditions import EntityTag, Matching, Tagging
from tidemill.admin.json.security import RoleDeletionView, RolePageView, RoleSettings, RoleView
from tidemill.admin.routes import Caller, ChangeAuthor, DryRun, SecurityItems
from tidemill.admin.routes.security import WallClock, entries_of, entry_views
from tidemill.common.errors import Conflict, RoleNotFound
from tidemill.security.acl import check_names
from tidemill.security.identities import (
    READY_MADE_ROLES,
    AccessRole,
    User,
    check_entries,
    check_user_name,
    role_of,
    user_of,
)
from tidemill.security.tokens import NamedToken, token_of

router = APIRouter(tags=["security"])

ROLE = "role"
NAMED_MAX = 10  # in an error
RoleName = Annotated[
    str,
    Path(description="Name of the role.", json_schema_extra={"pattern": "^[A-Za-z0-9._@-]{1,64}$"}),
]


@router.get("/roles", response_model_exclude_none=True)
async def list_roles(
    items: SecurityItems, cursor: NameCursor, page_size: PageSize = PAGE_SIZE
) -> RolePageView:
    """List roles: on the first page the ready-made ones, then the others by name."""
    found = await items.page(ROLE, cursor.after, page_size)
    roles = [role_of(encoded) for encoded in found.encoded]
    ready = [] if cursor.after else list(READY_MADE_ROLES.values())
    return RolePageView(
        roles=[view_of(role) for role in [*ready, *roles]],
        next_page_token=cursor.next(roles[-1].name) if found.has_more else None,
    )


@router.get("/roles/{role}")
async def get_role(role: RoleName, items: SecurityItems, match: Tagging) -> RoleView:
    """Show a role."""
    found = READY_MADE_ROLES.get(role) or _find(await items.find(ROLE, role), role)
    match.answer(EntityTag(0, found.version))
    return view_of(found)


@router.put("/roles/{role}")
async def put_role(
    role: RoleName,
    settings: RoleSettings,
    items: SecurityItems,
    caller: Caller,
    author: ChangeAuthor,
    clock: WallClock,
    match: Matching,
    dry_run: DryRun = False,
) -> RoleView:
    """Create or change a role. Its users have the new rights at once."""
    _check_own(role)
    check_user_name(role)
    entries = check_entries(entries_of(settings.entries))
    made: list[AccessRole] = []

    def decide(found: FoundItem) -> list[Item]:
        match.check(_tag_of(found))
        old = None if found.encoded is None else role_of(found.encoded)
        check_version(role, None if old is None else old.version, settings.if_version)
        check_names(entries, () if old is None else old.entries)
        if old is not None and old.entries == entries:
            made[:] = [old]
            return []
        check_size(role, [entry.to_item() for entry in entries])
        made[:] = [
            AccessRole(name=role, entries=entries, changed_at_ms=clock.wall_ms(), changed_by=caller)
        ]
        return [made[0].to_item()]

    version = await items.change(
        ROLE, role, decide, caller=caller, audit=author.of(f"Role:{role}"), dry_run=dry_run
    )
    [new] = made
    new = new if new.version else replace(new, version=version)
    if not dry_run:
        match.answer(EntityTag(0, new.version))
    return view_of(new)


@router.delete("/roles/{role}")
async def delete_role(
    role: RoleName,
    items: SecurityItems,
    caller: Caller,
    author: ChangeAuthor,
    match: Matching,
    dry_run: DryRun = False,
) -> RoleDeletionView:
    """Delete a role that no user and no token has."""
    _check_own(role)
    gone: list[AccessRole] = []

    async def check() -> None:
        users = [user.name async for user in _users(items) if role in user.roles]
        if users:
            raise Conflict(f"users have the role {role}: {_first(users)}; take it from them first")
        tokens = [f"{token.name} of {token.user}" async for token in _tokens(items, role)]
        if tokens:
            raise Conflict(f"tokens have the role {role}: {_first(tokens)}; delete them first")

    def decide(found: FoundItem) -> list[Item]:
        match.check(_tag_of(found))
        gone[:] = [_find(found, role)]
        return [{"op": "deleteRole", "name": role}]

    await items.change(
        ROLE,
        role,
        decide,
        caller=caller,
        audit=author.of(f"Role:{role}", DELETE),
        dry_run=dry_run,
        check=check,
    )
    return RoleDeletionView(dry_run=dry_run, role=view_of(gone[0]))


async def _users(items: SecurityClient) -> AsyncIterator[User]:
    async for encoded in items.all("user"):
        yield user_of(encoded)


async def _tokens(items: SecurityClient, role: str) -> AsyncIterator[NamedToken]:
    async for encoded in items.all("token"):
        if role.encode() in encoded and role in (token := token_of(encoded)).roles:
            yield token


def _first(names: list[str]) -> str:
    more = len(names) - NAMED_MAX
    return ", ".join(names[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")


def _check_own(role: str) -> None:
    if role in READY_MADE_ROLES:
        raise Conflict(f"the role {role} is a part of Tidemill; make one with another name")


def _tag_of(found: FoundItem) -> EntityTag | None:
    return None if found.encoded is None else EntityTag(0, role_of(found.encoded).version)


def _find(found: FoundItem, name: str) -> AccessRole:
    if found.encoded is None:
        raise RoleNotFound(f"there is no role {name!r}")
    return role_of(found.encoded)


def view_of(role: AccessRole) -> RoleView:
    """Return a role as the API shows it."""
    return RoleView(
        name=role.name,
        entries=entry_views(role.entries),
        ready_made=role.name in READY_MADE_ROLES,
        version=role.version,
        changed_at_ms=role.changed_at_ms,
        changed_by=role.changed_by,
    )
