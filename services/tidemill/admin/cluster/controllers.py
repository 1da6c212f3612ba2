"""Calls to the controllers: the first one that answers serves the call, and the next ones.

Each controller answers for all broker groups and checks changes against the record. Each call opens
a new channel, which uses the current TLS files.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Final, TypeVar, final

import grpc

from tidemill.common.errors import (
    OLDER_CONTROLLER,
    BrokerGroupNotFound,
    BrokerGroupUnreachable,
    Conflict,
)
from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire
from tidemill.stubs.tidemill.controller.v1 import controller_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tidemill.transport.aio.tls import ReloadableCredentials

CALL_TIMEOUT_S: Final = 3.0  # per controller: it calls its store three times, at most 1 s each
A = TypeVar("A")


@contextlib.asynccontextmanager
async def short_channel(
    address: str, credentials: ReloadableCredentials[grpc.ChannelCredentials] | None
) -> AsyncIterator[grpc.aio.Channel]:
    """Open a channel for one call.

    Operators call rarely, so keeping a channel open is not worth its supervision.
    """
    options = (("grpc.use_local_subchannel_pool", 1),)
    if credentials is None:
        channel = grpc.aio.insecure_channel(address, options)
    else:
        channel = grpc.aio.secure_channel(address, credentials.newest, options)
    async with channel:
        yield channel


class _NoAnswer(Exception):
    """A controller does not answer, for a reason."""


@final
class ControllerClients:
    """Clients of all controllers of the cluster."""

    def __init__(
        self,
        addresses: Sequence[str],
        credentials: ReloadableCredentials[grpc.ChannelCredentials] | None = None,
    ) -> None:
        self.addresses = list(addresses)  # the one that answered last comes first
        self._credentials = credentials

    @property
    def are_configured(self) -> bool:
        """Whether the cluster has controllers, and so broker groups with several replicas."""
        return bool(self.addresses)

    async def groups(self, name: str = "") -> list[wire.BrokerGroupStatus]:
        """Return the records of all broker groups, or of one."""
        request = wire.GetGroupsRequest(group=name)
        reply = await self._call(lambda stub: stub.GetGroups(request, timeout=CALL_TIMEOUT_S))
        return list(reply.groups)

    async def plan(self, change: wire.PlanChangeRequest) -> wire.BrokerGroupStatus:
        """Return the broker group as a change would leave it, without the change."""
        return await self._call(lambda stub: stub.PlanChange(change, timeout=CALL_TIMEOUT_S))

    async def transfer(
        self, name: str, target: int | None, *, is_dry: bool = False
    ) -> wire.BrokerGroupStatus:
        """Request a planned transfer to another replica."""
        request = wire.TransferMasterRequest(group=name, target=target)
        if is_dry:
            return await self.plan(wire.PlanChangeRequest(transfer=request))
        return await self._call(lambda stub: stub.TransferMaster(request, timeout=CALL_TIMEOUT_S))

    async def drain(
        self, name: str, target: int, *, undo: bool, is_dry: bool = False
    ) -> wire.BrokerGroupStatus:
        """Drain a replica, or undo the drain."""
        request = wire.DrainReplicaRequest(group=name, target=target, undo=undo)
        if is_dry:
            return await self.plan(wire.PlanChangeRequest(drain=request))
        return await self._call(lambda stub: stub.DrainReplica(request, timeout=CALL_TIMEOUT_S))

    async def set_min_in_sync(
        self, name: str, min_in_sync: int, *, is_dry: bool = False
    ) -> wire.BrokerGroupStatus:
        """Set the number of replicas that must store a message before its acknowledgement."""
        request = wire.SetMinInSyncRequest(group=name, min_in_sync=min_in_sync)
        if is_dry:
            return await self.plan(wire.PlanChangeRequest(set_min_in_sync=request))
        return await self._call(lambda stub: stub.SetMinInSync(request, timeout=CALL_TIMEOUT_S))

    async def forget(self, name: str) -> None:
        """Delete the record of a broker group without live replicas."""
        request = wire.ForgetGroupRequest(group=name)
        await self._call(lambda stub: stub.ForgetGroup(request, timeout=CALL_TIMEOUT_S))

    async def plan_forget(self, name: str) -> wire.BrokerGroupStatus:
        """Return the broker group whose record may be deleted. Raises Conflict if it may not."""
        request = wire.ForgetGroupRequest(group=name)
        return await self.plan(wire.PlanChangeRequest(forget=request))

    async def force(
        self, name: str, target: int, reason: str, *, is_dry: bool = False
    ) -> wire.BrokerGroupStatus:
        """Make a replica master even if it lacks acknowledged messages."""
        request = wire.ForceMasterRequest(group=name, target=target, reason=reason)
        if is_dry:
            return await self.plan(wire.PlanChangeRequest(force=request))
        return await self._call(lambda stub: stub.ForceMaster(request, timeout=CALL_TIMEOUT_S))

    async def _call(
        self, call: Callable[[controller_pb2_grpc.ControllerAsyncStub], Awaitable[A]]
    ) -> A:
        if not self.addresses:
            raise Conflict(
                "this admin process has no controllers. Without replicas, use"
                " `tidemill broker-group list`. With replicas, set controllers to the addresses of"
                " the controllers"
            )
        reasons = []
        for address in list(self.addresses):
            try:
                answer = await self._ask(address, call)
            except _NoAnswer as error:
                reasons.append(f"{address}: {error}")
            else:
                # Otherwise each call waits for a controller that hangs, for the whole time-out.
                self.addresses.remove(address)
                self.addresses.insert(0, address)
                return answer
        raise BrokerGroupUnreachable(f"no controller answers: {'; '.join(reasons)}")

    async def _ask(
        self, address: str, call: Callable[[controller_pb2_grpc.ControllerAsyncStub], Awaitable[A]]
    ) -> A:
        """Call one controller. Raises _NoAnswer, BrokerGroupNotFound and Conflict."""
        try:
            async with short_channel(address, self._credentials) as channel:
                return await call(controller_pb2_grpc.ControllerStub(channel))
        except grpc.aio.AioRpcError as error:
            details = error.details() or error.code().name
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise BrokerGroupNotFound(details) from None
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                raise Conflict(details) from None
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise Conflict(
                    f"the controller at {address} {OLDER_CONTROLLER}; nothing was changed."
                    " Upgrade the controllers first"
                ) from None
            raise _NoAnswer(details) from None

    async def find_loss(self, timeout_s: float) -> str:
        """Return why no controller answers a read in time; empty if one does.

        All are asked at once, since one that hangs would delay the next ones.
        """

        async def ask(address: str) -> str:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._ask(address, lambda stub: stub.GetGroups(wire.GetGroupsRequest()))
            except TimeoutError:
                return f"{address}: it has not answered within {timeout_s:g} s"
            except _NoAnswer as error:
                return f"{address}: {error}"
            return ""

        reasons = []
        asked = [asyncio.ensure_future(ask(address)) for address in self.addresses]
        try:
            for answer in asyncio.as_completed(asked):
                if not (reason := await answer):
                    return ""
                reasons.append(reason)
        finally:
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        return f"no controller answers: {'; '.join(sorted(reasons))}" if reasons else ""
