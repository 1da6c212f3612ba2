"""The stream to a broker: the connection, its retries, frames in and out."""

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

from tidemill.common.feature_level import FEATURE_LEVEL
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2
from tidemill.transport.aio.channel import connected
from tidemill.transport.aio.connect import Connector, OpenChannel, OpenStream
from tidemill.transport.aio.unary_call import call_unary
from tidemill.transport.grpc.status import RpcCode, RpcError
from tidemill.transport.http2.limits import Limits

if TYPE_CHECKING:
    from tidemill.transport.routes.master_routes import MasterRoutes
    from tidemill.transport.routes.masters import Masters

log = structlog.get_logger()

RECONNECT_MIN_MS = 50
# Low, since a restarted broker is back within half a second, and an attempt is cheap.
RECONNECT_MAX_MS = 250
WAITING_WARN_START_S = 5.0  # a standalone starts its broker at the same time
WAITING_WARN_FIRST_S = 1.0  # after the loss of a broker
WAITING_WARN_EVERY_S = 10.0  # short, so that an operator sees a recent line
CONNECT_TIMEOUT_S = 2.0
# A broker that answers is never silent for this long: the channel checks once per second, and sends
# a ping after one second of silence.
SILENT_S: Final = 2.5
PROBE_PERIOD_S: Final = 0.5  # between two checks for a silent master
PROBE_TIMEOUT_S: Final = 1.0
PROBE_BYTES_MAX: Final = 64 << 10
PROBE: Final = "/grpc.health.v1.Health/Check"
HOPS_MAX: Final = 3  # from one replica to the next without a pause; the master may move meanwhile
PROCESS_ID_BYTES = 16  # random, so that each process has its own
# Of one frame. The broker closes a frame beyond 256 KiB, so the largest one ends with a pop of
# 16 MiB (POP_BYTES_MAX in the broker), or holds the whole configuration, about 100 bytes per topic.
REPLY_BYTES_MAX: Final = 64 << 20
EXCHANGE: Final = "/tidemill.broker.v1.BrokerLink/Exchange"
LIMITS: Final = Limits(
    stream_window_bytes=16 << 20,
    frame_bytes=1 << 20,
    large_messages_bytes=72 << 20,  # one reply of the largest
    # The ping after one second of silence detects a broker that hangs. The proxy gives up the
    # stream and its requests only after the timeout.
    keepalive_period_s=1.0,
    keepalive_timeout_s=15.0,
)


@final
class LinkStream:
    """The one stream of a link, opened again whenever it breaks."""

    def __init__(
        self,
        address: str,
        *,
        receive: Callable[[link_pb2.ReplyFrame], None],
        on_end: Callable[[str], bool],
        connect: Connector = connected,
        routes: MasterRoutes | None = None,
    ) -> None:
        """Call `receive` with each frame, and `on_end` with the reason when a stream has ended.

        `on_end` returns whether the configuration had arrived on the stream.
        """
        self._address = address
        self._receive = receive
        self._on_end = on_end
        self._connect_to = connect
        self._routes = routes
        self._dialled = address  # a replica of the broker group at `address`
        self._hops = 0  # from one replica to the next since a replica has served
        self._elected = asyncio.Event()
        # Tasks that close connections to former masters and to probed replicas.
        self._closing: set[asyncio.Task[str] | asyncio.Task[None]] = set()
        if routes is not None:
            routes.notify_of_election(address, self._elected.set)
        self._process_id = os.urandom(PROCESS_ID_BYTES)
        self._stream_number = 0
        self._channel: OpenChannel | None = None
        self._stream: OpenStream | None = None
        self.heard_at_s = time.monotonic()  # when the broker was last heard on the last stream
        self.reason = "the proxy has not connected yet"  # why there is no stream

    @property
    def dialled(self) -> str:
        """The address dialled last."""
        return self._dialled

    def silent_s(self) -> float:
        """Return the time since the connected broker was last heard; 0 without a connection."""
        return time.monotonic() - self._channel.heard_at_s if self._channel is not None else 0.0

    def write(self, frame: link_pb2.RequestFrame) -> None:
        """Send a frame. If the stream breaks, the frame may be lost."""
        if self._stream is not None:
            self._stream.write(frame.SerializeToString())

    async def run(self) -> None:
        """Keep the stream open until cancelled."""
        attempt = 0
        warn_at_s = time.monotonic() + WAITING_WARN_START_S
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
            if self._routes is not None and self._routes.masters.is_late(self._address):
                attempt = 0  # The master learns of its election within milliseconds.
            ceiling_ms = min(RECONNECT_MIN_MS << min(attempt, 10), RECONNECT_MAX_MS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(random.uniform(ceiling_ms / 2, ceiling_ms) / 1000):
                    await self._elected.wait()
                    attempt = 0

    def _note_failure(self) -> None:
        if self._routes is not None:
            self._routes.masters.note_failure(self._address, self._dialled)

    def _may_hop(self) -> bool:
        """Whether another replica is known as the master, so that it is dialled without a pause."""
        if self._routes is None or self._hops >= HOPS_MAX:
            self._hops = 0
            return False
        self._hops += 1
        master = self._routes.masters.master_of(self._address)
        return master not in {"", self._dialled}

    async def _attempt(self) -> str:
        """Keep a stream to the master until it ends or the master moves; return the reason."""
        self._elected.clear()
        if self._routes is None:
            return await self._connect()
        masters = self._routes.masters
        self._dialled = masters.dial(self._address)
        connecting = asyncio.create_task(self._connect(), name=f"stream to {self._dialled}")
        elected = asyncio.create_task(self._elected.wait(), name="elected")
        probing = asyncio.create_task(self._probe_replicas(masters), name="probe replicas")
        try:
            while True:
                await asyncio.wait(
                    (connecting, elected, probing), return_when=asyncio.FIRST_COMPLETED
                )
                if connecting.done():
                    return connecting.result()
                if probing.done():
                    probing.result()
                if masters.master_of(self._address) != self._dialled:
                    break
                # The replica that is dialled already was elected, and may be slow to answer.
                self._elected.clear()
                elected = asyncio.create_task(self._elected.wait(), name="elected")
        finally:
            elected.cancel()
            self._end_later(connecting)
            self._end_later(probing)
        await asyncio.sleep(0)  # The end of the stream comes first.
        return "another replica is the master"

    def _end_later(self, task: asyncio.Task[str] | asyncio.Task[None]) -> None:
        """Cancel a task with connections. Do not wait for their end: the peer may be silent."""
        if not task.done():
            task.cancel()
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _probe_replicas(self, masters: Masters) -> None:
        """Probe the other replicas while the connected master is silent.

        The stream stays open, since the machine of the master may only pause. The answers go to the
        controllers.
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
                    for replica in masters.unprobed(self._address):
                        probes.create_task(self._probe(replica, masters), name=f"probe {replica}")
            elif channel is silent:
                silent = None
                masters.note_recovery(self._address, self._dialled)

    async def _probe(self, replica: str, masters: Masters) -> None:
        with contextlib.suppress(RpcError, TimeoutError):
            async with (
                self._connect_to(
                    replica, LIMITS, message_bytes_max=PROBE_BYTES_MAX, timeout_s=PROBE_TIMEOUT_S
                ) as channel,
                asyncio.timeout(PROBE_TIMEOUT_S),
            ):
                await call_unary(channel, PROBE, b"")
                masters.note_answer(self._address, replica)

    async def _connect(self) -> str:
        """Open a stream; return why it ended or could not be opened."""
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
        # First: the broker then drops frames of older streams that arrive later.
        self.write(
            link_pb2.RequestFrame(
                process_id=self._process_id,
                stream_number=self._stream_number,
                feature_level=FEATURE_LEVEL,
            )
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
                self._stream.fail(RpcError(RpcCode.INTERNAL, "the broker sent an invalid frame"))
            return
        if frame.HasField("not_master"):
            self._note_rejection(frame.not_master)
            return
        if self._routes is not None and frame.HasField("config"):
            masters = self._routes.masters
            if not masters.accept_master(self._address, self._dialled, epoch=frame.epoch):
                if self._stream is not None:
                    reason = f"{self._dialled} is a former master of its broker group"
                    self._stream.fail(RpcError(RpcCode.UNAVAILABLE, reason))
                return
        self._receive(frame)

    def _note_rejection(self, rejection: link_pb2.NotMaster) -> None:
        """Note that the dialled replica is not the master, and end the stream."""
        if self._routes is not None:
            self._routes.masters.note_rejection(
                self._address,
                self._dialled,
                version=rejection.version,
                master=rejection.address,
                epoch=rejection.epoch,
            )
        if self._stream is not None:
            reason = f"{self._dialled} is not the master of its broker group"
            self._stream.fail(RpcError(RpcCode.UNAVAILABLE, reason))
