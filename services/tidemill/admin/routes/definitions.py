"""The definitions of a cluster: read, apply and convert them."""

from __future__ import annotations

import hashlib
import re
from http import HTTPStatus
from typing import Annotated, Final

from fastapi import APIRouter, Body, Depends, Header, HTTPException, Query, Request, Response

from tidemill.admin.cluster.own_operations import OwnOperation, owner_of
from tidemill.admin.definitions.applying import apply_changes, checked_changes
from tidemill.admin.definitions.export import read_definitions
from tidemill.admin.definitions.from_rabbitmq import converted_from_rabbitmq
from tidemill.admin.definitions.from_rocketmq import converted_from_rocketmq
from tidemill.admin.definitions.parsing import parse_definitions
from tidemill.admin.definitions.plan import planned_changes
from tidemill.admin.http.access import BodyLimit
from tidemill.admin.http.preconditions import ETAG
from tidemill.admin.http.problems import find_other_type
from tidemill.admin.http.rest_calls import RestCalls
from tidemill.admin.json.definitions import (
    ConversionSource,
    ConversionView,
    Definitions,
    DefinitionsApplyView,
    ForeignFile,
)
from tidemill.admin.json.operations import OperationKindView
from tidemill.admin.routes import Access, Caller, Cluster, DryRun, SecurityItems
from tidemill.admin.routes.operation_keys import OperationKey
from tidemill.admin.routes.operations import Operations
from tidemill.common.errors import PreconditionFailed

router = APIRouter(tags=["definitions"])

# Parsing JSON that consists of commas takes forty times its size.
BODY_BYTES_MAX: Final = 2 << 20
BODY_LIMITS: Final = {
    re.compile("/api/v1/definitions:apply|/ui/settings-definitions/apply"): BodyLimit(
        BODY_BYTES_MAX, "split the file, and apply each part without prune"
    ),
    re.compile("/api/v1/definitions:convert"): BodyLimit(
        BODY_BYTES_MAX, "remove the objects that the new cluster does not need"
    ),
}
JSON: Final = "application/json"
_FILE: Final = {"$ref": "#/components/schemas/Definitions"}
_CONVERTERS: Final = {
    ConversionSource.RABBITMQ: converted_from_rabbitmq,
    ConversionSource.ROCKETMQ: converted_from_rocketmq,
}


@router.get("/definitions", response_model=Definitions)
async def get_definitions(cluster: Cluster, items: SecurityItems, access: Access) -> Response:
    """Return the configuration of the cluster: roles, users, topics, consumer groups and quotas.

    It leaves out objects without the right Get, and has a fixed order and no secrets. Positions of
    consumer groups, pauses, bans and tokens are no definitions.
    """
    found = await read_definitions(cluster, items, access)
    return Response(found.text, media_type=JSON, headers={ETAG: found.etag})


async def file_of(request: Request) -> Definitions:
    """Return the file of the body. Raises RequestValidationError, and HTTPException for a type."""
    if reason := find_other_type(request):
        raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, reason)
    return await parse_definitions(await request.body())


async def digest_of(request: Request) -> str:
    """Return a digest of the body."""
    return hashlib.sha256(await request.body()).hexdigest()


@router.post(
    "/definitions:apply",
    response_model_exclude_none=True,
    responses={202: {"description": "An operation has begun.", "model": DefinitionsApplyView}},
    openapi_extra={"requestBody": {"content": {JSON: {"schema": _FILE}}, "required": True}},
)
async def apply_definitions(
    wanted: Annotated[Definitions, Depends(file_of)],
    digest: Annotated[str, Depends(digest_of)],
    request: Request,
    cluster: Cluster,
    items: SecurityItems,
    access: Access,
    caller: Caller,
    operations: Operations,
    key: OperationKey,
    response: Response,
    prune: Annotated[
        bool, Query(description="Delete the objects of the listed kinds that the file lacks.")
    ] = False,
    dry_run: DryRun = False,
    if_match: Annotated[
        str | None,
        Header(
            alias="If-Match",
            description="`etag` of the dry run. If the cluster has changed since then, the answer"
            " is 412, and nothing has begun.",
        ),
    ] = None,
) -> DefinitionsApplyView:
    """Make the cluster as the file defines it.

    A missing field of an object does not change. All changes are checked first, each with the right
    and the dry run of its own operation; a refused one refuses the file. Then an operation makes
    them, roles and users first, deletions last.
    """
    sent = {"prune": prune, "file": digest}
    calls = RestCalls(request.app.state.api or request.app, request.scope)
    with operations.planning():  # So two requests with one key do not both begin.
        if not dry_run and (begun := operations.find_by_key(key, sent)) is not None:
            response.status_code = HTTPStatus.ACCEPTED
            return DefinitionsApplyView(
                dry_run=False, by=caller, changes=[], operation=begun.view, etag=""
            )
        current = await read_definitions(cluster, items, access)
        if if_match not in {None, current.etag}:
            raise PreconditionFailed(
                "the cluster has changed since the dry run, and nothing has begun; look at the"
                " changes again"
            )
        changes = await planned_changes(current, wanted, prune=prune)
        if changes and not dry_run:
            operations.check_room(owner_of(access))
        shown = await checked_changes(calls, changes)
        view = DefinitionsApplyView(dry_run=dry_run, by=caller, changes=shown, etag=current.etag)
        if dry_run or not changes:
            return view

        async def work(operation: OwnOperation) -> None:
            await apply_changes(calls, changes, operation)

        view.operation = operations.start(
            OperationKindView.APPLY_DEFINITIONS,
            work,
            total=len(changes),
            by=caller,
            user=owner_of(access),
            key=key,
            request=sent,
        ).view
    response.status_code = HTTPStatus.ACCEPTED
    return view


@router.post("/definitions:convert", response_model_exclude_unset=True)
async def convert_definitions(
    source: Annotated[
        ConversionSource, Query(alias="from", description="The broker that exported the file.")
    ],
    exported: Annotated[
        ForeignFile,
        Body(
            description="The file: of `rabbitmqctl export_definitions`, or the JSON of `mqadmin"
            " exportMetadata`."
        ),
    ],
) -> ConversionView:
    """Convert the definitions of another broker. Nothing changes: apply the result afterwards.

    The report has one row for each object of the file.
    """
    return _CONVERTERS[source](exported)
