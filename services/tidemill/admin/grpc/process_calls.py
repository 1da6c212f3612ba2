"""The calls about the answering process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidemill.admin.audit.controller_actions import recorded
from tidemill.admin.cluster.proxies import list_clients
from tidemill.admin.grpc.calls import AdminCall, missing_note, ok
from tidemill.common import log
from tidemill.common.errors import BadRequest
from tidemill.common.version import version
from tidemill.stubs.apache.rocketmq.v2 import admin_pb2 as admin
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Mapping

COUNTED_MAX: Final = 10_000  # clients of one answer
# There is no level below debug.
LEVELS: Final[Mapping[int, str]] = {
    admin.ChangeLogLevelRequest.TRACE: "debug",
    admin.ChangeLogLevelRequest.DEBUG: "debug",
    admin.ChangeLogLevelRequest.INFO: "info",
    admin.ChangeLogLevelRequest.WARN: "warning",
    admin.ChangeLogLevelRequest.ERROR: "error",
}


async def change_log_level(
    call: AdminCall, request: admin.ChangeLogLevelRequest
) -> admin.ChangeLogLevelResponse:
    """Change the log level of this process until it ends."""
    level = LEVELS.get(request.level)
    if level is None:
        raise BadRequest(f"unknown log level {request.level}")
    process = call.parts.process

    async def change() -> str:
        return log.change_level(level)

    author = call.author.of(f"Process:{process}")
    before = await recorded(call.brokers, author, change, after={"logLevel": level})
    return admin.ChangeLogLevelResponse(
        remark=f"log level of {process} changed from {before} to {level} until its restart; other"
        " processes keep their levels"
    )


async def get_proxy_runtime_stats(
    call: AdminCall, _request: admin.GetProxyRuntimeStatsRequest
) -> admin.GetProxyRuntimeStatsResponse:
    """Count the producers and consumers of all proxies. Metrics have the rates."""
    page = await list_clients(call.brokers, pb.ListClientsRequest(clients_max=COUNTED_MAX))
    producers = sum(client.newest.client_type == v2.PRODUCER for _, client in page.clients)
    cut = f"only the first {COUNTED_MAX} clients are counted" if page.has_more else ""
    return admin.GetProxyRuntimeStatsResponse(
        status=ok(cut, missing_note(page.unreachable)),
        proxy_name=call.parts.process,
        version=version(),
        producers=producers,
        consumers=len(page.clients) - producers,
    )
