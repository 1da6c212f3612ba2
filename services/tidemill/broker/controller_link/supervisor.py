"""The first process of a replica: it starts the broker, and connects it to the controllers.

    start      take the broker that was forked first, and one end of a socket pair; a later broker
               is `tidemill broker` with the same arguments and the other end
    death      detect the end of the broker at once (pidfd), report it to every controller (D1), and
               restart the broker after a pause, which doubles while the broker keeps failing
    fencing    if another run of this replica has registered, kill the broker and end
    SIGTERM    let a master hand over, let the broker drain, and end

The supervisor holds no lock, opens no file and starts no other process, so nothing delays it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, final

import structlog
from google.protobuf.message import DecodeError

from tidemill.broker.controller_link.frames import (
    LEAST_LAG_TARGET,
    FrameReader,
    InvalidSupervisorFrame,
    encode,
)
from tidemill.broker.controller_link.sessions import ControllerSessions
from tidemill.broker.controller_link.streams import ControllerStreams
from tidemill.common.clock import SystemClock
from tidemill.common.lifecycle import run, stop_on_signal
from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire

if TYPE_CHECKING:
    from tidemill.broker.controller_link.forked_broker import ForkedBroker
    from tidemill.broker.settings import BrokerSettings
    from tidemill.common.forked_process import ForkedProcess
    from tidemill.transport.aio.connect import Connector
    from tidemill.transport.aio.tls import Certificates

RESTART_FIRST_S: Final = 0.1
RESTART_LONGEST_S: Final = 10.0
STABLE_S: Final = 30.0  # a broker that ran for this time restarts with the first pause
# Time to send the death certificate. A controller that does not read it gets no heartbeats either.
LAST_WORDS_S: Final = 0.2
HAND_OVER_S: Final = 3.0  # limit of a transfer at a stop, which takes two seconds at most
UNSENT_BYTES_MAX: Final = 1 << 20  # bytes that the broker has not read; beyond it, drop messages

log = structlog.get_logger()


def main(
    settings: BrokerSettings,
    arguments: Sequence[str],
    first: ForkedBroker,
    connect: Connector,
    certificates: Certificates,
) -> int:
    """Run the replica until SIGTERM; return the exit status."""
    statuses: list[int] = []

    async def supervise() -> None:
        async with certificates.watching():
            statuses.append(await Supervisor(settings, arguments, first, connect).run())

    failed = run(supervise)
    return failed or statuses[0]


@final
class Supervisor:
    """The supervisor of the broker of one replica."""

    def __init__(
        self,
        settings: BrokerSettings,
        arguments: Sequence[str],
        first: ForkedBroker,
        connect: Connector,
    ) -> None:
        self._settings = settings
        self._arguments = arguments
        self._first: ForkedBroker | None = first
        self._sessions = ControllerSessions(settings.name)
        self._streams = ControllerStreams(
            self._sessions,
            settings.controllers,
            connect=connect,
            clock=SystemClock(),
            send_to_broker=self._send_to_broker,
            stop_broker=self._fence,
        )
        self._child: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._socket: socket.socket | None = None
        self._frames = FrameReader()
        self._unsent = bytearray()
        self._is_fenced = asyncio.Event()
        self._is_follower = asyncio.Event()  # by the last heartbeat of the broker
        self._is_follower.set()
        self._epoch = 0

    async def run(self) -> int:
        """Supervise until a signal, or until another run of the replica registers."""
        with stop_on_signal(
            supervisor_fd=self._settings.supervisor_fd,
            before_exit=self._kill,
            on_hangup=self._reload,
        ) as stop:
            streams = asyncio.create_task(self._streams.run(), name="controllers")
            try:
                return await self._run_brokers(stop)
            finally:
                streams.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await streams

    async def _run_brokers(self, stop: asyncio.Event) -> int:
        pause_s = RESTART_FIRST_S
        while True:
            began_s = time.monotonic()
            status = await self._run_broker(stop)
            self._streams.do(lambda _, how=status: self._sessions.note_broker_end(_end_text(how)))  # type: ignore[misc]  # mypy cannot type lambdas with defaults.
            if stop.is_set() or self._is_fenced.is_set():
                await asyncio.sleep(LAST_WORDS_S)
                return 1 if self._is_fenced.is_set() else max(status, 0)
            if time.monotonic() - began_s >= STABLE_S:
                pause_s = RESTART_FIRST_S
            log.error("broker ended; restarting it", how=_end_text(status), pause_s=pause_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await stop.wait()
            if stop.is_set():
                return 0
            pause_s = min(2 * pause_s, RESTART_LONGEST_S)

    async def _run_broker(self, stop: asyncio.Event) -> int:
        """Run one broker to its end; return its status, negative for a signal."""
        if self._first is None:
            self._child, ours = self._start_broker()
        else:
            (self._child, ours), self._first = self._first, None
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        self._socket, self._frames, self._unsent = ours, FrameReader(), bytearray()
        loop.add_reader(ours, self._read)
        ended = asyncio.create_task(_ended(self._child), name="broker")
        stopping = asyncio.create_task(self._stop_in_order(stop), name="stop")
        try:
            return await ended
        finally:
            self._is_follower.set()
            stopping.cancel()
            loop.remove_reader(ours)
            self._socket, self._child = None, None
            ours.close()
            _reap_others()

    def _start_broker(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Start a broker; return it and our end of the socket pair."""
        ours, theirs = socket.socketpair()
        passed = [theirs.fileno()]
        if self._settings.supervisor_fd is not None:
            passed.append(self._settings.supervisor_fd)  # The broker announces that it is ready.
        command = [sys.executable, "-m", "tidemill", "broker", *self._arguments]
        with theirs:
            child = subprocess.Popen(
                [*command, f"--controllers-fd={theirs.fileno()}"], pass_fds=passed
            )
        return child, ours

    async def _stop_in_order(self, stop: asyncio.Event) -> None:
        """Wait for the stop, let a master hand over, and stop the broker."""
        await stop.wait()
        if self._sessions.has_successor and not self._is_follower.is_set():
            request = wire.HandOver(epoch=self._epoch, target=LEAST_LAG_TARGET)
            self._send_to_broker(wire.SessionDown(hand_over=request))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HAND_OVER_S):
                    await self._is_follower.wait()
        if self._child is not None:
            self._child.terminate()

    # ------------------------------------------------------------ the broker

    def _read(self) -> None:
        assert self._socket is not None, "the reader is removed before the socket is closed"
        try:
            data = self._socket.recv(1 << 16)
            for message in self._frames.receive(data):
                up = wire.SessionUp.FromString(message)
                if up.WhichOneof("message") == "heartbeat":
                    self._note_role(up.heartbeat)
                self._streams.do(
                    lambda now_ms, up=up: self._sessions.receive_from_broker(up, now_ms)  # type: ignore[misc]  # As above.
                )
        except BlockingIOError:
            return
        except (OSError, InvalidSupervisorFrame, DecodeError):
            data = b""
        if not data:
            # The socket ends before the process. `_run_broker` waits for the process.
            asyncio.get_running_loop().remove_reader(self._socket)

    def _note_role(self, beat: wire.Heartbeat) -> None:
        self._epoch = beat.epoch_seen
        if beat.is_master:
            self._is_follower.clear()
        else:
            self._is_follower.set()

    def _send_to_broker(self, down: wire.SessionDown) -> None:
        if self._socket is None or len(self._unsent) > UNSENT_BYTES_MAX:
            return
        self._unsent += encode(down.SerializeToString())
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass  # The next answer to a heartbeat sends the rest.
        except OSError:
            self._unsent.clear()  # The broker ends; `_run_broker` notices.

    def _fence(self, why: str) -> None:
        if not self._is_fenced.is_set():
            log.error("replica fenced", reason=why)
            self._is_fenced.set()
            self._kill()

    def _kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    def _reload(self) -> None:
        if self._child is not None:
            self._child.send_signal(signal.SIGHUP)


async def _ended(child: subprocess.Popen[bytes] | ForkedProcess) -> int:
    """Wait for the end of a process, without delay, and return its status."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    descriptor = os.pidfd_open(child.pid)

    def see() -> None:
        loop.remove_reader(descriptor)
        if not over.done():
            over.set_result(None)

    loop.add_reader(descriptor, see)
    try:
        await over
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return child.wait()


def _reap_others() -> None:
    """Reap orphans of the broker, if this is process 1 of a container."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def _end_text(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"status {status}"
