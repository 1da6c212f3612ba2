"""fdatasync in a helper process that shares the broker's open files.

A thread that waits for the disk must take the interpreter's lock back from a busy event loop, which
costs milliseconds a time; a call in the loop itself would stop everything while the disk stalls. A
process of its own does neither (ADR 0002 has the measurement).

    broker                                        helper
      sync(files): one packet, the descriptors  ──▶ fdatasync each, close each
      attached (SCM_RIGHTS)
      future resolved                           ◀── one packet: 0, or the errno

The helper knows nothing between two packets, so no descriptor can be stale and no deleted file is
kept alive. It is forked while the process is small and has no threads, ends at the end of file on
its socket, and leaves signals to the broker.

A failed sync is final: what the kernel could not write it may have dropped. The error, and just as
much the death of the helper, ends the broker, which recovers from its log at the next start.
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

_REQUEST = b"s"  # the descriptors beside it say everything
_REPLY = struct.Struct("=i")  # errno, or 0
_BROKERS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FILES_PER_PACKET_MAX = 128  # the kernel takes 253 descriptors in one packet


class SyncFailed(Exception):
    """The disk refused a sync, or the helper is gone: nothing may be promised any more."""


class HasFileno(Protocol):
    """An open file."""

    def fileno(self) -> int:
        """Return its descriptor."""
        ...


@final
class SyncProcess:
    """One helper, seen from the broker. Made by `fork`, used after `attached`."""

    def __init__(self, name: str, connection: socket.socket, pid: int) -> None:
        self.name = name
        self.pid = pid
        self._connection = connection
        self._reply: asyncio.Future[None] | None = None
        self._failure: SyncFailed | None = None
        self._failed = asyncio.Event()
        self._abandoned = (
            0  # syncs under way whose callers have gone: nobody waits for their replies
        )

    @classmethod
    def fork(cls, name: str) -> SyncProcess:
        """Start a helper, before any thread, event loop or gRPC exists: a fork copies locks."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A signal to the whole process group must not meet a helper that does not ignore it yet.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _BROKERS_SIGNALS)
        pid = os.fork()
        if pid == 0:
            _run_helper(theirs)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
        return cls(name, ours, pid)

    @contextlib.asynccontextmanager
    async def attached(self) -> AsyncIterator[SyncProcess]:
        """Answer through the running loop; ends the helper at the end of the block."""
        loop = asyncio.get_running_loop()
        self._connection.setblocking(False)
        loop.add_reader(self._connection.fileno(), self._on_reply)
        try:
            yield self
        finally:
            loop.remove_reader(self._connection.fileno())
            self._connection.close()
            # The helper ends by itself, at once unless the disk stalls: the broker does not wait,
            # and init collects what this does not.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, os.WNOHANG)  # noqa: ASYNC222  # It does not block.

    async def sync(self, files: Iterable[HasFileno]) -> None:
        """Return when all that was written to `files` is durable; raise SyncFailed otherwise."""
        descriptors = [file.fileno() for file in files]
        for begin in range(0, len(descriptors), FILES_PER_PACKET_MAX):
            await self._sync_packet(descriptors[begin : begin + FILES_PER_PACKET_MAX])

    async def watch(self) -> None:
        """Wait for the helper's failure and raise it, also while nobody syncs."""
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
    """Be the helper; never returns."""
    try:
        for number in _BROKERS_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        # Other descriptors would outlive the broker here: its end of this very socket, the ends of
        # other helpers, the supervisor's pipe.
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
                    # fdatasync may leave out new and changed names in a folder.
                    os.fsync(descriptor)
                else:
                    os.fdatasync(descriptor)
            except OSError as failure:
                error = failure.errno or -1
            os.close(descriptor)
        connection.send(_REPLY.pack(error))
