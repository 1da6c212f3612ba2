"""The OTLP receiver of clients' metrics: a method of the public port beside the protocol's own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as collector

from tidemill.common.errors import ServiceError
from tidemill.common.slices import run_slices
from tidemill.message.outline import MalformedWire
from tidemill.proxy.shares import AddressShares
from tidemill.transport.grpc.status import RpcCode, RpcError

if TYPE_CHECKING:
    from tidemill.proxy.clients.metrics import ClientMetrics, Taken
    from tidemill.proxy.server.call import Call

EXPORT: Final = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"
# Exports under way: clients send one a minute, which takes milliseconds. One address has at most as
# many as are free, and who finds no place repeats it all a minute later.
EXPORTS_MAX: Final = 64


class MetricsReceiver:
    """Takes exports; what of one cannot be taken is counted in the answer."""

    def __init__(self, metrics: ClientMetrics) -> None:
        self._metrics = metrics
        # Of all exports a turn of the loop takes one slice.
        self._turn = asyncio.Lock()
        self._under_way = AddressShares(EXPORTS_MAX)

    async def export(self, call: Call, request: bytes) -> bytes:
        """Take one export. Raises RpcError for a client that does not say who it is."""
        try:
            call.check()
        except ServiceError as error:
            raise RpcError(RpcCode.INVALID_ARGUMENT, error.message) from error
        address = address_of(call)
        if not self._under_way.has_room(address):
            raise RpcError(RpcCode.RESOURCE_EXHAUSTED, "too many exports are under way")
        self._under_way.take(address)
        try:
            slices = self._metrics.take(address, call.client_id, request)
            return _answer(await run_slices(slices, one_by_one=self._turn))
        except MalformedWire as error:
            message = "the request is not an export of metrics"
            raise RpcError(RpcCode.INVALID_ARGUMENT, message) from error
        finally:
            self._under_way.give_back(address)


def address_of(call: Call) -> str:
    """Return where a call comes from, without its port."""
    return call.peer().rpartition(":")[0]


def _answer(taken: Taken) -> bytes:
    answer = collector.ExportMetricsServiceResponse()
    if taken.rejected:
        answer.partial_success.rejected_data_points = taken.rejected
        answer.partial_success.error_message = taken.reason
    return answer.SerializeToString()
