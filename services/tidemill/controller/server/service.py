"""The RPC methods of a controller."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, TypeVar, final

from google.protobuf.message import DecodeError

from tidemill.common.addresses import host_of_peer
from tidemill.common.errors import BrokerGroupNotFound, ServiceError
from tidemill.common.replica_group import ReplicationView
from tidemill.controller.election.record import GroupRecord
from tidemill.controller.election.reports import UnreachableReport
from tidemill.controller.meta_store import StoreUnreachable
from tidemill.controller.operator_changes import (
    ChangeRequest,
    drain_of,
    min_in_sync_of,
    replacement_of,
    transfer_of,
)
from tidemill.controller.server.session import SessionCall
from tidemill.controller.server.wire import to_group
from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire
from tidemill.transport.aio.call import DisconnectError, RpcCall, RpcMethod, bidirectional
from tidemill.transport.grpc.status import RpcCode, RpcError
from tidemill.transport.replica_wire import to_view

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from google.protobuf.message import Message

    from tidemill.common.clock import Clock
    from tidemill.controller.election.sessions import ElectionTiming
    from tidemill.controller.group import BrokerGroupControl
    from tidemill.controller.groups import BrokerGroupControls
    from tidemill.controller.metrics import ControllerMetrics

M = TypeVar("M", bound="Message")

SERVICE: Final = wire.DESCRIPTOR.services_by_name["Controller"].full_name
# Streams of replicas, proxies and the home, enough for GROUPS_MAX groups of three replicas.
STREAMS_MAX: Final = 4_096
# Streams of one address, enough for a cluster on one machine.
STREAMS_PER_ADDRESS_MAX: Final = 1_024
# A process that follows routes receives a message at least this often, so that both ends detect a
# broken stream.
ROUTES_PERIOD_S: Final = 5.0


@final
class ControllerService:
    """The service's methods."""

    def __init__(
        self,
        groups: BrokerGroupControls,
        *,
        clock: Clock,
        timing: ElectionTiming,
        metrics: ControllerMetrics,
        is_leading: Callable[[], bool],
    ) -> None:
        self._groups = groups
        self._clock = clock
        self._timing = timing
        self._metrics = metrics
        self._is_leading = is_leading
        self._streams: Counter[str] = Counter()  # by address
        self._proxies: Counter[str] = Counter()  # streams of routes, by name of the proxy
        self._is_ending = asyncio.Event()

    def methods(self) -> Mapping[str, RpcMethod]:
        """Return the methods by path."""
        return {
            f"/{SERVICE}/Session": bidirectional(self._session),
            f"/{SERVICE}/WatchRoutes": _single_request(self._watch_routes),
            f"/{SERVICE}/ReportUnreachable": _unary(self._report_unreachable),
            f"/{SERVICE}/GetGroups": _unary(self._get_groups),
            f"/{SERVICE}/TransferMaster": _unary(self._transfer_master),
            f"/{SERVICE}/DrainReplica": _unary(self._drain_replica),
            f"/{SERVICE}/SetMinInSync": _unary(self._set_min_in_sync),
            f"/{SERVICE}/ForgetGroup": _unary(self._forget_group),
            f"/{SERVICE}/ForceMaster": _unary(self._force_master),
            f"/{SERVICE}/PlanChange": _unary(self._plan_change),
        }

    async def drain(self) -> None:
        """End all streams: replicas and proxies continue with the other controllers."""
        self._is_ending.set()
        async with self._groups.changed:
            self._groups.changed.notify_all()

    # ------------------------------------------------------------ streams

    async def _session(self, call: RpcCall) -> None:
        with self._count_stream(call):
            await self._serve_session(call)

    async def _serve_session(self, call: RpcCall) -> None:
        session = SessionCall(
            call,
            self._groups,
            clock=self._clock,
            timing=self._timing,
            metrics=self._metrics,
            is_leading=self._is_leading(),
        )
        serving = asyncio.ensure_future(session.serve())
        ending = asyncio.ensure_future(self._is_ending.wait())
        try:
            await asyncio.wait((serving, ending), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                _raise_error(serving)
        finally:
            ending.cancel()
            serving.cancel()
            await asyncio.wait((serving,))

    @contextlib.contextmanager
    def _count_stream(self, call: RpcCall) -> Iterator[None]:
        """Count a stream during the block. Raises RpcError at the limit."""
        host = host_of_peer(call.peer())
        if self._streams.total() >= STREAMS_MAX:
            raise RpcError(
                RpcCode.RESOURCE_EXHAUSTED, f"the limit of {STREAMS_MAX} open streams is reached"
            )
        if self._streams[host] >= STREAMS_PER_ADDRESS_MAX:
            raise RpcError(
                RpcCode.RESOURCE_EXHAUSTED,
                f"the limit of {STREAMS_PER_ADDRESS_MAX} open streams from {host} is reached",
            )
        self._streams[host] += 1
        try:
            yield
        finally:
            self._streams[host] -= 1
            if not self._streams[host]:
                del self._streams[host]

    async def _watch_routes(self, call: RpcCall, request: bytes) -> None:
        proxy = _parse(wire.WatchRoutesRequest, request).proxy
        with self._count_stream(call):
            await self._serve_routes(call, proxy)

    async def _serve_routes(self, call: RpcCall, proxy: str) -> None:
        if not proxy:
            await self._send_routes(call)
            return
        self._proxies[proxy] += 1
        try:
            await self._send_routes(call)
        finally:
            self._proxies[proxy] -= 1
            self._proxies += Counter()  # Removes names with a count of 0.

    async def _send_routes(self, call: RpcCall) -> None:
        sent: dict[str, ReplicationView] = {}
        is_first = True
        with contextlib.suppress(DisconnectError):
            while not self._is_ending.is_set():
                views = self._groups.views()
                is_complete = is_first or bool(sent.keys() - views.keys())
                changed = {
                    name: view
                    for name, view in views.items()
                    if is_complete or sent.get(name) != view
                }
                sent, is_first = views, False
                # An empty update shows that this controller is live.
                update = wire.RouteUpdate(
                    groups={name: to_view(view) for name, view in changed.items()},
                    is_complete=is_complete,
                )
                await call.send(update.SerializeToString())
                await self._wait_for_routes(sent)

    async def _wait_for_routes(self, sent: dict[str, ReplicationView]) -> None:
        """Wait until routes differ from `sent`, at most ROUTES_PERIOD_S."""
        async with self._groups.changed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ROUTES_PERIOD_S):
                    await self._groups.changed.wait_for(
                        lambda: self._is_ending.is_set() or self._groups.views() != sent
                    )

    # ------------------------------------------------------------ calls

    async def _report_unreachable(self, request: bytes) -> bytes:
        message = _parse(wire.ReportUnreachableRequest, request)
        group = await self._group(message.group)
        is_known = message.proxy in self._proxies
        self._metrics.count_request("report_unreachable", "success" if is_known else "failed")
        if not is_known:
            raise RpcError(RpcCode.FAILED_PRECONDITION, f"{message.proxy} follows no routes here")
        report = UnreachableReport(
            proxy=message.proxy,
            heard_at_ms=self._clock.monotonic_ms(),
            master=message.master,
            unreachable_ms=message.unreachable_ms,
            reachable=frozenset(message.reachable),
        )
        group.note_report(report, proxies=len(self._proxies))
        return wire.Done().SerializeToString()

    async def _get_groups(self, request: bytes) -> bytes:
        message = _parse(wire.GetGroupsRequest, request)
        self._metrics.count_request("get_replica_info", "success")
        names = [message.group] if message.group else sorted(self._groups.by_name)
        groups = [await self._group(name) for name in names]
        now_ms = self._clock.monotonic_ms()
        answer = wire.BrokerGroupStatusList(groups=[to_group(one, now_ms=now_ms) for one in groups])
        return answer.SerializeToString()

    async def _transfer_master(self, request: bytes) -> bytes:
        message = _parse(wire.TransferMasterRequest, request)
        return await self._change(message.group, transfer_of(message, self._timing))

    async def _drain_replica(self, request: bytes) -> bytes:
        message = _parse(wire.DrainReplicaRequest, request)
        return await self._change(message.group, drain_of(message), kind="drain_replica")

    async def _set_min_in_sync(self, request: bytes) -> bytes:
        message = _parse(wire.SetMinInSyncRequest, request)
        group = await self._group(message.group)
        change = min_in_sync_of(message, self._timing, has_spec=group.has_spec)
        return await self._change(message.group, change, kind="set_min_in_sync")

    async def _forget_group(self, request: bytes) -> bytes:
        message = _parse(wire.ForgetGroupRequest, request)
        group, began_ns = await self._group(message.group), time.monotonic_ns()
        with _store_errors():
            refusal = await group.remove()
        took_ns = time.monotonic_ns() - began_ns
        self._metrics.count_request("forget_group", "failed" if refusal else "success", took_ns)
        if refusal is not None:
            raise RpcError(RpcCode.FAILED_PRECONDITION, refusal.why)
        return wire.Done().SerializeToString()

    async def _force_master(self, request: bytes) -> bytes:
        message = _parse(wire.ForceMasterRequest, request)
        change = replacement_of(message, self._timing)
        return await self._change(message.group, change, corrects_record=True)

    async def _plan_change(self, request: bytes) -> bytes:
        message = _parse(wire.PlanChangeRequest, request)
        kind = message.WhichOneof("change")
        if kind is None:
            raise RpcError(RpcCode.INVALID_ARGUMENT, "the request has no known change")
        group = await self._group(getattr(message, kind).group)
        if kind == "forget":
            refusal = group.judge_removal()
            if refusal is not None:
                raise RpcError(RpcCode.FAILED_PRECONDITION, refusal.why)
            return to_group(group, now_ms=self._clock.monotonic_ms()).SerializeToString()
        change = self._planned_change(message, group)
        with _store_errors():
            planned = await group.plan(change, corrects_record=kind == "force")
        if not isinstance(planned, GroupRecord):
            raise RpcError(RpcCode.FAILED_PRECONDITION, planned.why)
        now_ms = self._clock.monotonic_ms()
        return to_group(group, now_ms=now_ms, planned=planned).SerializeToString()

    def _planned_change(
        self, message: wire.PlanChangeRequest, group: BrokerGroupControl
    ) -> ChangeRequest:
        match message.WhichOneof("change"):
            case "transfer":
                return transfer_of(message.transfer, self._timing)
            case "drain":
                return drain_of(message.drain)
            case "set_min_in_sync":
                return min_in_sync_of(
                    message.set_min_in_sync, self._timing, has_spec=group.has_spec
                )
            case _:
                return replacement_of(message.force, self._timing)

    async def _group(self, name: str) -> BrokerGroupControl:
        """Return an existing group; a misspelt name does not create one."""
        try:
            return await self._groups.get(name)
        except BrokerGroupNotFound as error:
            raise RpcError(RpcCode.NOT_FOUND, error.message) from None
        except StoreUnreachable as error:
            raise RpcError(RpcCode.UNAVAILABLE, error.describe()) from None

    async def _change(
        self,
        name: str,
        request: ChangeRequest,
        *,
        kind: str = "elect_master",
        corrects_record: bool = False,
    ) -> bytes:
        group, began_ns = await self._group(name), time.monotonic_ns()
        with _store_errors():
            refusal = await group.change(request, corrects_record=corrects_record)
        took_ns = time.monotonic_ns() - began_ns
        self._metrics.count_request(kind, "failed" if refusal else "success", took_ns)
        if refusal is not None:
            raise RpcError(RpcCode.FAILED_PRECONDITION, refusal.why)
        return to_group(group, now_ms=self._clock.monotonic_ms()).SerializeToString()


@contextlib.contextmanager
def _store_errors() -> Iterator[None]:
    """Report an unreachable store to the caller."""
    try:
        yield
    except StoreUnreachable as error:
        raise RpcError(RpcCode.UNAVAILABLE, str(error)) from None


def _raise_error(task: asyncio.Future[None]) -> None:
    """Raise the error of a session, out of the group of its tasks."""
    try:
        task.result()
    except* RpcError as group:
        raise group.exceptions[0] from None
    except* (DisconnectError, ServiceError):
        pass


def _single_request(handle: Callable[[RpcCall, bytes], Awaitable[None]]) -> RpcMethod:
    """Return a method that takes one request, and does not wait for the end of the requests.

    Our own client opens only streams in both directions. On the wire all methods look the same.
    """

    async def serve(call: RpcCall) -> None:
        request = await anext(aiter(call), None)
        if request is not None:
            await handle(call, request)

    return bidirectional(serve)


def _unary(answer: Callable[[bytes], Awaitable[bytes]]) -> RpcMethod:
    """Return a method with one request and one response."""

    async def handle(call: RpcCall, request: bytes) -> None:
        with contextlib.suppress(DisconnectError):
            await call.send(await answer(request))

    return _single_request(handle)


def _parse(kind: type[M], request: bytes) -> M:
    try:
        return kind.FromString(request)
    except DecodeError:
        raise RpcError(RpcCode.INVALID_ARGUMENT, f"the request is not a {kind.__name__}") from None
