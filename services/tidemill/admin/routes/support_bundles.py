"""Support bundles: make one, and download it."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import APIRouter, Body, Depends, Request, Response

from tidemill.admin.cluster.own_operations import OwnOperation, owner_of
from tidemill.admin.cluster.support_bundles import (
    DOCUMENTS,
    LISTS,
    BundledFile,
    SupportBundles,
    collected_files,
)
from tidemill.admin.http.rest_calls import RestCalls
from tidemill.admin.json.operations import OperationKindView
from tidemill.admin.json.support_bundles import SupportBundleRequest, SupportBundleView
from tidemill.admin.routes import Access, Caller
from tidemill.admin.routes.operation_keys import OperationKey
from tidemill.admin.routes.operations import OperationId, Operations
from tidemill.admin.routes.processes import All
from tidemill.common.clock import SystemClock
from tidemill.common.errors import Conflict, OperationNotFound
from tidemill.stubs.tidemill.process.v1 import process_pb2 as pb

router = APIRouter(tags=["processes"])
# The progress of an operation counts these files.
COUNTED: Final = tuple(f"{path.strip('/')}.json" for path in (*DOCUMENTS, *LISTS))
MEDIA_TYPE: Final = "application/gzip"
FILE: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "The bundle: a tar.gz.",
        "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
    }
}


def support_bundles_of(request: Request) -> SupportBundles:
    """Return the bundles of this process."""
    bundles = request.app.state.support_bundles
    assert isinstance(bundles, SupportBundles)
    return bundles


Bundles = Annotated[SupportBundles, Depends(support_bundles_of)]


@router.post("/support-bundles", status_code=HTTPStatus.ACCEPTED, response_model_exclude_none=True)
async def make_support_bundle(
    wanted: Annotated[SupportBundleRequest, Body(default_factory=SupportBundleRequest)],
    request: Request,
    processes: All,
    bundles: Bundles,
    operations: Operations,
    access: Access,
    caller: Caller,
    key: OperationKey,
) -> SupportBundleView:
    """Collect documents and log lines of the whole cluster, for support.

    It has no bodies of messages and no secrets. Documents of topics, consumer groups and clients
    have only those that the caller may read. The overview, the audit log and the log lines name
    objects of all users.
    """
    sent = wanted.model_dump(mode="json")
    if (begun := operations.find_by_key(key, sent)) is not None:
        return SupportBundleView(operation=begun.view)
    calls = RestCalls(request.app.state.api or request.app, request.scope)

    async def work(operation: OwnOperation) -> None:
        async def collect() -> list[BundledFile] | None:
            found = await processes.ask_all(pb.ProcessQuestion(read_log=pb.ReadLog()))
            logs = [(each.value.name, list(each.value.log_lines.lines)) for each in found.answers]
            files: list[BundledFile] = []
            async for file in collected_files(calls, logs, SystemClock().wall_ms()):
                if operation.is_cancelled:
                    return None
                files.append(file)
                if file.name.startswith(COUNTED):
                    operation.count()
            return files

        # A later user of the same name has another id.
        await bundles.make(
            operation.view.id, access.user_id, collect, is_anonymous=wanted.anonymize
        )

    begun = operations.start(
        OperationKindView.SUPPORT_BUNDLE,
        work,
        total=len(COUNTED),
        by=caller,
        user=owner_of(access),
        key=key,
        request=sent,
    )
    return SupportBundleView(operation=begun.view)


@router.get("/support-bundles/{operation_id}", responses=FILE, response_class=Response)
async def get_support_bundle(
    operation_id: OperationId, bundles: Bundles, operations: Operations, access: Access
) -> Response:
    """Download a support bundle. Only the user that has made it gets it, and super users."""
    bundle = bundles.find(operation_id)
    if bundle is not None:
        if bundle.user_id != access.user_id:
            access.require_super()
        name = f"tidemill-support-{operation_id.rpartition(':')[2]}.tar.gz"
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        return Response(bundle.content, media_type=MEDIA_TYPE, headers=headers)
    operation = operations.find(operation_id)
    if operation is not None and operation.view.ended_at_ms is None:
        raise Conflict(
            f"the bundle is not finished; wait for it: `tidemill operation wait {operation_id}`"
        )
    raise OperationNotFound(f"there is no bundle {operation_id}; a bundle is kept for an hour")
