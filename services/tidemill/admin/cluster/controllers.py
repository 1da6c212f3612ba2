"""The controllers, as the admin process asks them: whichever answers first of those it knows.

Any of them answers for all groups; what is to be changed is checked against the record, whoever is
asked. Files of TLS that were renewed are read again with each new channel.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Final, TypeVar, final

import grpc

from tidemill.common.errors import BrokerGroupNotFound, BrokerGroupUnreachable, Conflict
from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire
from tidemill.stubs.tidemill.controller.v1 import controller_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tidemill.transport.aio.tls import ReloadableCredentials

CALL_TIMEOUT_S: Final = 3.0  # of one controller: its store has one second, and is asked three times
A = TypeVar("A")


@final
class ControllerClients:
    """All controllers of the cluster."""

    def __init__(
        self,
        addresses: Sequence[str],
        credentials: ReloadableCredentials[grpc.ChannelCredentials] | None = None,
    ) -> None:
        self._addresses = addresses
        self._credentials = credentials

    @property
    def are_there(self) -> bool:
        """Whether the cluster has any, and so several replicas of a group."""
        return bool(self._addresses)

    async def groups(self, name: str = "") -> list[wire.Group]:
        """Return what is known of the replicas of all broker groups, or of one."""
        request = wire.GetGroupsRequest(group=name)
        found = await self._ask(lambda stub: stub.GetGroups(request, timeout=CALL_TIMEOUT_S))
        return list(found.groups)

    async def transfer(self, name: str, target: int | None) -> wire.Group:
        """Have another replica made master, by a planned transfer."""
        request = wire.TransferMasterRequest(group=name, target=target)
        return await self._ask(lambda stub: stub.TransferMaster(request, timeout=CALL_TIMEOUT_S))

    async def drain(self, name: str, target: int, *, undo: bool) -> wire.Group:
        """Have a replica emptied of its duties, or let it count again."""
        request = wire.DrainReplicaRequest(group=name, target=target, undo=undo)
        return await self._ask(lambda stub: stub.DrainReplica(request, timeout=CALL_TIMEOUT_S))

    async def set_min_in_sync(self, name: str, min_in_sync: int) -> wire.Group:
        """Say how many replicas must have a message before it is acknowledged."""
        request = wire.SetMinInSyncRequest(group=name, min_in_sync=min_in_sync)
        return await self._ask(lambda stub: stub.SetMinInSync(request, timeout=CALL_TIMEOUT_S))

    async def forget(self, name: str) -> None:
        """Have the record of a broker group taken away whose replicas are gone."""
        request = wire.ForgetGroupRequest(group=name)
        await self._ask(lambda stub: stub.ForgetGroup(request, timeout=CALL_TIMEOUT_S))

    async def force(self, name: str, target: int, reason: str) -> wire.Group:
        """Have a replica made master that may lack what was acknowledged."""
        request = wire.ForceMasterRequest(group=name, target=target, reason=reason)
        return await self._ask(lambda stub: stub.ForceMaster(request, timeout=CALL_TIMEOUT_S))

    async def _ask(
        self, call: Callable[[controller_pb2_grpc.ControllerAsyncStub], Awaitable[A]]
    ) -> A:
        if not self._addresses:
            raise BrokerGroupUnreachable(
                "this cluster has no controllers: each broker group is one broker (set controllers"
                " of the admin process where it has)"
            )
        reasons = []
        for address in self._addresses:
            try:
                async with self._channel(address) as channel:
                    return await call(controller_pb2_grpc.ControllerStub(channel))
            except grpc.aio.AioRpcError as error:
                told = error.details() or error.code().name
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    raise BrokerGroupNotFound(told) from None
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    raise Conflict(told) from None
                reasons.append(f"{address}: {told}")
        raise BrokerGroupUnreachable(f"no controller answers: {'; '.join(reasons)}")

    @contextlib.asynccontextmanager
    async def _channel(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        # Calls of an operator are few, and a channel that is kept would have to be watched.
        options = (("grpc.use_local_subchannel_pool", 1),)
        if self._credentials is None:
            channel = grpc.aio.insecure_channel(address, options)
        else:
            channel = grpc.aio.secure_channel(address, self._credentials.newest, options)
        async with channel:
            yield channel
