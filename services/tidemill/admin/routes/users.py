"""Users: list, create, change, show, rotate and delete them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated

from fastapi import APIRouter, Body, Depends, Path, Query, Request

from tidemill.admin.audit.author import DELETE
from tidemill.admin.cluster.lock_outs import LockOutCheck
from tidemill.admin.cluster.security_client import FoundItem, Item, SecurityClient
from tidemill.admin.cluster.security_states import find_secret_uses
from tidemill.admin.cluster.token_changes import check_roles, deletion_of, tokens_of
from tidemill.admin.cluster.user_changes import (
    UserChange,
    UserChanges,
    check_listed,
    find_sealing_key,
    find_user,
)
from tidemill.admin.http.paging import PAGE_SIZE, NameCursor, PageSize
from tidemill.admin.http.preconditions import EntityTag, Matching, Tagging
from tidemill.admin.http.request_access import RequestAccess
from tidemill.admin.json.security import (
    RotationSettings,
    SecretView,
    ShownUserView,
    UserDeletionView,
    UserPageView,
    UserPutView,
    UserSettings,
    UserView,
)
from tidemill.admin.routes import Access, Caller, ChangeAuthor, Cluster, DryRun, SecurityItems
from tidemill.admin.routes.security import Keys, WallClock, entries_of, entry_views
from tidemill.common.errors import Conflict
from tidemill.security.identities import SealedSecret, User, user_of
from tidemill.security.secret_uses import SecretUses
from tidemill.security.table import Mode
from tidemill.security.tokens import NamedToken

router = APIRouter(tags=["security"])

USER = "user"
UserName = Annotated[
    str,
    Path(description="Name of the user.", json_schema_extra={"pattern": "^[A-Za-z0-9._@-]{1,64}$"}),
]

Force = Annotated[
    bool, Query(description="Delete also the user of this request, and the last super user.")
]


def uses_of(request: Request) -> SecretUses:
    """Return the last uses of secrets at this process."""
    uses = request.app.state.secret_uses
    assert isinstance(uses, SecretUses)
    return uses


Uses = Annotated[SecretUses, Depends(uses_of)]


@router.get("/users", response_model_exclude_none=True)
async def list_users(
    items: SecurityItems, cursor: NameCursor, page_size: PageSize = PAGE_SIZE
) -> UserPageView:
    """List users, ordered by name."""
    found = await items.page(USER, cursor.after, page_size)
    users = [user_of(encoded) for encoded in found.encoded]
    return UserPageView(
        users=[view_of(user) for user in users],
        next_page_token=cursor.next(users[-1].name) if found.has_more else None,
    )


@router.get("/users/{user}", response_model_exclude_none=True)
async def get_user(
    user: UserName, items: SecurityItems, cluster: Cluster, uses: Uses, match: Tagging
) -> ShownUserView:
    """Show a user, and when each of its secrets was last used."""
    found = find_user(_read(await items.find(USER, user)), user)
    known = await find_secret_uses(cluster, found.id, uses)
    match.answer(EntityTag(found.id, found.version))
    return ShownUserView(
        **view_of(found, used_at_ms=known.used_at_ms).model_dump(),
        uses_since_ms=known.since_ms,
        unreachable=list(known.unreachable) or None,
    )


@router.put("/users/{user}", response_model_exclude_none=True)
async def put_user(
    user: UserName,
    settings: UserSettings,
    items: SecurityItems,
    caller: Caller,
    author: ChangeAuthor,
    keys: Keys,
    clock: WallClock,
    access: Access,
    match: Matching,
    dry_run: DryRun = False,
) -> UserPutView:
    """Create or change a user. The answer has the secret of a new one, and shows it only here.

    In the mode `on`, a change that takes the rights of the caller or of the last super user needs
    `force`.
    """
    change = UserChange(
        type=settings.type,
        is_enabled=settings.enabled,
        entries=None if settings.entries is None else entries_of(settings.entries),
        roles=None if settings.roles is None else tuple(settings.roles),
        service_accounts=settings.service_accounts,
        certificates=settings.certificates,
        secret=settings.secret,
        is_weak_secret_allowed=settings.allow_weak_secret,
        if_version=settings.if_version,
    )
    changes = UserChanges(keys, clock.wall_ms(), caller)
    guard = None if settings.force else _guard_of(items, user, access)
    made: list[tuple[User | None, User, str]] = []

    def decide(found: FoundItem) -> list[Item]:
        old = _read(found)
        match.check(_tag_of(old))
        new, secret = changes.put(user, old, change, table_version=found.version)
        if guard is not None:
            guard.check(old, new)
        made[:] = [(old, new, secret)]
        return [] if new == old else [new.to_item()]

    async def check() -> None:
        changes.sealing_key = await find_sealing_key(items)
        await check_roles(items, change.roles or ())
        await check_listed(items, user, change)
        if guard is not None and change.may_lock_out:
            await guard.find_others()

    version = await items.change(
        USER,
        user,
        decide,
        caller=caller,
        audit=author.of(f"User:{user}"),
        dry_run=dry_run,
        check=check,
    )
    [(old, new, secret)] = made
    view = view_of(new, version=new.version if new == old else version)
    if not dry_run:
        match.answer(EntityTag(view.id, view.version))
    is_shown = secret and settings.secret is None and not dry_run
    return UserPutView(**view.model_dump(), is_new=old is None, secret=secret if is_shown else None)


@router.post("/users/{user}:rotate", response_model_exclude_none=True)
async def rotate_user(
    user: UserName,
    settings: Annotated[RotationSettings, Body(default_factory=RotationSettings)],
    items: SecurityItems,
    caller: Caller,
    author: ChangeAuthor,
    keys: Keys,
    clock: WallClock,
    access: Access,
    match: Matching,
    dry_run: DryRun = False,
) -> UserPutView:
    """Make a new secret. The present one stays valid for a time, so that no call fails.

    If the older one of two secrets has not ended yet, a rotation needs `force`, or a time of 0 ms,
    which ends all other secrets.
    """
    changes = UserChanges(keys, clock.wall_ms(), caller)
    made: list[tuple[User, str]] = []
    seen: list[tuple[SealedSecret, ...]] = []

    def decide(found: FoundItem) -> list[Item]:
        known = _read(found)
        match.check(_tag_of(known))
        old = find_user(known, user)
        access.check_same(old)
        seen.append(old.secrets)
        if seen[0] != old.secrets:
            raise Conflict(f"another rotation of {user} came first; look at its secrets again")
        rotated = changes.rotate(
            old, retire_after_ms=settings.retire_after_ms, force=settings.force
        )
        made[:] = [rotated]
        return [made[0][0].to_item()]

    async def check() -> None:
        changes.sealing_key = await find_sealing_key(items)

    version = await items.change(
        USER,
        user,
        decide,
        caller=caller,
        audit=author.of(f"User:{user}"),
        dry_run=dry_run,
        check=check,
    )
    [(new, secret)] = made
    view = view_of(new, version=version)
    return UserPutView(**view.model_dump(), is_new=False, secret=None if dry_run else secret)


@router.delete("/users/{user}", response_model_exclude_none=True)
async def delete_user(
    user: UserName,
    items: SecurityItems,
    caller: Caller,
    author: ChangeAuthor,
    access: Access,
    match: Matching,
    dry_run: DryRun = False,
    force: Force = False,
) -> UserDeletionView:
    """Delete a user and its tokens.

    Its credentials are invalid at once. A later user of its name gets nothing. In the mode `on`,
    the deletion of the caller or of the last super user needs `force`.
    """
    guard = None if force else _guard_of(items, user, access)
    gone: list[User] = []
    tokens: list[NamedToken] = []

    async def check() -> None:
        tokens[:] = await tokens_of(items, user)
        if guard is not None:
            await guard.find_others()

    def decide(found: FoundItem) -> list[Item]:
        known = _read(found)
        match.check(_tag_of(known))
        gone[:] = [find_user(known, user)]
        if guard is not None:
            guard.check(gone[0], None)
        return [{"op": "deleteUser", "name": user}, *map(deletion_of, tokens)]

    await items.change(
        USER,
        user,
        decide,
        caller=caller,
        audit=author.of(f"User:{user}", DELETE),
        dry_run=dry_run,
        check=check,
    )
    names = [token.name for token in tokens]
    return UserDeletionView(dry_run=dry_run, user=view_of(gone[0]), tokens=names)


def _guard_of(items: SecurityClient, user: str, access: RequestAccess) -> LockOutCheck | None:
    """Return the check of a change of a user; None in a mode that locks nobody out."""
    return LockOutCheck(items, user, caller=access.user) if access.mode is Mode.ON else None


def _read(found: FoundItem) -> User | None:
    return None if found.encoded is None else user_of(found.encoded)


def _tag_of(user: User | None) -> EntityTag | None:
    return None if user is None else EntityTag(user.id, user.version)


def view_of(
    user: User,
    version: int | None = None,
    *,
    used_at_ms: Mapping[tuple[int, int], int] = MappingProxyType({}),
) -> UserView:
    """Return a user as the API shows it.

    `used_at_ms` has the last uses, by the id and the creation of the secret.
    """
    return UserView(
        name=user.name,
        id=user.id,
        type=user.type,
        enabled=user.is_enabled,
        secrets=[
            SecretView(
                id=secret.id,
                key_id=secret.key_id,
                created_at_ms=secret.created_at_ms,
                not_after_ms=secret.not_after_ms,
                used_at_ms=used_at_ms.get((secret.id, secret.created_at_ms)),
            )
            for secret in user.secrets
        ],
        entries=entry_views(user.entries),
        roles=list(user.roles),
        service_accounts=list(user.service_accounts),
        certificates=list(user.certificates),
        version=user.version if version is None else version,
        created_at_ms=user.created_at_ms,
        changed_at_ms=user.changed_at_ms,
        changed_by=user.changed_by,
    )
