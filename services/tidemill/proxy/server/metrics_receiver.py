"""The OTLP receiver of clients' metrics, on the public port."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as collector

from tidemill.common.errors import KeyMissing, SecurityStale, ServiceError, Unauthorized
from tidemill.common.slices import run_slices
from tidemill.message.namespaces import check_namespace
from tidemill.message.outline import MalformedWire
from tidemill.proxy.shares import Shares
from tidemill.transport.grpc.status import RpcCode, RpcError

if TYPE_CHECKING:
    from tidemill.proxy.clients.metrics import ClientMetrics, ExportResult
    from tidemill.proxy.server.call import Call

EXPORT: Final = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"
# Concurrent exports of all clients. A client sends one per minute, which takes milliseconds. One
# address gets at most as many as are free. A rejected client repeats all of it a minute later.
EXPORTS_MAX: Final = 64


class MetricsReceiver:
    """The receiver of exports; its answer counts the rejected points."""

    def __init__(self, metrics: ClientMetrics) -> None:
        self._metrics = metrics
        # One slice of all exports per turn of the event loop.
        self._turn = asyncio.Lock()
        self._under_way = Shares(EXPORTS_MAX)

    async def export(self, call: Call, request: bytes) -> bytes:
        """Process one export. Raises RpcError for a call without a client id."""
        try:
            call.method = "export"
            if call.has_unknown_key():
                await call.read_unknown_key()
            call.check()
            check_namespace(call.namespace)
        except (Unauthorized, KeyMissing, SecurityStale) as error:
            raise RpcError(RpcCode.UNAUTHENTICATED, error.message) from error
        except ServiceError as error:
            raise RpcError(RpcCode.INVALID_ARGUMENT, error.message) from error
        sharer = call.sharer
        if not self._under_way.has_room(sharer):
            raise RpcError(RpcCode.RESOURCE_EXHAUSTED, "too many concurrent exports")
        self._under_way.take(sharer)
        try:
            slices = self._metrics.add(sharer, call.client_id, request, namespace=call.namespace)
            return _answer(await run_slices(slices, one_by_one=self._turn))
        except MalformedWire as error:
            message = "the request is not an export of metrics"
            raise RpcError(RpcCode.INVALID_ARGUMENT, message) from error
        finally:
            self._under_way.give_back(sharer)


def _answer(result: ExportResult) -> bytes:
    answer = collector.ExportMetricsServiceResponse()
    if result.rejected:
        answer.partial_success.rejected_data_points = result.rejected
        answer.partial_success.error_message = result.reason
    return answer.SerializeToString()
