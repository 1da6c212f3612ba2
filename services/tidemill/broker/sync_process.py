"""fdatasync in a helper process that shares the broker's open files.

A thread that waits for the disk must take the interpreter's lock back from a busy event loop, which
costs milliseconds each time. A call in the loop itself would block everything while the disk
stalls. A separate process avoids both (ADR 0002 has the measurement).

    broker                                        helper
      sync(files): one packet, the descriptors  ──▶ fdatasync each, close each
      attached (SCM_RIGHTS)
      future resolved                           ◀── one packet: 0, or the errno

The helper has no state between two packets, so no descriptor can be stale and no deleted file stays
open. It is forked while the process is small and has no threads. It ends at the end of file on its
socket, and ignores signals, which the broker handles.

A failed sync is final: the kernel may have dropped the pages that it could not write. Such an error
or the end of the helper ends the broker, which recovers from its log at the next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import stat
import struct
from collections.abc import AsyncIterator, Iterable
from typing import Protocol, final

_REQUEST = b"s"  # the descriptors beside it are the request
_REPLY = struct.Struct("=i")  # errno, or 0
_BROKERS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FILES_PER_PACKET_MAX = 128  # the kernel takes 253 descriptors in one packet


class SyncFailed(Exception):
    """A sync failed or the helper ended: no later promise of durability would be true."""


class HasFileno(Protocol):
    """An open file."""

    def fileno(self) -> int:
        """Return the file descriptor."""
        ...


@final
class SyncProcess:
    """The broker's side of one helper: created by `fork`, used within `attached`."""

    def __init__(self, name: str, connection: socket.socket, pid: int) -> None:
        self.name = name
        self.pid = pid
        self._connection = connection
        self._reply: asyncio.Future[None] | None = None
        self._failure: SyncFailed | None = None
        self._failed = asyncio.Event()
        self._abandoned = 0  # running syncs whose callers were cancelled

    @classmethod
    def fork(cls, name: str) -> SyncProcess:
        """Start a helper, before threads, event loop and gRPC exist: a fork copies their locks."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A signal to the process group must not reach the helper before it ignores signals.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _BROKERS_SIGNALS)
        pid = os.fork()
        if pid == 0:
            _run_helper(theirs)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
        return cls(name, ours, pid)

    @contextlib.asynccontextmanager
    async def attached(self) -> AsyncIterator[SyncProcess]:
        """Receive replies in the running loop; end the helper at the end of the block."""
        loop = asyncio.get_running_loop()
        self._connection.setblocking(False)
        loop.add_reader(self._connection.fileno(), self._on_reply)
        try:
            yield self
        finally:
            loop.remove_reader(self._connection.fileno())
            self._connection.close()
            # The helper ends by itself, at once unless the disk stalls. The broker does not wait;
            # init reaps a helper that is still running.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, os.WNOHANG)  # noqa: ASYNC222  # It does not block.

    async def sync(self, files: Iterable[HasFileno]) -> None:
        """Return when everything written to `files` is durable. Raises SyncFailed."""
        descriptors = [file.fileno() for file in files]
        for begin in range(0, len(descriptors), FILES_PER_PACKET_MAX):
            await self._sync_packet(descriptors[begin : begin + FILES_PER_PACKET_MAX])

    async def watch(self) -> None:
        """Wait for a failure of the helper and raise it, even while no sync runs."""
        await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    async def _sync_packet(self, descriptors: list[int]) -> None:
        assert self._reply is None, "a helper syncs for one caller, one call at a time"
        if self._failure is not None:
            raise self._failure
        self._reply = asyncio.get_running_loop().create_future()
        try:
            socket.send_fds(self._connection, [_REQUEST], descriptors)
            await self._reply
        except asyncio.CancelledError:
            self._abandoned += self._reply.cancelled()
            raise
        except OSError as error:
            self._fail(f"the sync process cannot be reached: {error}")
            raise SyncFailed(str(self._failure)) from error
        finally:
            self._reply = None

    def _on_reply(self) -> None:
        try:
            packet = self._connection.recv(_REPLY.size)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if len(packet) < _REPLY.size:
            self._fail("the sync process has ended")
            return
        (error,) = _REPLY.unpack(packet)
        if self._abandoned:
            self._abandoned -= 1
            if not error:
                return
        if error:
            self._fail(f"fdatasync failed: {os.strerror(error)}")
        elif self._reply is not None and not self._reply.done():
            self._reply.set_result(None)

    def _fail(self, reason: str) -> None:
        asyncio.get_running_loop().remove_reader(self._connection.fileno())
        self._failure = SyncFailed(f"{self.name}: {reason}")
        self._failed.set()
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(self._failure)


def _run_helper(connection: socket.socket) -> None:
    """Run as the helper; never return."""
    try:
        for number in _BROKERS_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        # Close inherited descriptors, which would outlive the broker here: the broker's end of this
        # socket, the ends of other helpers, the supervisor's pipe.
        own = connection.fileno()
        os.closerange(3, own)
        os.closerange(own + 1, os.sysconf("SC_OPEN_MAX"))
        _serve_syncs(connection)
    finally:
        os._exit(0)  # Without the handlers and buffers inherited from the broker.


def _serve_syncs(connection: socket.socket) -> None:
    while True:
        packet, descriptors, _, _ = socket.recv_fds(connection, 1, FILES_PER_PACKET_MAX)
        if not packet:
            return
        error = 0
        for descriptor in descriptors:
            try:
                if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                    # fdatasync may omit new and changed names in a folder.
                    os.fsync(descriptor)
                else:
                    os.fdatasync(descriptor)
            except OSError as failure:
                error = failure.errno or -1
            os.close(descriptor)
        connection.send(_REPLY.pack(error))
