"""Probes of the other replicas: each one answers on a stream of its own.

A master that no replica reaches is replaced by a replica that reaches enough others. Only probes
show which replicas reach each other, because replication streams connect a replica with its master
alone. Only the reports to the controllers use the result.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import TYPE_CHECKING, Final, final

from google.protobuf.message import DecodeError

from tidemill.broker.server.replicas.frames import wrong_group
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
PERIOD_S: Final = 0.2  # a replica counts as unreachable after three times this silence
AGAIN_S: Final = 0.5  # pause before a new connection to a silent or unreachable replica
SILENCE_S: Final = 2.0  # the connection to a replica that is silent for longer is closed
CONNECT_TIMEOUT_S: Final = 1.0
PROBE_BYTES_MAX: Final = 64 << 10
LIMITS: Final = Limits(keepalive_period_s=1.0, keepalive_timeout_s=2.0)


async def serve_probes(group: str, replica: LocalReplica, call: RpcCall) -> None:
    """Answer the probes of one caller."""
    async for encoded in call:
        try:
            request = pb.ProbeRequest.FromString(encoded)
        except DecodeError as error:
            raise RpcError(RpcCode.INVALID_ARGUMENT, str(error)) from None
        if request.group != group:
            raise wrong_group(group, request.group)
        reply = pb.ProbeReply(member=to_member(replica.me), is_master=replica.is_master)
        call.write(reply.SerializeToString())


@final
class Probes:
    """The probes to all other replicas."""

    def __init__(
        self, group: str, replica: LocalReplica, *, connect: Connector, clock: Clock
    ) -> None:
        self._group = group
        self._replica = replica
        self._connect = connect
        self._clock = clock
        self._answered_at_ms: dict[ReplicaId, int] = {}
        self._tasks: dict[tuple[ReplicaId, str], asyncio.Task[None]] = {}

    def silence_ms(self, now_ms: int) -> dict[ReplicaId, int]:
        """Return the time since the last answer of each replica that has ever answered."""
        return {number: now_ms - at_ms for number, at_ms in self._answered_at_ms.items()}

    async def run(self) -> None:
        """Keep a stream to each other replica, at its address in the newest view."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                me, view = self._replica.me.replica_id, self._replica.view
                others = {one for one in (view.addresses if view else ()) if one[0] != me}
                for former in self._tasks.keys() - others:
                    self._tasks.pop(former).cancel()
                    self._answered_at_ms.pop(former[0], None)
                for number, address in others - self._tasks.keys():
                    self._tasks[number, address] = tasks.create_task(
                        self._probe(number, address), name=f"probe {number}"
                    )
                await asyncio.sleep(PERIOD_S)

    async def _probe(self, number: ReplicaId, address: str) -> None:
        while True:
            with contextlib.suppress(RpcError, TimeoutError):
                async with self._connect(
                    address, LIMITS, message_bytes_max=PROBE_BYTES_MAX, timeout_s=CONNECT_TIMEOUT_S
                ) as channel:
                    await self._probe_on(
                        number, channel.open(PROBE, functools.partial(self._note_answer, number))
                    )
            await asyncio.sleep(AGAIN_S)

    async def _probe_on(self, number: ReplicaId, stream: OpenStream) -> None:
        """Probe until the stream ends or the replica falls silent."""
        me = to_member(self._replica.me)
        request = pb.ProbeRequest(group=self._group, member=me).SerializeToString()
        ended, began_ms = asyncio.create_task(stream.wait_ended()), self._clock.monotonic_ms()
        try:
            while not ended.done():
                answered_ms = max(self._answered_at_ms.get(number, 0), began_ms)
                if self._clock.monotonic_ms() - answered_ms > SILENCE_S * 1000:
                    return
                stream.write(request)
                await asyncio.wait({ended}, timeout=PERIOD_S)
            ended.result()
        finally:
            ended.cancel()
            stream.cancel()
            await asyncio.gather(ended, return_exceptions=True)

    def _note_answer(self, number: ReplicaId, _encoded: bytes) -> None:
        self._answered_at_ms[number] = self._clock.monotonic_ms()
