"""Operations: list, show and cancel bulk changes that run in the background."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Path, Query

from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import Brokers
from tidemill.admin.http.paging import PAGE_SIZE, PageSize
from tidemill.admin.http.request_access import RequestAccess
from tidemill.admin.json.operations import (
    OperationCancelView,
    OperationPageView,
    OperationStateView,
    OperationView,
)
from tidemill.admin.messages.operation_parts import (
    KnownOperations,
    OperationPart,
    find_operations,
    operation_of,
)
from tidemill.admin.routes import Access, Caller, ChangeAuthor, Cluster, DryRun
from tidemill.common.errors import BrokerGroupUnreachable, OperationNotFound
from tidemill.security.acl import Action, Resource, ResourceType
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

router = APIRouter(tags=["operations"])

PROCESSES: Final = Resource(ResourceType.CLUSTER, "processes")
OperationId = Annotated[
    str,
    Path(
        description="Id of the operation, or of one of its parts.",
        json_schema_extra={"pattern": "^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}:[0-9]{1,18}$"},
    ),
]
State = Annotated[
    OperationStateView | None, Query(description="Only in this state. Default: all states.")
]
Token = Annotated[
    str | None,
    Query(
        alias="pageToken",
        pattern="^[0-9]{1,16}:[A-Za-z0-9._-]{1,64}:[0-9]{1,19}$",
        description="`nextPageToken` of the previous page: begin and id of its last operation.",
    ),
]


@router.get("/operations", response_model_exclude_none=True)
async def list_operations(
    cluster: Cluster,
    access: Access,
    state: State = None,
    page_size: PageSize = PAGE_SIZE,
    page_token: Token = None,
) -> OperationPageView:
    """List operations that run, or ended in the last 7 days, the newest first.

    A user sees its own operations, and with Get on `Cluster:processes` all of them.
    """
    known = await find_operations(cluster)
    shown = [operation_of(parts) for parts in known.operations if _may_see(access, parts)]
    if state is not None:
        shown = [one for one in shown if one.state is state]
    if page_token is not None:
        created_at_ms, _, last = page_token.partition(":")
        after = -int(created_at_ms), last
        shown = [one for one in shown if (-one.created_at_ms, one.id) > after]
    page = shown[:page_size]
    return OperationPageView(
        operations=page,
        next_page_token=(
            f"{page[-1].created_at_ms}:{page[-1].id}" if len(shown) > page_size else None
        ),
        unreachable=known.unreachable or None,
    )


@router.get("/operations/{operation_id}", response_model_exclude_none=True)
async def get_operation(
    operation_id: OperationId, cluster: Cluster, access: Access
) -> OperationView:
    """Show an operation and its progress."""
    return operation_of(_find(await find_operations(cluster), access, operation_id))


@router.post("/operations/{operation_id}:cancel", response_model_exclude_none=True)
async def cancel_operation(
    operation_id: OperationId,
    cluster: Cluster,
    access: Access,
    caller: Caller,
    author: ChangeAuthor,
    dry_run: DryRun = False,
) -> OperationCancelView:
    """End an operation. Its completed items stay. One that has ended stays as it is.

    A user may cancel its own operations, and with Update on `Cluster:processes` all of them.
    """
    parts = _find(await find_operations(cluster), access, operation_id)
    if not _is_own(access, parts):
        access.require(Action.UPDATE, PROCESSES)
    ended = []
    for broker, operation in parts:
        request = pb.CancelOperationRequest(
            id=operation.id,
            dry_run=dry_run,
            requested_by=caller,
            audit=author.of(f"Operation:{parts[0].id}"),
        )
        ended.append(OperationPart(broker, await _cancel(cluster, broker, request)))
    return OperationCancelView(dry_run=dry_run, by=caller, operation=operation_of(ended))


async def _cancel(
    cluster: Brokers, broker: str, request: pb.CancelOperationRequest
) -> pb.Operation:
    member = await cluster.member(broker)
    return await member.client.call(calls.CANCEL_OPERATION, request)


def _is_own(access: RequestAccess, parts: list[OperationPart]) -> bool:
    return bool(access.user) and parts[0].operation.user == access.user


def _may_see(access: RequestAccess, parts: list[OperationPart]) -> bool:
    return _is_own(access, parts) or access.allows(Action.GET, PROCESSES)


def _find(known: KnownOperations, access: RequestAccess, id_: str) -> list[OperationPart]:
    """Return the parts of an operation that the caller may see. Raises OperationNotFound."""
    parts = known.find(id_)
    if parts and _may_see(access, parts):
        return parts
    if id_.rpartition(":")[0] in known.unreachable:
        raise BrokerGroupUnreachable(f"{id_.rpartition(':')[0]} cannot be reached; retry later")
    raise OperationNotFound(
        f"there is no operation {id_}; operations are known for 7 days after their end"
    )
