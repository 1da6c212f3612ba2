"""Bans of users, client ids and addresses: list, create, show and delete them."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Depends, Path

from tidemill.admin.audit.author import DELETE
from tidemill.admin.cluster.former_users import of_deleted_users
from tidemill.admin.cluster.security_client import FoundItem, Item
from tidemill.admin.cluster.user_changes import check_version, find_user
from tidemill.admin.http.actor import Actor, actor_of
from tidemill.admin.http.paging import PAGE_SIZE, NameCursor, PageSize
from tidemill.admin.json.bans import (
    AddressBanSettings,
    BanDeletionView,
    BanKindView,
    BanPageView,
    BanSettings,
    BanView,
    ClientBanSettings,
    UserBanSettings,
)
from tidemill.admin.routes import Access, Caller, ChangeAuthor, DryRun, SecurityItems
from tidemill.admin.routes.security import WallClock
from tidemill.common.errors import BanNotFound, Conflict
from tidemill.security.bans import BAN, Ban, BanKind, ban_of, covers, range_text
from tidemill.security.identities import UserType, check_user_name, user_of
from tidemill.security.table import USER

router = APIRouter(tags=["bans"])

BanName = Annotated[
    str,
    Path(
        max_length=255,
        description="Name of the ban, such as `user:orders` or `address:10.1.0.0%2F16`. It is"
        " percent-encoded once more in the path.",
    ),
]
RequestActor = Annotated[Actor, Depends(actor_of)]


@router.get("/bans", response_model_exclude_none=True)
async def list_bans(
    items: SecurityItems, clock: WallClock, cursor: NameCursor, page_size: PageSize = PAGE_SIZE
) -> BanPageView:
    """List bans, ordered by name. Bans that have ended are listed until they are deleted."""
    found = await items.page(BAN, cursor.after, page_size)
    bans = [ban_of(encoded) for encoded in found.encoded]
    former = await of_deleted_users(items, bans)
    return BanPageView(
        bans=[view_of(ban, clock.wall_ms(), is_former=ban.name in former) for ban in bans],
        next_page_token=cursor.next(bans[-1].name) if found.has_more else None,
    )


@router.get("/bans/{ban}")
async def get_ban(ban: BanName, items: SecurityItems, clock: WallClock) -> BanView:
    """Show a ban."""
    found = _find(await items.find(BAN, ban), ban)
    is_former = bool(await of_deleted_users(items, [found]))
    return view_of(found, clock.wall_ms(), is_former=is_former)


@router.post("/bans")
async def create_ban(
    settings: BanSettings,
    items: SecurityItems,
    caller: Caller,
    author: ChangeAuthor,
    actor: RequestActor,
    access: Access,
    clock: WallClock,
    dry_run: DryRun = False,
) -> BanView:
    """Ban a user, a client id or addresses, or replace their ban. It counts within a second.

    A ban of the user or the address of this request needs `force`.
    """
    now_ms = clock.wall_ms()
    planned = _ban_of(settings, now_ms)
    made: list[Ban] = []
    user_ids: list[int] = []

    async def check() -> None:
        if not settings.force:
            _check_foreign(planned, actor)
        if planned.kind is BanKind.USER:
            encoded = (await items.find(USER, planned.value)).encoded
            user = find_user(None if encoded is None else user_of(encoded), planned.value)
            if user.type is UserType.SUPER:
                access.require_super()
            user_ids[:] = [user.id]

    def decide(found: FoundItem) -> list[Item]:
        old = None if found.encoded is None else ban_of(found.encoded)
        check_version(planned.name, None if old is None else old.version, settings.if_version)
        new = replace(
            planned,
            user_id=user_ids[0] if user_ids else 0,
            created_at_ms=now_ms if old is None else old.created_at_ms,
            changed_at_ms=now_ms,
            changed_by=caller,
        )
        if old is not None and _terms(old) == _terms(new):
            made[:] = [old]
            return []
        made[:] = [new]
        return [new.to_item()]

    version = await items.change(
        BAN,
        planned.name,
        decide,
        caller=caller,
        audit=author.of(f"Ban:{planned.name}"),
        dry_run=dry_run,
        check=check,
    )
    [ban] = made
    made_ban = ban if ban.version else replace(ban, version=version)
    return view_of(made_ban, now_ms, is_former=False)


@router.delete("/bans/{ban}")
async def delete_ban(
    ban: BanName,
    items: SecurityItems,
    caller: Caller,
    author: ChangeAuthor,
    clock: WallClock,
    dry_run: DryRun = False,
) -> BanDeletionView:
    """Delete a ban. Its user, client or addresses may call within a second."""
    gone: list[Ban] = []

    def decide(found: FoundItem) -> list[Item]:
        gone[:] = [_find(found, ban)]
        return [{"op": "deleteBan", "name": ban}]

    await items.change(
        BAN, ban, decide, caller=caller, audit=author.of(f"Ban:{ban}", DELETE), dry_run=dry_run
    )
    is_former = bool(await of_deleted_users(items, gone))
    view = view_of(gone[0], clock.wall_ms(), is_former=is_former)
    return BanDeletionView(dry_run=dry_run, ban=view)


def _ban_of(settings: BanSettings, now_ms: int) -> Ban:
    """Return the ban of a request. Raises BadRequest."""
    match settings:
        case UserBanSettings():
            kind, value = BanKind.USER, check_user_name(settings.user)
        case ClientBanSettings():
            kind, value = BanKind.CLIENT, settings.client_id
        case AddressBanSettings():
            kind, value = BanKind.ADDRESS, range_text(settings.address)
    until_ms = 0 if settings.for_ms is None else now_ms + settings.for_ms
    return Ban(kind=kind, value=value, until_ms=until_ms, reason=settings.reason)


def _check_foreign(ban: Ban, actor: Actor) -> None:
    """Raise Conflict for a ban of the caller itself."""
    is_own_user = ban.kind is BanKind.USER and ban.value == actor.user
    if is_own_user or covers(ban, actor.address):
        own = f"user {actor.user}" if is_own_user else f"the address {actor.address}"
        raise Conflict(f"the ban is about {own} of this request; repeat it with force (--force)")


def _terms(ban: Ban) -> tuple[object, ...]:
    return ban.user_id, ban.until_ms, ban.reason


def _find(found: FoundItem, name: str) -> Ban:
    if found.encoded is None:
        raise BanNotFound(f"there is no ban {name!r}; see `tidemill ban list`")
    return ban_of(found.encoded)


def view_of(ban: Ban, now_ms: int, *, is_former: bool) -> BanView:
    """Return a ban as the API shows it."""
    return BanView(
        name=ban.name,
        kind=BanKindView(ban.kind.value),
        value=ban.value,
        until_ms=ban.until_ms,
        ended=ban.is_over(now_ms),
        reason=ban.reason,
        of_deleted_user=is_former,
        version=ban.version,
        created_at_ms=ban.created_at_ms,
        changed_at_ms=ban.changed_at_ms,
        changed_by=ban.changed_by,
    )
