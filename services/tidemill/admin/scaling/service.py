"""The gRPC service of an external scaler for KEDA.

INVALID_ARGUMENT, NOT_FOUND and FAILED_PRECONDITION mean that an operator must correct the trigger.
UNAVAILABLE is temporary: KEDA keeps the number of replicas or uses its fallback.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Final, TypeVar, final

import grpc
import structlog
from google.protobuf.message import DecodeError, Message

from tidemill.admin.scaling.demand import Demand, is_active, value_of
from tidemill.admin.scaling.demand_queries import DemandQueries
from tidemill.admin.scaling.metrics import ScalerMetrics
from tidemill.admin.scaling.trigger import Trigger, read_trigger
from tidemill.common.errors import Overloaded, ServiceError, UnavailableError, codes_of
from tidemill.stubs.externalscaler import externalscaler_pb2 as keda
from tidemill.transport.aio.call import DisconnectError, RpcCall, RpcMethod, server_streaming, unary
from tidemill.transport.aio.misuse_log import MisuseLog
from tidemill.transport.grpc.status import RpcCode, RpcError

log = structlog.get_logger()

R = TypeVar("R", bound=Message)

SERVICE: Final = keda.DESCRIPTOR.services_by_name["ExternalScaler"].full_name
# KEDA adds a prefix for each trigger.
METRIC_NAME: Final = "tidemill-messages"
STREAMS_MAX: Final = 512  # two per query: KEDA opens a new stream before it ends the old one
# The period of a stream, as long as the age of an answer. KEDA itself polls every 30 s by default.
POLL_PERIOD_S: Final = 2.0
NAME_CHARS_MAX: Final = 128  # of a ScaledObject, in a log line
_CODES: Final = {
    HTTPStatus.BAD_REQUEST: RpcCode.INVALID_ARGUMENT,
    HTTPStatus.NOT_FOUND: RpcCode.NOT_FOUND,
    HTTPStatus.CONFLICT: RpcCode.FAILED_PRECONDITION,
}


@final
class ExternalScaler:
    """The methods of the service."""

    def __init__(
        self,
        demands: DemandQueries,
        metrics: ScalerMetrics,
        *,
        poll_period_s: float = POLL_PERIOD_S,
    ) -> None:
        self._poll_period_s = poll_period_s
        self._demands = demands
        self._metrics = metrics
        self._misuse = MisuseLog()
        self._is_ending = asyncio.Event()

    def methods(self) -> Mapping[str, RpcMethod]:
        """Return the methods by path."""
        return {
            f"/{SERVICE}/IsActive": self._unary("IsActive", keda.ScaledObjectRef, self._is_active),
            f"/{SERVICE}/StreamIsActive": server_streaming(self._stream_is_active),
            f"/{SERVICE}/GetMetricSpec": self._unary(
                "GetMetricSpec", keda.ScaledObjectRef, self._metric_spec
            ),
            f"/{SERVICE}/GetMetrics": self._unary(
                "GetMetrics", keda.GetMetricsRequest, self._metrics_of
            ),
        }

    def drain(self) -> None:
        """End all streams without an error, so that KEDA reconnects after two seconds."""
        self._is_ending.set()

    # ------------------------------------------------------------ methods

    async def _is_active(self, request: keda.ScaledObjectRef) -> keda.IsActiveResponse:
        trigger = read_trigger(request.scalerMetadata)
        return keda.IsActiveResponse(result=is_active(await self._measure(trigger), trigger))

    async def _metric_spec(self, request: keda.ScaledObjectRef) -> keda.GetMetricSpecResponse:
        target = read_trigger(request.scalerMetadata).messages_per_replica
        spec = keda.MetricSpec(metricName=METRIC_NAME, targetSize=target, targetSizeFloat=target)
        return keda.GetMetricSpecResponse(metricSpecs=[spec])

    async def _metrics_of(self, request: keda.GetMetricsRequest) -> keda.GetMetricsResponse:
        if request.metricName not in ("", METRIC_NAME):
            raise RpcError(
                RpcCode.INVALID_ARGUMENT,
                f"unknown metric {request.metricName[:NAME_CHARS_MAX]!r}; the only metric is"
                f" {METRIC_NAME}",
            )
        trigger = read_trigger(request.scaledObjectRef.scalerMetadata)
        count = value_of(await self._measure(trigger), trigger)
        value = keda.MetricValue(metricName=METRIC_NAME, metricValue=count, metricValueFloat=count)
        return keda.GetMetricsResponse(metricValues=[value])

    async def _stream_is_active(self, call: RpcCall, request: bytes) -> None:
        with self._counted("StreamIsActive", call) as caller:
            parsed = _parse(keda.ScaledObjectRef, request)
            caller.read(parsed)
            trigger = read_trigger(parsed.scalerMetadata)
            if self._metrics.stream_count >= STREAMS_MAX:
                raise Overloaded(f"{STREAMS_MAX} streams are open already; try again later")
            self._metrics.stream_count += 1
            try:
                with contextlib.suppress(DisconnectError):
                    await self._push(call, trigger)
            finally:
                self._metrics.stream_count -= 1

    async def _push(self, call: RpcCall, trigger: Trigger) -> None:
        """Send whether consumers are needed, now and after each change, until the drain."""
        sent: bool | None = None
        while not self._is_ending.is_set():
            # While a broker group is unreachable, the demand is unknown and the last value stays.
            with contextlib.suppress(UnavailableError, grpc.aio.AioRpcError):
                needed = is_active(await self._measure(trigger), trigger)
                if needed != sent:
                    await call.send(keda.IsActiveResponse(result=needed).SerializeToString())
                    log.info(
                        "consumers are needed" if needed else "consumers are not needed",
                        group=trigger.query.group,
                        topic=trigger.query.topic,
                    )
                    sent = needed
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_ending.wait(), self._poll_period_s)

    # ------------------------------------------------------------ helpers

    async def _measure(self, trigger: Trigger) -> Demand:
        demand = await self._demands.of(trigger.query)
        self._metrics.record(trigger.query, demand)
        return demand

    def _unary(
        self, name: str, request_class: type[R], answer: Callable[[R], Awaitable[Message]]
    ) -> RpcMethod:
        async def handle(call: RpcCall, request: bytes) -> bytes:
            with self._counted(name, call) as caller:
                parsed = _parse(request_class, request)
                caller.read(parsed)
                return (await answer(parsed)).SerializeToString()

        return unary(handle)

    @contextlib.contextmanager
    def _counted(self, method: str, call: RpcCall) -> Iterator[_CallerName]:
        """Count a call by its status. Raise errors as RpcError, and log them."""
        code, caller = RpcCode.CANCELLED, _CallerName()
        try:
            yield caller
            code = RpcCode.OK
        except (ServiceError, grpc.aio.AioRpcError, RpcError) as error:
            refusal = _refusal(error)
            code = refusal.code
            # The status of a ScaledObject does not have the reason, so the log has it.
            self._misuse.report(
                code.name.lower(),
                peer=call.peer(),
                reason=f"{caller.name}: {refusal.message}",
                event="call of KEDA rejected",
            )
            raise refusal from error
        finally:
            self._metrics.requests[method, code.name] += 1


@final
class _CallerName:
    """The name of the ScaledObject of a call."""

    name = "an invalid request"

    def read(self, request: Message) -> None:
        """Read the name from a request."""
        if isinstance(request, keda.GetMetricsRequest):
            request = request.scaledObjectRef
        if isinstance(request, keda.ScaledObjectRef):
            self.name = f"{request.namespace}/{request.name}"[:NAME_CHARS_MAX]


def _parse(request_class: type[R], request: bytes) -> R:
    try:
        return request_class.FromString(request)
    except DecodeError:
        reason = f"the request is not a valid {request_class.DESCRIPTOR.name}"
        raise RpcError(RpcCode.INVALID_ARGUMENT, reason) from None


def _refusal(error: ServiceError | grpc.aio.AioRpcError | RpcError) -> RpcError:
    if isinstance(error, RpcError):
        return error
    if isinstance(error, grpc.aio.AioRpcError):
        # For example a broker with an older version, so a part of the demand is unknown.
        return RpcError(RpcCode.UNAVAILABLE, f"a broker rejected the query: {error.details()}")
    if isinstance(error, Overloaded):
        return RpcError(RpcCode.RESOURCE_EXHAUSTED, error.message)
    if isinstance(error, UnavailableError):
        return RpcError(RpcCode.UNAVAILABLE, error.message)
    return RpcError(_CODES[codes_of(error).http], error.message)
