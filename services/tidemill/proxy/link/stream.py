"""The stream to a broker: connecting, connecting again, frames in and out."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, final

import structlog
from google.protobuf.message import DecodeError

from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2
from tidemill.transport.aio.channel import connected
from tidemill.transport.aio.connect import Connector, OpenChannel, OpenStream
from tidemill.transport.aio.unary_call import call_unary
from tidemill.transport.grpc.status import RpcCode, RpcError
from tidemill.transport.http2.limits import Limits

if TYPE_CHECKING:
    from tidemill.proxy.link.master_routes import MasterRoutes
    from tidemill.proxy.link.masters import Masters

log = structlog.get_logger()

RECONNECT_MIN_MS = 50
# Low, since a broker that was restarted is back within half a second, and one attempt is cheap.
RECONNECT_MAX_MS = 250
# Until then a missing broker is one that starts beside us.
WAITING_WARN_FIRST_S = 1.0
WAITING_WARN_EVERY_S = 10.0  # an operator who comes later should not have to wait for long
CONNECT_TIMEOUT_S = 2.0
# A ping leaves after one second of silence, at the next look of each second: what answers was heard
# less than this ago.
SILENT_S: Final = 2.5
PROBE_PERIOD_S: Final = 0.5  # between two looks at who else answers
PROBE_TIMEOUT_S: Final = 1.0
PROBE_BYTES_MAX: Final = 64 << 10
PROBE: Final = "/grpc.health.v1.Health/Check"
HOPS_MAX: Final = 3  # from a replica that knows the master to that one, and it may have moved
PROCESS_ID_BYTES = 16  # random: no two processes have the same
# Of one frame: one is closed when it passes 256 KiB, so the largest ends with a pop of 16 MiB
# (POP_BYTES_MAX in the broker) or is the whole configuration, some 100 bytes a topic.
REPLY_BYTES_MAX: Final = 64 << 20
EXCHANGE: Final = "/tidemill.broker.v1.BrokerLink/Exchange"
LIMITS: Final = Limits(
    stream_window_bytes=16 << 20,
    frame_bytes=1 << 20,
    large_messages_bytes=72 << 20,  # one reply of the largest
    # After a second of silence the broker is asked for a sign of life, which shows one that hangs;
    # only one that stays silent for this long is given up, with all that is under way to it.
    keepalive_period_s=1.0,
    keepalive_timeout_s=15.0,
)


@final
class LinkStream:
    """The one stream of a link, and the next one when it breaks."""

    def __init__(
        self,
        address: str,
        *,
        receive: Callable[[link_pb2.ReplyFrame], None],
        on_end: Callable[[str], bool],
        connect: Connector = connected,
        routes: MasterRoutes | None = None,
    ) -> None:
        """Give each frame to `receive`, and the reason to `lose` when there is no stream any more.

        `lose` tells whether the stream had come to anything.
        """
        self._address = address
        self._receive = receive
        self._on_end = on_end
        self._connect_to = connect
        self._routes = routes
        self._dialled = address  # who of the broker group at `address`
        self._hops = 0  # from one replica to another, without anybody serving
        self._moved = asyncio.Event()
        # Connections to who is master no more, and to who was asked instead.
        self._closing: set[asyncio.Task[str] | asyncio.Task[None]] = set()
        if routes is not None:
            routes.notify_of_move(address, self._moved.set)
        self._process_id = os.urandom(PROCESS_ID_BYTES)
        self._stream_number = 0
        self._channel: OpenChannel | None = None
        self._stream: OpenStream | None = None
        self.heard_at_s = time.monotonic()  # when the last stream that ended was heard
        self.reason = "no connection was tried yet"  # why there is no stream

    @property
    def dialled(self) -> str:
        """Who of the broker group was called last."""
        return self._dialled

    def silent_s(self) -> float:
        """Return for how long nothing was heard of the broker that is connected."""
        return time.monotonic() - self._channel.heard_at_s if self._channel is not None else 0.0

    def write(self, frame: link_pb2.RequestFrame) -> None:
        """Send a frame; what is written to a stream that breaks is lost with it."""
        if self._stream is not None:
            self._stream.write(frame.SerializeToString())

    async def run(self) -> None:
        """Keep the stream open until cancelled."""
        attempt = 0
        warn_at_s = time.monotonic() + WAITING_WARN_FIRST_S
        while True:
            reason = self.reason = await self._attempt()
            now_s = time.monotonic()
            if self._on_end(reason):
                attempt, warn_at_s, self._hops = 0, now_s + WAITING_WARN_FIRST_S, 0
            else:
                attempt += 1
                self._note_failure()
            if now_s >= warn_at_s:
                log.warning("waiting for the broker", address=self._address, reason=reason)
                warn_at_s = now_s + WAITING_WARN_EVERY_S
            if self._may_hop():
                continue
            ceiling_ms = min(RECONNECT_MIN_MS << min(attempt, 10), RECONNECT_MAX_MS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(random.uniform(ceiling_ms / 2, ceiling_ms) / 1000):
                    await self._moved.wait()

    def _note_failure(self) -> None:
        if self._routes is not None:
            self._routes.masters.note_failure(self._address, self._dialled)

    def _may_hop(self) -> bool:
        """Whether another replica is known to be the master, which is dialled without a pause."""
        if self._routes is None or self._hops >= HOPS_MAX:
            self._hops = 0
            return False
        self._hops += 1
        master = self._routes.masters.master_of(self._address)
        return master not in {"", self._dialled}

    async def _attempt(self) -> str:
        """Keep a stream to the master, as long as it is that; return why it has ended."""
        self._moved.clear()
        if self._routes is None:
            return await self._connect()
        masters = self._routes.masters
        self._dialled = masters.dial(self._address)
        connecting = asyncio.create_task(self._connect(), name=f"stream to {self._dialled}")
        moved = asyncio.create_task(self._moved.wait(), name="moved")
        looking = asyncio.create_task(self._probe_replicas(masters), name="who answers instead")
        try:
            await asyncio.wait((connecting, moved, looking), return_when=asyncio.FIRST_COMPLETED)
            if connecting.done():
                return connecting.result()
            if looking.done():
                looking.result()
        finally:
            moved.cancel()
            self._end_later(connecting)
            self._end_later(looking)
        await asyncio.sleep(0)  # The stream's own end comes first.
        return "another replica is the master"

    def _end_later(self, task: asyncio.Task[str] | asyncio.Task[None]) -> None:
        """End what has connections. Last words are not waited for: who hears them may be still."""
        if not task.done():
            task.cancel()
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _probe_replicas(self, masters: Masters) -> None:
        """While the master is connected and says nothing, ask the other replicas for an answer.

        Its stream stays, as it does for a machine that pauses; but controllers are to hear of it.
        """
        silent: OpenChannel | None = None
        while True:
            await asyncio.sleep(PROBE_PERIOD_S)
            channel = self._channel
            if channel is None:
                continue
            if self.silent_s() > SILENT_S:
                silent = channel
                masters.note_silence(self._address, self._dialled)
                async with asyncio.TaskGroup() as probes:
                    for other in masters.unprobed(self._address):
                        probes.create_task(self._probe(other, masters), name=f"probe {other}")
            elif channel is silent:
                silent = None
                masters.note_recovery(self._address, self._dialled)

    async def _probe(self, other: str, masters: Masters) -> None:
        with contextlib.suppress(RpcError, TimeoutError):
            async with (
                self._connect_to(
                    other, LIMITS, message_bytes_max=PROBE_BYTES_MAX, timeout_s=PROBE_TIMEOUT_S
                ) as channel,
                asyncio.timeout(PROBE_TIMEOUT_S),
            ):
                await call_unary(channel, PROBE, b"")
                masters.note_answer(self._address, other)

    async def _connect(self) -> str:
        """Open a stream and return why it has ended, or could not be opened."""
        try:
            async with self._connect_to(
                self._dialled,
                LIMITS,
                message_bytes_max=REPLY_BYTES_MAX,
                timeout_s=CONNECT_TIMEOUT_S,
            ) as channel:
                await self._exchange(channel)
        except RpcError as error:
            return str(error)
        return "the broker ended the stream"

    async def _exchange(self, channel: OpenChannel) -> None:
        stream = self._stream = channel.open(EXCHANGE, self._on_message)
        self._channel = channel
        self._stream_number += 1
        # Before all else: of what an older stream has still on its way nothing may come after it.
        self.write(
            link_pb2.RequestFrame(process_id=self._process_id, stream_number=self._stream_number)
        )
        try:
            await stream.wait_ended()
        finally:
            if self._stream is stream:
                self._stream = self._channel = None
            self.heard_at_s = channel.heard_at_s
            stream.cancel()

    def _on_message(self, encoded: bytes) -> None:
        try:
            frame = link_pb2.ReplyFrame.FromString(encoded)
        except DecodeError:
            if self._stream is not None:
                self._stream.fail(RpcError(RpcCode.INTERNAL, "the broker sent what is no frame"))
            return
        if frame.HasField("not_master"):
            self._note_rejection(frame.not_master)
            return
        if self._routes is not None and frame.HasField("config"):
            masters = self._routes.masters
            if not masters.accept_master(self._address, self._dialled, epoch=frame.epoch):
                if self._stream is not None:
                    reason = f"{self._dialled} was the master of its broker group"
                    self._stream.fail(RpcError(RpcCode.UNAVAILABLE, reason))
                return
        self._receive(frame)

    def _note_rejection(self, said: link_pb2.NotMaster) -> None:
        """Hear that this replica is not the master; the next attempt is with who is."""
        if self._routes is not None:
            self._routes.masters.note_rejection(
                self._address,
                self._dialled,
                version=said.version,
                master=said.address,
                epoch=said.epoch,
            )
        if self._stream is not None:
            reason = f"{self._dialled} is not the master of its broker group"
            self._stream.fail(RpcError(RpcCode.UNAVAILABLE, reason))
