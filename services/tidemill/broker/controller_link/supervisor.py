"""The first process of a replica: starts its broker, and speaks with the controllers for it.

    starts     `tidemill broker` again, with the same arguments and one end of a socket pair
    died       the broker's end is seen at once (pidfd) and told to every controller (D1); then it
               is started again, after a pause that doubles while it does not come to serve
    fenced     another run of this replica has registered: the broker is stopped, and this ends
    SIGTERM    the broker hands over if it is master, drains and ends; then this ends

It holds no lock, opens no file and forks nothing else, so that nothing makes it wait.
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
    from tidemill.broker.settings import BrokerSettings
    from tidemill.transport.aio.connect import Connector
    from tidemill.transport.aio.tls import Certificates

RESTART_FIRST_S: Final = 0.1
RESTART_LONGEST_S: Final = 10.0
SETTLED_S: Final = 30.0  # a broker that ran for so long is started again without a pause
# For the certificate to leave; a controller that does not read it hears no heartbeats either.
LAST_WORDS_S: Final = 0.2
HAND_OVER_S: Final = 3.0  # of a stop: a transfer takes two at most, and then the broker drains
UNSENT_BYTES_MAX: Final = 1 << 20  # of what the broker has not read; news then replaces news

log = structlog.get_logger()


def main(
    settings: BrokerSettings,
    arguments: Sequence[str],
    connect: Connector,
    certificates: Certificates,
) -> int:
    """Run the replica until SIGTERM; return the exit status."""
    # Process 1 of a container ignores its children, and this one waits for its own.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    statuses: list[int] = []

    async def supervise() -> None:
        async with certificates.watching():
            statuses.append(await Supervisor(settings, arguments, connect).run())

    failed = run(supervise)
    return failed or statuses[0]


@final
class Supervisor:
    """Runs the broker of one replica, again and again."""

    def __init__(
        self, settings: BrokerSettings, arguments: Sequence[str], connect: Connector
    ) -> None:
        self._settings = settings
        self._arguments = arguments
        self._sessions = ControllerSessions(settings.name)
        self._streams = ControllerStreams(
            self._sessions,
            settings.controllers,
            connect=connect,
            clock=SystemClock(),
            tell_broker=self._tell_broker,
            end_broker=self._fence,
        )
        self._child: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._frames = FrameReader()
        self._unsent = bytearray()
        self._is_fenced = asyncio.Event()
        self._is_no_master = asyncio.Event()  # as far as the broker has said
        self._is_no_master.set()
        self._epoch = 0

    async def run(self) -> int:
        """Supervise until a signal, or until another run of the replica is registered."""
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
            self._streams.do(lambda _, how=status: self._sessions.broker_ended(_told(how)))  # type: ignore[misc]  # mypy knows no lambdas with defaults.
            if stop.is_set() or self._is_fenced.is_set():
                await asyncio.sleep(LAST_WORDS_S)
                return 1 if self._is_fenced.is_set() else max(status, 0)
            if time.monotonic() - began_s >= SETTLED_S:
                pause_s = RESTART_FIRST_S
            log.error("the broker has ended and is started again", how=_told(status))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await stop.wait()
            if stop.is_set():
                return 0
            pause_s = min(2 * pause_s, RESTART_LONGEST_S)

    async def _run_broker(self, stop: asyncio.Event) -> int:
        """Run one broker to its end; return its status, negative for a signal."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        passed = [theirs.fileno()]
        if self._settings.supervisor_fd is not None:
            passed.append(self._settings.supervisor_fd)  # It announces itself where we would.
        with theirs:
            self._child = subprocess.Popen(  # noqa: ASYNC220  # Nothing waits: it is a fork.
                [
                    sys.executable,
                    "-m",
                    "tidemill",
                    "broker",
                    *self._arguments,
                    f"--controllers-fd={theirs.fileno()}",
                ],
                pass_fds=passed,
            )
        loop = asyncio.get_running_loop()
        self._socket, self._frames, self._unsent = ours, FrameReader(), bytearray()
        loop.add_reader(ours, self._read)
        ended = asyncio.create_task(_ended(self._child), name="broker")
        stopping = asyncio.create_task(self._stop_in_order(stop), name="stop")
        try:
            return await ended
        finally:
            self._is_no_master.set()
            stopping.cancel()
            loop.remove_reader(ours)
            self._socket, self._child = None, None
            ours.close()
            _reap_others()

    async def _stop_in_order(self, stop: asyncio.Event) -> None:
        """When this is to stop, let the broker hand over, and then end."""
        await stop.wait()
        if self._sessions.has_controller and not self._is_no_master.is_set():
            # Its own choice of whom: the one that lags least.
            asked = wire.HandOver(epoch=self._epoch, target=LEAST_LAG_TARGET)
            self._tell_broker(wire.SessionDown(hand_over=asked))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HAND_OVER_S):
                    await self._is_no_master.wait()
        if self._child is not None:
            self._child.terminate()

    # ------------------------------------------------------------ the broker

    def _read(self) -> None:
        assert self._socket is not None, "it is read as long as it is open"
        try:
            data = self._socket.recv(1 << 16)
            for message in self._frames.receive(data):
                up = wire.SessionUp.FromString(message)
                if up.WhichOneof("message") == "heartbeat":
                    self._note(up.heartbeat)
                self._streams.do(lambda now_ms, up=up: self._sessions.broker_said(up, now_ms))  # type: ignore[misc]  # As above.
        except BlockingIOError:
            return
        except (OSError, InvalidSupervisorFrame, DecodeError):
            data = b""
        if not data:
            # What it has to say ends before the process does: its end is waited for elsewhere.
            asyncio.get_running_loop().remove_reader(self._socket)

    def _note(self, beat: wire.Heartbeat) -> None:
        self._epoch = beat.epoch_seen
        if beat.is_master:
            self._is_no_master.clear()
        else:
            self._is_no_master.set()

    def _tell_broker(self, down: wire.SessionDown) -> None:
        if self._socket is None or len(self._unsent) > UNSENT_BYTES_MAX:
            return
        self._unsent += encode(down.SerializeToString())
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass  # With the next answer to a heartbeat.
        except OSError:
            self._unsent.clear()  # It ends, which is seen elsewhere.

    def _fence(self, why: str) -> None:
        if not self._is_fenced.is_set():
            log.error("another run of this replica has registered: this one ends", reason=why)
            self._is_fenced.set()
            self._kill()

    def _kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    def _reload(self) -> None:
        if self._child is not None:
            self._child.send_signal(signal.SIGHUP)


async def _ended(child: subprocess.Popen[bytes]) -> int:
    """Wait for the end of a process, which is told at once."""
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
    """Reap what the broker has left behind, where this is the first process of a container."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def _told(status: int) -> str:
    if status < 0:
        return f"it was ended by signal {-status}"
    return f"it ended with status {status}"
