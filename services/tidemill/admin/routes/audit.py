"""The audit log: a page of records of all broker groups and processes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BeforeValidator

from tidemill.admin.audit.pages import CURSOR_CHARS_MAX, CURSOR_PATTERN, find_page
from tidemill.admin.http.paging import PAGE_SIZE, PageCursor, PageSize, cursor_query
from tidemill.admin.json.audit import AuditKindView, AuditPageView, AuditRecordView
from tidemill.admin.json.schema import EXACT_MAX, Instant
from tidemill.admin.routes import Cluster, OwnAccessLog
from tidemill.security.access_log import RecordFilter
from tidemill.security.audit_results import AuditAction, AuditResult

router = APIRouter(tags=["audit"])

FILTER_CHARS_MAX = 512
Kind = Annotated[AuditKindView | None, Query(description="Only records of this kind.")]
User = Annotated[
    str, Query(max_length=FILTER_CHARS_MAX, description="Only of this user, verified or claimed.")
]
Resource = Annotated[
    str,
    Query(
        max_length=FILTER_CHARS_MAX,
        description="Only of this resource, such as Topic:orders. A last `*` stands for any text.",
    ),
]


def _action(value: object) -> object:
    """Return the action in its usual case. The command line accepts any case too."""
    return value.capitalize() if isinstance(value, str) else value


Action = Annotated[
    AuditAction | None,
    BeforeValidator(_action),
    Query(description="Only this action, in any case of letters."),
]
Result = Annotated[AuditResult | None, Query(description="Only this result.")]
ClientId = Annotated[
    str,
    Query(
        alias="clientId",
        max_length=FILTER_CHARS_MAX,
        description="Only refusals and accesses of this client id, and changes of it.",
    ),
]
FromMs = Annotated[
    Instant,
    Query(
        alias="fromMs",
        ge=0,
        le=EXACT_MAX,
        description="Only from this time on: Unix ms, or a time such as 2027-01-01T08:00:00Z.",
    ),
]
ToMs = Annotated[
    Instant,
    Query(
        alias="toMs",
        ge=0,
        le=EXACT_MAX,
        description="Only before this time: Unix ms, or a time such as 2027-01-01T08:00:00Z.",
    ),
]
AuditCursorQuery = Annotated[
    PageCursor,
    cursor_query(CURSOR_PATTERN, "the position of its last record", chars_max=CURSOR_CHARS_MAX),
]


@router.get("/audit", response_model_exclude_none=True)
async def list_audit(
    cluster: Cluster,
    own: OwnAccessLog,
    begin: AuditCursorQuery,
    kind: Kind = None,
    user: User = "",
    resource: Resource = "",
    action: Action = None,
    result: Result = None,
    client_id: ClientId = "",
    from_ms: FromMs = 0,
    to_ms: ToMs = EXACT_MAX,
    page_size: PageSize = PAGE_SIZE,
) -> AuditPageView:
    """List changes, refused calls and accesses, the newest first.

    Broker groups keep the newest 20,000 changes, at most 16 MiB. Each proxy and this admin process
    keep the last 10,000 refusals and accesses since their start.
    """
    wanted = RecordFilter(
        kind="" if kind is None else kind.value,
        user=user,
        resource=resource,
        action="" if action is None else action.value,
        result="" if result is None else result.value,
        client_id=client_id,
        from_ms=from_ms,
        to_ms=to_ms,
    )
    page = await find_page(cluster, own, wanted, size=page_size, token=begin.after)
    return AuditPageView(
        records=[AuditRecordView(**record) for record in page.records],
        next_page_token=begin.next(page.next_token),
        unreachable=page.unreachable or None,
    )
