"""Quotas: list, set, show and delete them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Path

from tidemill.admin.audit.author import DELETE
from tidemill.admin.cluster.former_users import of_deleted_users
from tidemill.admin.cluster.security_client import FoundItem, Item
from tidemill.admin.cluster.user_changes import check_version, find_user
from tidemill.admin.http.paging import PAGE_SIZE, NameCursor, PageSize
from tidemill.admin.http.preconditions import EntityTag, Matching, Tagging
from tidemill.admin.json.quotas import (
    QuotaDeletionView,
    QuotaKindView,
    QuotaPageView,
    QuotaSettings,
    QuotaView,
)
from tidemill.admin.routes import Access, Caller, ChangeAuthor, DryRun, SecurityItems
from tidemill.admin.routes.security import WallClock
from tidemill.common.errors import Conflict, IllegalGroup, IllegalTopic, QuotaNotFound
from tidemill.message.resource_names import (
    TOPIC_CHARS_MAX,
    check_begin,
    check_group,
    check_own_topic,
)
from tidemill.security.acl import Action, Resource, ResourceType
from tidemill.security.identities import user_of
from tidemill.security.quotas import (
    DISPATCH_LIMITS,
    QUOTA,
    STOCK_LIMITS,
    QuotaKind,
    QuotaLimit,
    TrafficQuota,
    quota_of,
)
from tidemill.security.subjects import subject_name
from tidemill.security.table import USER

router = APIRouter(tags=["quotas"])

AREA = Resource(ResourceType.CLUSTER, "quotas")
Kind = Annotated[QuotaKindView, Path(description="Kind of the subject.")]
Subject = Annotated[
    str,
    Path(
        min_length=1,
        max_length=255,
        description="Name of the user, topic or consumer group, id of the client, or the begin of"
        " full topic names such as `shop%25` for the namespace `shop`.",
    ),
]


@router.get("/quotas")
async def list_quotas(
    items: SecurityItems, cursor: NameCursor, page_size: PageSize = PAGE_SIZE
) -> QuotaPageView:
    """List quotas, ordered by name."""
    found = await items.page(QUOTA, cursor.after, page_size)
    quotas = [quota_of(encoded) for encoded in found.encoded]
    former = await of_deleted_users(items, quotas)
    return QuotaPageView(
        quotas=[view_of(quota, is_former=quota.name in former) for quota in quotas],
        next_page_token=cursor.next(quotas[-1].name) if found.has_more else None,
    )


@router.get("/quotas/{kind}/{subject:path}")
async def get_quota(
    kind: Kind, subject: Subject, items: SecurityItems, match: Tagging
) -> QuotaView:
    """Show a quota."""
    name = subject_name(kind.value, subject)
    quota = _find(await items.find(QUOTA, name), name)
    match.answer(EntityTag(0, quota.version))
    return view_of(quota, is_former=bool(await of_deleted_users(items, [quota])))


@router.put("/quotas/{kind}/{subject:path}")
async def put_quota(
    kind: Kind,
    subject: Subject,
    settings: QuotaSettings,
    items: SecurityItems,
    caller: Caller,
    author: ChangeAuthor,
    access: Access,
    clock: WallClock,
    match: Matching,
    dry_run: DryRun = False,
) -> QuotaView:
    """Set the limits of a subject. They count within a second, and all matching quotas apply.

    A user must exist. If it is deleted, its quota does not apply to a later user of its name.
    A consumer group has limits of deliveries, every other subject has limits of sends. A topic and
    a prefix also have limits of stored bytes and of pending timers, for all broker groups together.
    """
    _check_subject(kind, subject)
    limits = _limits_of(settings)
    _check_limits(QuotaKind(kind.value), limits)
    planned = TrafficQuota(
        kind=QuotaKind(kind.value),
        value=subject,
        limits=limits,
        changed_at_ms=clock.wall_ms(),
        changed_by=caller,
    )
    made: list[TrafficQuota] = []
    user_ids: list[int] = []

    async def check() -> None:
        if planned.kind is QuotaKind.USER:
            encoded = (await items.find(USER, subject)).encoded
            user_ids[:] = [find_user(None if encoded is None else user_of(encoded), subject).id]

    def decide(found: FoundItem) -> list[Item]:
        match.check(_tag_of(found))
        old = None if found.encoded is None else quota_of(found.encoded)
        access.require(Action.CREATE if old is None else Action.UPDATE, AREA)
        check_version(planned.name, None if old is None else old.version, settings.if_version)
        user_id = user_ids[0] if user_ids else 0
        if old is not None and (old.user_id, old.limits) == (user_id, planned.limits):
            made[:] = [old]
            return []
        created_at_ms = planned.changed_at_ms if old is None else old.created_at_ms
        made[:] = [replace(planned, user_id=user_id, created_at_ms=created_at_ms)]
        return [made[0].to_item()]

    version = await items.change(
        QUOTA,
        planned.name,
        decide,
        caller=caller,
        audit=author.of(f"Quota:{planned.name}"),
        dry_run=dry_run,
        check=check,
    )
    [quota] = made
    quota = quota if quota.version else replace(quota, version=version)
    if not dry_run:
        match.answer(EntityTag(0, quota.version))
    return view_of(quota, is_former=False)


@router.delete("/quotas/{kind}/{subject:path}")
async def delete_quota(
    kind: Kind,
    subject: Subject,
    items: SecurityItems,
    caller: Caller,
    author: ChangeAuthor,
    match: Matching,
    dry_run: DryRun = False,
) -> QuotaDeletionView:
    """Delete a quota. Waiting sends and polls pass within a second."""
    name = subject_name(kind.value, subject)
    gone: list[TrafficQuota] = []

    def decide(found: FoundItem) -> list[Item]:
        match.check(_tag_of(found))
        gone[:] = [_find(found, name)]
        return [{"op": "deleteQuota", "name": name}]

    await items.change(
        QUOTA,
        name,
        decide,
        caller=caller,
        audit=author.of(f"Quota:{name}", DELETE),
        dry_run=dry_run,
    )
    is_former = bool(await of_deleted_users(items, gone))
    return QuotaDeletionView(dry_run=dry_run, quota=view_of(gone[0], is_former=is_former))


def _check_subject(kind: Kind, subject: str) -> None:
    """Check that a quota can match something. Raises Conflict."""
    problem = ""
    try:
        match kind:
            case QuotaKindView.TOPIC:
                check_own_topic(subject)
            case QuotaKindView.GROUP:
                check_group(subject)
            case QuotaKindView.PREFIX:
                problem = check_begin(subject, chars_max=TOPIC_CHARS_MAX)
    except (IllegalTopic, IllegalGroup) as error:
        problem = error.message
    if problem:
        raise Conflict(f"a quota of the {kind.value} {subject!r} would never apply: {problem}")


def _limits_of(settings: QuotaSettings) -> dict[QuotaLimit, int]:
    limits = {
        QuotaLimit.PUBLISH_MESSAGES: settings.publish_messages_per_s,
        QuotaLimit.PUBLISH_BYTES: settings.publish_bytes_per_s,
        QuotaLimit.DISPATCH_MESSAGES: settings.dispatch_messages_per_s,
        QuotaLimit.DISPATCH_BYTES: settings.dispatch_bytes_per_s,
        QuotaLimit.STORED_BYTES: settings.stored_bytes,
        QuotaLimit.PENDING_TIMERS: settings.pending_timers,
    }
    return {limit: rate for limit, rate in limits.items() if rate}


def _check_limits(kind: QuotaKind, limits: Collection[QuotaLimit]) -> None:
    """Check that a subject can have these limits, and has one. Raises Conflict."""
    if not limits:
        raise Conflict("name a limit above 0; to remove all of them, delete the quota")
    for limit in limits:
        if not _fits(kind, limit):
            known = ", ".join(each for each in QuotaLimit if _fits(kind, each))
            raise Conflict(f"a {kind} has no limit {limit}; set {known}")


def _fits(kind: QuotaKind, limit: QuotaLimit) -> bool:
    if limit in STOCK_LIMITS:
        return kind in {QuotaKind.TOPIC, QuotaKind.PREFIX}
    return (kind is QuotaKind.GROUP) == (limit in DISPATCH_LIMITS)


def _tag_of(found: FoundItem) -> EntityTag | None:
    return None if found.encoded is None else EntityTag(0, quota_of(found.encoded).version)


def _find(found: FoundItem, name: str) -> TrafficQuota:
    if found.encoded is None:
        raise QuotaNotFound(f"there is no quota {name!r}; see `tidemill quota list`")
    return quota_of(found.encoded)


def view_of(quota: TrafficQuota, *, is_former: bool) -> QuotaView:
    """Return a quota as the API shows it."""
    return QuotaView(
        name=quota.name,
        kind=QuotaKindView(quota.kind.value),
        subject=quota.value,
        publish_messages_per_s=quota.limits.get(QuotaLimit.PUBLISH_MESSAGES, 0),
        publish_bytes_per_s=quota.limits.get(QuotaLimit.PUBLISH_BYTES, 0),
        dispatch_messages_per_s=quota.limits.get(QuotaLimit.DISPATCH_MESSAGES, 0),
        dispatch_bytes_per_s=quota.limits.get(QuotaLimit.DISPATCH_BYTES, 0),
        stored_bytes=quota.limits.get(QuotaLimit.STORED_BYTES, 0),
        pending_timers=quota.limits.get(QuotaLimit.PENDING_TIMERS, 0),
        of_deleted_user=is_former,
        version=quota.version,
        created_at_ms=quota.created_at_ms,
        changed_at_ms=quota.changed_at_ms,
        changed_by=quota.changed_by,
    )
