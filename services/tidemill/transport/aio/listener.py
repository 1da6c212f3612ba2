"""The listening socket: accepting connections, limits per address, and TLS.

If TLS is optional, one port serves clients with and without TLS. The first byte of a connection
tells them apart. It is only peeked, so the transport reads all bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import Final, Literal, final

import structlog

from tidemill.common.addresses import HostPort, unmapped, without_brackets
from tidemill.common.lifecycle import bound_sockets
from tidemill.transport.aio.misuse_log import MisuseLog
from tidemill.transport.aio.proxy_protocol import BadProxyHeader, read_source
from tidemill.transport.aio.tls import TlsFiles, server_context
from tidemill.transport.http2.limits import Limit

log = structlog.get_logger()

TlsMode = Literal["off", "optional", "required"]

BACKLOG: Final = 1_024  # connections in the kernel before they are accepted
ACCEPTS_PER_TURN: Final = 64  # so that many new connections do not block others
# Open files that are not for clients: metrics, health, the broker's link, logs, segments.
FILES_RESERVED: Final = 128
_TLS_HANDSHAKE: Final = b"\x16"  # the first byte of a TLS handshake
_NO_FILES_PAUSE_S: Final = 0.1
BANNED: Final = "banned_address"  # in logs and metrics
# Errors of accept for a connection that has already ended.
_GONE: Final = frozenset({errno.ECONNABORTED, errno.EPROTO})


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenSettings:
    """The address of a server, and the clients that it accepts."""

    host: str
    port: int
    reuse_port: bool = False
    # File descriptors of listening sockets, instead of the settings above.
    listening: tuple[int, ...] = ()
    tls: TlsMode = "off"
    tls_certificate_file: str = ""
    tls_key_file: str = ""
    tls_client_ca_file: str = ""  # clients must present a certificate that one of these signed
    # The TLS context; None: made from the files above.
    tls_context: ssl.SSLContext | None = None
    # Load balancers that send the client's address by PROXY protocol.
    proxy_protocol_from: tuple[IPv4Network | IPv6Network, ...] = ()
    # A connection costs about 10 KiB, and the memory of its calls.
    connections_max: int = 10_000
    connections_per_address_max: int = 1_000  # shared by clients behind one address translation
    handshake_timeout_s: float = 10.0
    # Names of the settings for host and port, for error texts.
    setting_names: tuple[str, str] = ("grpc_host", "grpc_port")


class ConnectionProtocol(asyncio.Protocol):
    """The protocol of a connection; it calls `RpcListener.release` after it was open."""

    is_open = False


@final
class _NewConnection:
    """An accepted connection before its handshake is complete."""

    def __init__(self, accepted: socket.socket, host: str, port: int) -> None:
        self.socket = accepted
        self.host, self.port = host, port  # of the client, after its balancer has sent them
        self.is_balancer = False
        self.is_counted = False  # counted for its address
        self.protocol: ConnectionProtocol | None = None


@final
class RpcListener:
    """Accepts connections; creates a protocol with the client's address for each.

    The protocol calls `release` with this address when its connection has ended.
    """

    def __init__(
        self,
        settings: ListenSettings,
        make_protocol: Callable[[str, int], ConnectionProtocol],
        misuse: MisuseLog,
        is_banned: Callable[[str], bool] = lambda _host: False,
    ) -> None:
        """Refuse connections from addresses that `is_banned` names."""
        self.address = ""
        self._is_banned = is_banned
        self._settings = settings
        self._make_protocol = make_protocol
        self._misuse = misuse
        self._connections_max = settings.connections_max
        self._tls: ssl.SSLContext | None = None
        self._open: Counter[str] = Counter()  # open connections by client address
        self._open_count = 0
        self._tasks: asyncio.TaskGroup | None = None
        self._listening: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._connecting: set[asyncio.Task[None]] = set()  # with an incomplete handshake

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[RpcListener]:
        """Accept connections until the block ends or `close`; raise StartError."""
        self._tls = self._settings.tls_context or tls_context(self._settings)
        self._connections_max = _affordable_count(self._settings.connections_max)
        sockets = self._listening = _inherited_sockets(self._settings) or _listen(self._settings)
        host = without_brackets(self._settings.host)
        self.address = str(HostPort(host, sockets[0].getsockname()[1]))
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._accepting = [
                tasks.create_task(self._accept(one), name="accept") for one in sockets
            ]
            try:
                yield self
            finally:
                self.close()

    def descriptors(self) -> list[int]:
        """Return the file descriptors of the listening sockets."""
        return [one.fileno() for one in self._listening]

    def stop_accepting(self) -> None:
        """Accept the connections that the kernel has accepted, and no more from now on.

        New clients reach another process that shares the port, or they are refused at once. The
        connections in the kernel must be accepted, because closing the socket resets them.
        """
        for task in self._accepting:
            task.cancel()
        for one in self._listening:
            self._accept_pending(one)
            asyncio.get_running_loop().remove_reader(one)
            one.close()
        self._listening = []

    async def wait_connected(self) -> None:
        """Wait until the current handshakes are complete."""
        if self._connecting:
            await asyncio.wait(self._connecting)

    def close(self) -> None:
        """Stop accepting, and cancel the current handshakes."""
        self.stop_accepting()
        for task in self._connecting:
            task.cancel()

    def release(self, peer_host: str) -> None:
        """Release the place of a connection that has ended."""
        self._open_count -= 1
        self._uncount(peer_host)

    async def _accept(self, listening: socket.socket) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        is_logged = False  # that accepting fails
        loop.add_reader(listening, readable.set)
        while True:
            await readable.wait()
            for _ in range(ACCEPTS_PER_TURN):
                try:
                    accepted, peer = listening.accept()
                except (BlockingIOError, InterruptedError):
                    readable.clear()
                    break
                except OSError as error:
                    if error.errno in _GONE:
                        continue
                    # No file descriptors are left. The socket stays readable and would keep the
                    # event loop busy.
                    if not is_logged:
                        log.warning(
                            "cannot accept connections",
                            reason=str(error),
                            connections=self._open_count,
                            advice="raise the limit of open files (ulimit -n)",
                        )
                    is_logged = True
                    loop.remove_reader(listening)
                    await asyncio.sleep(_NO_FILES_PAUSE_S)
                    loop.add_reader(listening, readable.set)
                    break
                is_logged = False
                self._admit(accepted, unmapped(peer[0]), peer[1])
            await asyncio.sleep(0)

    def _accept_pending(self, listening: socket.socket) -> None:
        """Accept the connections in the kernel, at most as many as its backlog."""
        for _ in range(BACKLOG):
            try:
                accepted, peer = listening.accept()
            except OSError as error:
                if error.errno in _GONE:
                    continue
                return
            self._admit(accepted, unmapped(peer[0]), peer[1])

    def _admit(self, accepted: socket.socket, peer_host: str, peer_port: int) -> None:
        settings = self._settings
        connection = _NewConnection(accepted, peer_host, peer_port)
        connection.is_balancer = _is_within(peer_host, settings.proxy_protocol_from)
        if not connection.is_balancer and self._refuses(peer_host):
            accepted.close()
            return
        is_full = self._open_count >= self._connections_max
        if is_full:
            self._reject(connection, Limit.CONNECTIONS)
        # The address of a balancer is not that of the client, which the balancer will send.
        if is_full or not (connection.is_balancer or self._count(connection)):
            accepted.close()
            return
        accepted.setblocking(False)
        self._open_count += 1
        assert self._tasks is not None, "an accepting listener has a task group"
        task = self._tasks.create_task(self._connect(connection), name="connect")
        self._connecting.add(task)

        def connected(_task: asyncio.Task[None]) -> None:
            self._connecting.discard(task)
            # In all cases, even if the task never ran: a connection that is not open is not
            # counted.
            if connection.protocol is None or not connection.protocol.is_open:
                accepted.close()
                self._open_count -= 1
                if connection.is_counted:
                    self._uncount(connection.host)

        task.add_done_callback(connected)

    def _refuses(self, peer_host: str) -> bool:
        """Whether the address of a client is banned."""
        if not self._is_banned(peer_host):
            return False
        self._misuse.report_failure(BANNED, peer=peer_host, reason="the address is banned")
        return True

    def _count(self, connection: _NewConnection) -> bool:
        """Count a connection of an address; reject it and return False if there are too many."""
        if self._open[connection.host] >= self._settings.connections_per_address_max:
            self._reject(connection, Limit.CONNECTIONS_PER_ADDRESS)
            return False
        self._open[connection.host] += 1
        connection.is_counted = True
        return True

    def _uncount(self, peer_host: str) -> None:
        self._open[peer_host] -= 1
        if not self._open[peer_host]:
            del self._open[peer_host]

    def _reject(self, connection: _NewConnection, limit: Limit) -> None:
        count = self._open[connection.host]
        reason = f"{self._open_count} connections, {count} of this address"
        self._misuse.report_refusal(limit, peer=connection.host, reason=reason)

    async def _connect(self, connection: _NewConnection) -> None:
        """Read the client's address, detect TLS, and connect the protocol."""
        loop = asyncio.get_running_loop()
        settings, tls, accepted = self._settings, self._tls, connection.socket
        try:
            async with asyncio.timeout(settings.handshake_timeout_s):
                if connection.is_balancer:
                    source = await read_source(accepted)
                    if source is not None:
                        connection.host, connection.port = source
                    if self._refuses(connection.host) or not self._count(connection):
                        return
                protocol = connection.protocol = self._make_protocol(
                    connection.host, connection.port
                )
                if settings.tls == "optional" and not await _begins_tls(accepted):
                    tls = None
                await loop.connect_accepted_socket(lambda: protocol, accepted, ssl=tls)
        except TimeoutError:
            reason = f"no handshake within {settings.handshake_timeout_s:g} s"
            self._misuse.report_refusal(Limit.HANDSHAKE, peer=connection.host, reason=reason)
        except ssl.SSLError as error:
            self._misuse.report_failure("tls_handshake", peer=connection.host, reason=str(error))
        except BadProxyHeader as error:
            self._misuse.report_failure("proxy_protocol", peer=connection.host, reason=str(error))
        except OSError as error:
            log.debug("no handshake", peer=connection.host, reason=str(error))
        except Exception:
            # An error of one connection must not end the server.
            log.exception("connection failed in its handshake", peer=connection.host)


def _is_within(host: str, networks: tuple[IPv4Network | IPv6Network, ...]) -> bool:
    if not networks:
        return False
    # The zone of a link-local address does not belong to the network.
    address = ip_address(host.partition("%")[0])
    return any(address in network for network in networks)


async def _begins_tls(accepted: socket.socket) -> bool:
    """Wait for the first byte; return whether it starts a TLS handshake. The byte stays unread."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(accepted, _set, readable)
    try:
        await readable
    finally:
        loop.remove_reader(accepted)
    return accepted.recv(1, socket.MSG_PEEK) == _TLS_HANDSHAKE


def _set(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)


def _affordable_count(connections_max: int) -> int:
    """Return how many connections the file limit allows, at most `connections_max`."""
    files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    affordable = max(files_max - FILES_RESERVED, 1)
    if affordable < connections_max:
        log.warning(
            "fewer connections than configured",
            connections_max=affordable,
            configured=connections_max,
            open_files_max=files_max,
            advice="raise the limit of open files (ulimit -n), or lower connections_max",
        )
    return min(affordable, connections_max)


def _inherited_sockets(settings: ListenSettings) -> list[socket.socket]:
    sockets = [socket.socket(fileno=descriptor) for descriptor in settings.listening]
    for one in sockets:
        one.setblocking(False)
        one.set_inheritable(False)
    return sockets


def _listen(settings: ListenSettings) -> list[socket.socket]:
    """Listen on every address of the host; raise StartError."""
    sockets = bound_sockets(
        settings.host,
        settings.port,
        settings=settings.setting_names,
        reuse_port=settings.reuse_port,
    )
    for one in sockets:
        one.setblocking(False)
        one.listen(BACKLOG)
    return sockets


def tls_context(settings: ListenSettings) -> ssl.SSLContext | None:
    """Return the TLS context of a server; None if TLS is off. Raises StartError."""
    if settings.tls == "off":
        return None
    return server_context(
        TlsFiles(
            certificate=settings.tls_certificate_file,
            key=settings.tls_key_file,
            authorities=settings.tls_client_ca_file,
        )
    )
