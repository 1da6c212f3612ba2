"""The streams between the replicas of a broker group.

    a replica calls this master     ─▶ serve()    ─▶ hello, ack, closed
    this replica follows a master   ─▶ dial()     ─▶ connected, message, closed
    the machine sends               ─▶ write(), write_to_all()

A stream has a number while it is open. Later messages of a closed stream are dropped.
"""

from __future__ import annotations

import asyncio
import functools
from itertools import count
from typing import TYPE_CHECKING, Final, Protocol, final

import structlog
from google.protobuf.message import DecodeError

from tidemill.broker.engine.replication.messages import Hello
from tidemill.broker.server.replicas.frames import (
    InvalidReplicaFrame,
    decode_to_master,
    decode_to_replica,
)
from tidemill.transport.grpc.status import RpcCode, RpcError
from tidemill.transport.http2.limits import Limits

if TYPE_CHECKING:
    from tidemill.broker.server.replicas.ports import StreamReceiver
    from tidemill.common.replica_group import ReplicaRun
    from tidemill.transport.aio.call import RpcCall
    from tidemill.transport.aio.connect import Connector, OpenStream

log = structlog.get_logger()

STREAM: Final = "/tidemill.replication.v1.Replication/Stream"
CONNECT_TIMEOUT_S: Final = 1.0  # as long as a stream may be silent
# A frame has at least one record. The largest record is a message with the largest body and fields.
FRAME_BYTES_MAX: Final = 64 << 20
LIMITS: Final = Limits(
    stream_window_bytes=16 << 20,
    frame_bytes=1 << 20,
    large_messages_bytes=72 << 20,
    held_bytes_max=256 << 20,
    keepalive_period_s=1.0,
    keepalive_timeout_s=2.0,
)


class _Stream(Protocol):
    """Either side of a stream."""

    def write(self, message: bytes) -> None:
        """Send without waiting."""

    def end(self) -> None:
        """End the stream; report nothing more of it."""


@final
class ReplicaStreams:
    """The streams of one replica."""

    def __init__(self, receiver: StreamReceiver, connect: Connector) -> None:
        self._receiver = receiver
        self._connect = connect
        self._numbers = count(1)
        self._streams: dict[int, _Stream] = {}
        self._dialling: asyncio.Task[None] | None = None
        self._followed: OpenStream | None = None  # the last stream to a master
        self._part_heard_at_s = 0.0  # the time of the last input that `take_part` has reported
        self._tasks: set[asyncio.Task[None]] = set()

    def write(self, number: int, message: bytes) -> None:
        """Send on a stream; do nothing if it has ended."""
        if (stream := self._streams.get(number)) is not None:
            stream.write(message)

    def write_to_all(self, message: bytes) -> None:
        """Send on every stream."""
        for stream in self._streams.values():
            stream.write(message)

    def close(self, number: int, why: str) -> None:
        """End a stream; report nothing more of it."""
        log.info("replication stream closed", stream=number, reason=why)
        if (stream := self._streams.pop(number, None)) is not None:
            stream.end()

    def close_all(self) -> None:
        """End every stream and every attempt to dial."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.end()
        for task in self._tasks:
            task.cancel()

    # ------------------------------------------------------------ as a master

    async def serve(self, call: RpcCall) -> None:
        """Serve a following replica."""
        number, served = next(self._numbers), _MasterSide(call)
        self._streams[number] = served
        reading = asyncio.create_task(self._read(number, call), name="replica's acks")
        try:
            await asyncio.wait({reading, served.ended}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
        finally:
            reading.cancel()
            self._ended(number)

    async def _read(self, number: int, call: RpcCall) -> None:
        async for request in call:
            try:
                message = decode_to_master(request)
            except (DecodeError, InvalidReplicaFrame) as error:
                raise RpcError(RpcCode.INVALID_ARGUMENT, str(error)) from None
            if isinstance(message, Hello):
                log.info("replica connected", replica=message.member.replica_id, stream=number)
                self._receiver.handle_hello(number, message)
            else:
                self._receiver.handle_ack(number, message)

    # ------------------------------------------------------------ as a replica

    def dial(self, master: ReplicaRun, address: str) -> None:
        """Follow this master, and no other."""
        if self._dialling is not None:
            self._dialling.cancel()
        task = asyncio.create_task(self._follow(address), name=f"follow {master.replica_id}")
        self._dialling = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def take_part(self) -> bool:
        """Return whether more of an incomplete message of the master has come since the last call.

        A slow link needs seconds for one record with a large body.
        """
        heard_at_s = 0.0 if self._followed is None else self._followed.part_heard_at_s
        has_come = heard_at_s > self._part_heard_at_s
        self._part_heard_at_s = max(heard_at_s, self._part_heard_at_s)
        return has_come

    async def _follow(self, address: str) -> None:
        """Dial the master, and report its messages until the stream ends."""
        number, is_dialled = next(self._numbers), False
        try:
            async with self._connect(
                address, LIMITS, message_bytes_max=FRAME_BYTES_MAX, timeout_s=CONNECT_TIMEOUT_S
            ) as channel:
                stream = channel.open(STREAM, functools.partial(self._receive, number))
                self._streams[number] = _ReplicaSide(stream)
                self._followed = stream
                is_dialled = True
                self._receiver.handle_connected(number)
                await stream.wait_ended()
        except RpcError as error:
            log.debug("stream to the master failed", address=address, reason=str(error))
        if is_dialled:
            self._ended(number)
        else:
            self._receiver.handle_closed(None)

    def _receive(self, number: int, encoded: bytes) -> None:
        stream = self._streams.get(number)
        if stream is None:
            return
        try:
            message = decode_to_replica(encoded)
        except (DecodeError, InvalidReplicaFrame):
            log.warning("invalid message from the master", stream=number)
            stream.end()
            return
        self._receiver.handle_message(number, message)

    def _ended(self, number: int) -> None:
        if self._streams.pop(number, None) is not None:
            self._receiver.handle_closed(number)


@final
class _MasterSide:
    """The master's side."""

    def __init__(self, call: RpcCall) -> None:
        self._call = call
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def write(self, message: bytes) -> None:
        """Send; the machine's window limits the bytes in flight."""
        if not self._call.call.is_ended:
            self._call.write(message)

    def end(self) -> None:
        """End the stream after the messages that were sent."""
        if not self.ended.done():
            self.ended.set_result(None)


@final
class _ReplicaSide:
    """The replica's side."""

    def __init__(self, stream: OpenStream) -> None:
        self._stream = stream

    def write(self, message: bytes) -> None:
        """Send."""
        self._stream.write(message)

    def end(self) -> None:
        """End the stream."""
        self._stream.cancel()
