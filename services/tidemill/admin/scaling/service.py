"""KEDA's contract with external scalers, as calls of our transport.

An error has a status by who must act: INVALID_ARGUMENT, NOT_FOUND and FAILED_PRECONDITION are the
trigger's to mend; UNAVAILABLE passes, and KEDA keeps the replicas meanwhile or takes its fallback.
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
# KEDA tells the metrics of several triggers apart by a prefix of its own.
METRIC_NAME: Final = "tidemill-messages"
STREAMS_MAX: Final = (
    512  # twice as many as questions: KEDA opens a new one before the old has ended
)
# Between two looks of a stream: as often as there are new answers. What is pushed is so much faster
# than KEDA's own asking, each 30 s unless told.
LOOK_PERIOD_S: Final = 2.0
NAME_CHARS_MAX: Final = 128  # of a ScaledObject, in a line of the log
_CODES: Final = {
    HTTPStatus.BAD_REQUEST: RpcCode.INVALID_ARGUMENT,
    HTTPStatus.NOT_FOUND: RpcCode.NOT_FOUND,
    HTTPStatus.CONFLICT: RpcCode.FAILED_PRECONDITION,
}


@final
class ExternalScaler:
    """The service's methods."""

    def __init__(
        self,
        demands: DemandQueries,
        metrics: ScalerMetrics,
        *,
        look_period_s: float = LOOK_PERIOD_S,
    ) -> None:
        self._look_period_s = look_period_s
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
        """End all streams well: KEDA comes back to one that ended so after two seconds."""
        self._is_ending.set()

    # ------------------------------------------------------------ methods

    async def _is_active(self, request: keda.ScaledObjectRef) -> keda.IsActiveResponse:
        trigger = read_trigger(request.scalerMetadata)
        return keda.IsActiveResponse(result=is_active(await self._look(trigger), trigger))

    async def _metric_spec(self, request: keda.ScaledObjectRef) -> keda.GetMetricSpecResponse:
        target = read_trigger(request.scalerMetadata).messages_per_replica
        spec = keda.MetricSpec(metricName=METRIC_NAME, targetSize=target, targetSizeFloat=target)
        return keda.GetMetricSpecResponse(metricSpecs=[spec])

    async def _metrics_of(self, request: keda.GetMetricsRequest) -> keda.GetMetricsResponse:
        if request.metricName not in ("", METRIC_NAME):
            raise RpcError(RpcCode.INVALID_ARGUMENT, f"the one metric here is {METRIC_NAME}")
        trigger = read_trigger(request.scaledObjectRef.scalerMetadata)
        count = value_of(await self._look(trigger), trigger)
        value = keda.MetricValue(metricName=METRIC_NAME, metricValue=count, metricValueFloat=count)
        return keda.GetMetricsResponse(metricValues=[value])

    async def _stream_is_active(self, call: RpcCall, request: bytes) -> None:
        with self._counted("StreamIsActive", call) as asker:
            parsed = _parse(keda.ScaledObjectRef, request)
            asker.heard(parsed)
            trigger = read_trigger(parsed.scalerMetadata)
            if self._metrics.stream_count >= STREAMS_MAX:
                raise Overloaded(f"{STREAMS_MAX} streams are open already")
            self._metrics.stream_count += 1
            try:
                with contextlib.suppress(DisconnectError):
                    await self._push(call, trigger)
            finally:
                self._metrics.stream_count -= 1

    async def _push(self, call: RpcCall, trigger: Trigger) -> None:
        """Tell whether consumers are needed, now and whenever that changes, until the drain."""
        told: bool | None = None
        while not self._is_ending.is_set():
            # While a broker group is away nothing is known, so nothing is told: what was stays.
            with contextlib.suppress(UnavailableError, grpc.aio.AioRpcError):
                wanted = is_active(await self._look(trigger), trigger)
                if wanted != told:
                    await call.send(keda.IsActiveResponse(result=wanted).SerializeToString())
                    log.info(
                        "consumers are wanted" if wanted else "consumers are not needed",
                        group=trigger.question.group,
                        topic=trigger.question.topic,
                    )
                    told = wanted
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_ending.wait(), self._look_period_s)

    # ------------------------------------------------------------ around them

    async def _look(self, trigger: Trigger) -> Demand:
        demand = await self._demands.of(trigger.question)
        self._metrics.told(trigger.question, demand)
        return demand

    def _unary(
        self, name: str, request_class: type[R], answer: Callable[[R], Awaitable[Message]]
    ) -> RpcMethod:
        async def handle(call: RpcCall, request: bytes) -> bytes:
            with self._counted(name, call) as asker:
                parsed = _parse(request_class, request)
                asker.heard(parsed)
                return (await answer(parsed)).SerializeToString()

        return unary(handle)

    @contextlib.contextmanager
    def _counted(self, method: str, call: RpcCall) -> Iterator[_CallerName]:
        """Count a call by how it ends; raise RpcError for what it is refused with, and tell why."""
        code, asker = RpcCode.CANCELLED, _CallerName()
        try:
            yield asker
            code = RpcCode.OK
        except (ServiceError, grpc.aio.AioRpcError, RpcError) as error:
            refusal = _refusal(error)
            code = refusal.code
            # KEDA says no more of it in a ScaledObject than that something is wrong.
            self._misuse.report(
                code.name.lower(),
                peer=call.peer(),
                reason=f"{asker.name}: {refusal.message}",
                event="KEDA was refused",
            )
            raise refusal from error
        finally:
            self._metrics.requests[method, code.name] += 1


@final
class _CallerName:
    """For which ScaledObject a call is, once that is known."""

    name = "a request that is none"

    def heard(self, request: Message) -> None:
        """Learn it from the request."""
        if isinstance(request, keda.GetMetricsRequest):
            request = request.scaledObjectRef
        if isinstance(request, keda.ScaledObjectRef):
            self.name = f"{request.namespace}/{request.name}"[:NAME_CHARS_MAX]


def _parse(request_class: type[R], request: bytes) -> R:
    try:
        return request_class.FromString(request)
    except DecodeError:
        reason = f"the request is no {request_class.DESCRIPTOR.name}"
        raise RpcError(RpcCode.INVALID_ARGUMENT, reason) from None


def _refusal(error: ServiceError | grpc.aio.AioRpcError | RpcError) -> RpcError:
    if isinstance(error, RpcError):
        return error
    if isinstance(error, grpc.aio.AioRpcError):
        # As of a broker of an older version: a part is not known.
        return RpcError(RpcCode.UNAVAILABLE, f"a broker has refused: {error.details()}")
    if isinstance(error, Overloaded):
        return RpcError(RpcCode.RESOURCE_EXHAUSTED, error.message)
    if isinstance(error, UnavailableError):
        return RpcError(RpcCode.UNAVAILABLE, error.message)
    return RpcError(_CODES[codes_of(error).http], error.message)
