"""Operations: list, show and cancel bulk changes that run in the background."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Depends, Path, Query, Request

from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import UNREACHABLE_ERRORS
from tidemill.admin.cluster.own_operations import OwnOperation, OwnOperations, owner_of
from tidemill.admin.http.paging import PAGE_SIZE, PageCursor, PageSize, cursor_query
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
from tidemill.common.errors import BrokerGroupUnreachable, OperationNotFound, ServiceError
from tidemill.security.acl import Action, Resource, ResourceType
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

router = APIRouter(tags=["operations"])


def own_operations_of(request: Request) -> OwnOperations:
    """Return the operations of this process."""
    operations = request.app.state.own_operations
    assert isinstance(operations, OwnOperations)
    return operations


Operations = Annotated[OwnOperations, Depends(own_operations_of)]

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
    PageCursor,
    cursor_query(
        "[0-9]{1,16}:[A-Za-z0-9._-]{1,64}:[0-9]{1,19}", "begin and id of its last operation"
    ),
]


@router.get("/operations", response_model_exclude_none=True)
async def list_operations(
    cluster: Cluster,
    access: Access,
    own: Operations,
    begin: Token,
    state: State = None,
    page_size: PageSize = PAGE_SIZE,
) -> OperationPageView:
    """List operations that run, or ended in the last 7 days, the newest first.

    A user sees its own operations, and with Get on `Cluster:processes` all of them.
    """
    known = await find_operations(cluster)
    shown = [
        operation_of(parts, known.unreachable)
        for parts in known.operations
        if _may_see(access, parts)
    ]
    shown += [one.view for one in own.list() if _may_see_own(access, one)]
    shown.sort(key=lambda one: (-one.created_at_ms, one.id))
    if state is not None:
        shown = [one for one in shown if one.state is state]
    if begin.after:
        created_at_ms, _, last = begin.after.partition(":")
        after = -int(created_at_ms), last
        shown = [one for one in shown if (-one.created_at_ms, one.id) > after]
    page = shown[:page_size]
    return OperationPageView(
        operations=page,
        next_page_token=(
            begin.next(f"{page[-1].created_at_ms}:{page[-1].id}")
            if len(shown) > page_size
            else None
        ),
        unreachable=known.unreachable or None,
    )


@router.get("/operations/{operation_id}", response_model_exclude_none=True)
async def get_operation(
    operation_id: OperationId, cluster: Cluster, access: Access, own: Operations
) -> OperationView:
    """Show an operation and its progress."""
    if (found := own.find(operation_id)) is not None and _may_see_own(access, found):
        return found.view
    if (lost := own.find_lost(operation_id)) is not None:
        return lost
    known = await find_operations(cluster)
    return operation_of(_find(known, access, operation_id), known.unreachable)


@router.post("/operations/{operation_id}:cancel", response_model_exclude_none=True)
async def cancel_operation(
    operation_id: OperationId,
    cluster: Cluster,
    access: Access,
    caller: Caller,
    author: ChangeAuthor,
    own: Operations,
    dry_run: DryRun = False,
) -> OperationCancelView:
    """End an operation. Its completed items stay. One that has ended stays as it is.

    A user may cancel its own operations, and with Update on `Cluster:processes` all of them. While
    a broker group is unreachable, its part goes on: repeat the call later.
    """
    if (found := own.find(operation_id)) is not None and _may_see_own(access, found):
        if not access.user or found.user != owner_of(access):
            access.require(Action.UPDATE, PROCESSES)
        if not dry_run:
            found.cancel()
        return OperationCancelView(dry_run=dry_run, by=caller, operation=found.view)
    if (lost := own.find_lost(operation_id)) is not None:
        return OperationCancelView(dry_run=dry_run, by=caller, operation=lost)
    known = await find_operations(cluster)
    parts = _find(known, access, operation_id)
    if not _is_own(access, parts):
        access.require(Action.UPDATE, PROCESSES)
    shown: list[OperationPart] = []
    unreachable = list(known.unreachable)
    errors: list[ServiceError] = []
    warnings: list[str] = []
    for part in parts:
        request = pb.CancelOperationRequest(
            id=part.operation.id,
            dry_run=dry_run,
            requested_by=caller,
            audit=author.of(f"Operation:{parts[0].id}"),
        )
        try:
            member = await cluster.member(part.broker)
            ended = await member.client.call(calls.CANCEL_OPERATION, request)
            shown.append(part._replace(operation=ended))
        except ServiceError as error:
            errors.append(error)
            shown.append(part)
            if isinstance(error, UNREACHABLE_ERRORS):
                unreachable.append(part.broker)
            else:
                warnings.append(f"{part.broker}: {error.message}")
    if len(errors) == len(parts):
        raise errors[0]
    return OperationCancelView(
        dry_run=dry_run,
        by=caller,
        operation=operation_of(shown, unreachable),
        warnings=warnings or None,
        unreachable=unreachable or None,
    )


def _is_own(access: RequestAccess, parts: list[OperationPart]) -> bool:
    first = parts[0].operation
    return bool(access.user) and (first.user, first.user_id) == (access.user, access.user_id)


def _may_see(access: RequestAccess, parts: list[OperationPart]) -> bool:
    return _is_own(access, parts) or access.allows(Action.GET, PROCESSES)


def _may_see_own(access: RequestAccess, operation: OwnOperation) -> bool:
    is_own = bool(access.user) and operation.user == owner_of(access)
    return is_own or access.allows(Action.GET, PROCESSES)


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
