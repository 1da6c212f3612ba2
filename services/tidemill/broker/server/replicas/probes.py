"""Which other replicas are heard, beside the master: a stream to each, on which they answer.

A master that no replica reaches gives way to one that reaches enough of the others (failover.md
12.6), and that is known from here alone: replicas have streams of the log with their master only.
Nothing but what controllers are told follows from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import TYPE_CHECKING, Final, final

from google.protobuf.message import DecodeError

from tidemill.stubs.tidemill.replication.v1 import replication_pb2 as pb
from tidemill.transport.grpc.status import RpcCode, RpcError
from tidemill.transport.http2.limits import Limits
from tidemill.transport.replica_wire import to_member

if TYPE_CHECKING:
    from tidemill.broker.server.replicas.ports import LocalReplica
    from tidemill.common.clock import Clock
    from tidemill.common.replica_group import ReplicaId
    from tidemill.transport.aio.call import RpcCall
    from tidemill.transport.aio.connect import Connector, OpenStream

PROBE: Final = "/tidemill.replication.v1.Replication/Probe"
PERIOD_S: Final = 0.2  # a third of the silence after which a replica does not count as reached
AGAIN_S: Final = 0.5  # until who could not be reached, or fell silent, is dialled anew
SILENCE_S: Final = 2.0
CONNECT_TIMEOUT_S: Final = 1.0
PROBE_BYTES_MAX: Final = 64 << 10
LIMITS: Final = Limits(keepalive_period_s=1.0, keepalive_timeout_s=2.0)


async def serve_probes(group: str, replica: LocalReplica, call: RpcCall) -> None:
    """Answer whoever asks whether this replica is there."""
    async for encoded in call:
        try:
            request = pb.ProbeRequest.FromString(encoded)
        except DecodeError as error:
            raise RpcError(RpcCode.INVALID_ARGUMENT, str(error)) from None
        if request.group != group:
            raise RpcError(RpcCode.FAILED_PRECONDITION, f"this is a replica of {group}")
        reply = pb.ProbeReply(member=to_member(replica.me), is_master=replica.is_master)
        call.write(reply.SerializeToString())


@final
class Probes:
    """Asks the others, until it is cancelled."""

    def __init__(
        self, group: str, replica: LocalReplica, *, connect: Connector, clock: Clock
    ) -> None:
        self._group = group
        self._replica = replica
        self._connect = connect
        self._clock = clock
        self._heard_at_ms: dict[ReplicaId, int] = {}
        self._tasks: dict[tuple[ReplicaId, str], asyncio.Task[None]] = {}

    def silence_ms(self, now_ms: int) -> dict[ReplicaId, int]:
        """Return how long nothing was heard of each replica that has ever answered."""
        return {number: now_ms - at_ms for number, at_ms in self._heard_at_ms.items()}

    async def run(self) -> None:
        """Keep a stream to each of the others, wherever the newest view says that it is."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                me, view = self._replica.me.replica_id, self._replica.view
                wanted = {one for one in (view.addresses if view else ()) if one[0] != me}
                for gone in self._tasks.keys() - wanted:
                    self._tasks.pop(gone).cancel()
                    self._heard_at_ms.pop(gone[0], None)
                for number, address in wanted - self._tasks.keys():
                    self._tasks[number, address] = tasks.create_task(
                        self._ask(number, address), name=f"probe {number}"
                    )
                await asyncio.sleep(PERIOD_S)

    async def _ask(self, number: ReplicaId, address: str) -> None:
        while True:
            with contextlib.suppress(RpcError, TimeoutError):
                async with self._connect(
                    address, LIMITS, message_bytes_max=PROBE_BYTES_MAX, timeout_s=CONNECT_TIMEOUT_S
                ) as channel:
                    await self._ask_on(
                        number, channel.open(PROBE, functools.partial(self._heard, number))
                    )
            await asyncio.sleep(AGAIN_S)

    async def _ask_on(self, number: ReplicaId, stream: OpenStream) -> None:
        """Ask until the stream ends, or nothing is heard any more."""
        me = to_member(self._replica.me)
        request = pb.ProbeRequest(group=self._group, member=me).SerializeToString()
        ended, began_ms = asyncio.create_task(stream.ended()), self._clock.monotonic_ms()
        try:
            while not ended.done():
                heard_ms = max(self._heard_at_ms.get(number, 0), began_ms)
                if self._clock.monotonic_ms() - heard_ms > SILENCE_S * 1000:
                    return
                stream.write(request)
                await asyncio.wait({ended}, timeout=PERIOD_S)
            ended.result()
        finally:
            ended.cancel()
            stream.cancel()
            await asyncio.gather(ended, return_exceptions=True)

    def _heard(self, number: ReplicaId, _encoded: bytes) -> None:
        self._heard_at_ms[number] = self._clock.monotonic_ms()
