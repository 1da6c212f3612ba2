"""The listening socket: who is let in, and whether they speak TLS.

With TLS configured as optional, both kinds of clients are served on one port: the first byte of a
connection tells them apart, and is only looked at, so that the transport reads all of them.
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

from tidemill.common.lifecycle import cannot_listen
from tidemill.transport.aio.notices import MisuseLog
from tidemill.transport.aio.proxy_protocol import BadProxyHeader, read_source
from tidemill.transport.aio.tls import TlsFiles, server_context
from tidemill.transport.http2.limits import Limit

log = structlog.get_logger()

TlsMode = Literal["off", "optional", "required"]

BACKLOG: Final = 1_024  # connections the kernel keeps until they are accepted
ACCEPTS_PER_TURN: Final = 64  # so that a crowd of newcomers does not keep others waiting
# Open files that clients do not get: metrics and health, the broker's link, logs, segments.
FILES_RESERVED: Final = 128
_TLS_HANDSHAKE: Final = b"\x16"  # first byte of a TLS record that begins a handshake
_NO_FILES_PAUSE_S: Final = 0.1
# What accept tells of one connection that has gone already.
_GONE: Final = frozenset({errno.ECONNABORTED, errno.EPROTO})


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenSettings:
    """Where a server listens, and whom it lets in."""

    host: str
    port: int
    reuse_port: bool = False
    # Sockets that listen already, in place of any of the above: descriptors.
    listening: tuple[int, ...] = ()
    tls: TlsMode = "off"
    tls_certificate_file: str = ""
    tls_key_file: str = ""
    tls_client_ca_file: str = ""  # clients must show a certificate signed by one of these
    # What TLS is served with; None: it is made of the files above.
    tls_context: ssl.SSLContext | None = None
    # Load balancers, which say by PROXY protocol for whom they connect.
    proxy_protocol_from: tuple[IPv4Network | IPv6Network, ...] = ()
    # A connection costs some 10 KiB, and what its calls hold.
    connections_max: int = 10_000
    connections_per_address_max: int = 1_000  # clients behind one address translation share it
    handshake_timeout_s: float = 10.0
    # Names of the settings for host and port, for whom they cannot be used.
    setting_names: tuple[str, str] = ("grpc_host", "grpc_port")


class ConnectionProtocol(asyncio.Protocol):
    """What serves a connection. Once it is open, its end is told by `RpcListener.closed`."""

    is_open = False


@final
class _NewConnection:
    """A connection that was accepted and is not served yet."""

    def __init__(self, accepted: socket.socket, host: str, port: int) -> None:
        self.socket = accepted
        self.host, self.port = host, port  # of the client, once its balancer has told
        self.is_balancer = False
        self.is_counted = False  # by its address
        self.protocol: ConnectionProtocol | None = None


@final
class RpcListener:
    """Accepts connections and hands each to a protocol of its own, made with the client's address.

    The protocol says `closed` with that address when its connection has ended.
    """

    def __init__(
        self,
        settings: ListenSettings,
        make_protocol: Callable[[str, int], ConnectionProtocol],
        notices: MisuseLog,
    ) -> None:
        self.address = ""
        self._settings = settings
        self._make_protocol = make_protocol
        self._notices = notices
        self._connections_max = settings.connections_max
        self._tls: ssl.SSLContext | None = None
        self._open: Counter[str] = Counter()  # connections by address of the client
        self._open_count = 0
        self._tasks: asyncio.TaskGroup | None = None
        self._listening: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._connecting: set[asyncio.Task[None]] = set()  # in the middle of their handshake

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[RpcListener]:
        """Accept connections until the block ends or `close`; raise StartError."""
        self._tls = self._settings.tls_context or tls_context(self._settings)
        self._connections_max = _affordable(self._settings.connections_max)
        sockets = self._listening = _inherited(self._settings) or _bind(self._settings)
        port = sockets[0].getsockname()[1]
        host = self._settings.host
        self.address = f"[{host}]:{port}" if ":" in host and host[0] != "[" else f"{host}:{port}"
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
        """Return the sockets that it listens on, for another process to keep them open."""
        return [one.fileno() for one in self._listening]

    def leave(self) -> None:
        """Accept what the kernel has taken by now, and nothing more, from this call on.

        Who connects now goes to another process that shares the port, or is refused at once. What
        waits to be accepted is accepted, since the kernel resets it when the socket is closed.
        """
        for task in self._accepting:
            task.cancel()
        for one in self._listening:
            self._accept_rest(one)
            asyncio.get_running_loop().remove_reader(one)
            one.close()
        self._listening = []

    async def connected(self) -> None:
        """Wait until no connection is in the middle of its handshake, of those there are now."""
        if self._connecting:
            await asyncio.wait(self._connecting)

    def close(self) -> None:
        """Accept nothing more, and give up those in the middle of their handshake."""
        self.leave()
        for task in self._connecting:
            task.cancel()

    def closed(self, peer_host: str) -> None:
        """Make room: a connection of this client has ended."""
        self._open_count -= 1
        self._uncount(peer_host)

    async def _accept(self, listening: socket.socket) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        is_told = False  # that no connection can be accepted
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
                    # No files are left. The socket stays readable, and would not let the loop
                    # sleep.
                    if not is_told:
                        log.warning(
                            "cannot accept connections",
                            reason=str(error),
                            connections=self._open_count,
                            advice="raise the limit of open files (ulimit -n)",
                        )
                    is_told = True
                    loop.remove_reader(listening)
                    await asyncio.sleep(_NO_FILES_PAUSE_S)
                    loop.add_reader(listening, readable.set)
                    break
                is_told = False
                self._admit(accepted, *peer[:2])
            await asyncio.sleep(0)

    def _accept_rest(self, listening: socket.socket) -> None:
        """Accept what waits to be accepted; no more than the kernel keeps, whoever goes on."""
        for _ in range(BACKLOG):
            try:
                accepted, peer = listening.accept()
            except OSError as error:
                if error.errno in _GONE:
                    continue
                return
            self._admit(accepted, *peer[:2])

    def _admit(self, accepted: socket.socket, peer_host: str, peer_port: int) -> None:
        settings = self._settings
        newcomer = _NewConnection(accepted, peer_host, peer_port)
        newcomer.is_balancer = _is_within(peer_host, settings.proxy_protocol_from)
        is_full = self._open_count >= self._connections_max
        if is_full:
            self._refuse(newcomer, Limit.CONNECTIONS)
        # A balancer's address is not the client's, which it is about to tell.
        if is_full or not (newcomer.is_balancer or self._count(newcomer)):
            accepted.close()
            return
        accepted.setblocking(False)
        self._open_count += 1
        assert self._tasks is not None, "who accepts has a group for the tasks"
        task = self._tasks.create_task(self._connect(newcomer), name="connect")
        self._connecting.add(task)

        def connected(_task: asyncio.Task[None]) -> None:
            self._connecting.discard(task)
            # However it has ended, and if it never began: who is not open is counted no more.
            if newcomer.protocol is None or not newcomer.protocol.is_open:
                accepted.close()
                self._open_count -= 1
                if newcomer.is_counted:
                    self._uncount(newcomer.host)

        task.add_done_callback(connected)

    def _count(self, newcomer: _NewConnection) -> bool:
        """Count a connection of an address; False: it has too many, and was refused."""
        if self._open[newcomer.host] >= self._settings.connections_per_address_max:
            self._refuse(newcomer, Limit.CONNECTIONS_PER_ADDRESS)
            return False
        self._open[newcomer.host] += 1
        newcomer.is_counted = True
        return True

    def _uncount(self, peer_host: str) -> None:
        self._open[peer_host] -= 1
        if not self._open[peer_host]:
            del self._open[peer_host]

    def _refuse(self, newcomer: _NewConnection, limit: Limit) -> None:
        count = self._open[newcomer.host]
        reason = f"{self._open_count} connections, {count} of this address"
        self._notices.refuse(limit, peer=newcomer.host, reason=reason)

    async def _connect(self, newcomer: _NewConnection) -> None:
        """Find out who the client is and what it speaks, and hand it over."""
        loop = asyncio.get_running_loop()
        settings, tls, accepted = self._settings, self._tls, newcomer.socket
        try:
            async with asyncio.timeout(settings.handshake_timeout_s):
                if newcomer.is_balancer:
                    source = await read_source(accepted)
                    if source is not None:
                        newcomer.host, newcomer.port = source
                    if not self._count(newcomer):
                        return
                protocol = newcomer.protocol = self._make_protocol(newcomer.host, newcomer.port)
                if settings.tls == "optional" and not await _begins_tls(accepted):
                    tls = None
                await loop.connect_accepted_socket(lambda: protocol, accepted, ssl=tls)
        except TimeoutError:
            reason = f"no handshake within {settings.handshake_timeout_s:g} s"
            self._notices.refuse(Limit.HANDSHAKE, peer=newcomer.host, reason=reason)
        except ssl.SSLError as error:
            self._notices.fail("tls_handshake", peer=newcomer.host, reason=str(error))
        except BadProxyHeader as error:
            self._notices.fail("proxy_protocol", peer=newcomer.host, reason=str(error))
        except OSError as error:
            log.debug("no handshake", peer=newcomer.host, reason=str(error))
        except Exception:
            # One client does not end the server.
            log.exception("connection failed in its handshake", peer=newcomer.host)


def _is_within(host: str, networks: tuple[IPv4Network | IPv6Network, ...]) -> bool:
    if not networks:
        return False
    # The zone of a link-local address is no part of a network.
    address = ip_address(host.partition("%")[0])
    return any(address in network for network in networks)


async def _begins_tls(accepted: socket.socket) -> bool:
    """Wait for the first byte, and say whether it begins a TLS handshake; it stays unread."""
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


def _affordable(connections_max: int) -> int:
    """Return how many connections the files of this process allow, at most `connections_max`."""
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


def _inherited(settings: ListenSettings) -> list[socket.socket]:
    sockets = [socket.socket(fileno=descriptor) for descriptor in settings.listening]
    for one in sockets:
        one.setblocking(False)
        one.set_inheritable(False)
    return sockets


def _bind(settings: ListenSettings) -> list[socket.socket]:
    """Listen on every address that the host's name has; raise StartError."""
    host, port = settings.host.strip("[]"), settings.port
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_ADDRCONFIG
        )
        for family, kind, protocol, _, address in found:
            one = socket.socket(family, kind, protocol)
            sockets.append(one)
            one.setblocking(False)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if settings.reuse_port:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # Port 0 picks one, and the other addresses get the same.
            one.bind((address[0], port, *address[2:]))
            port = one.getsockname()[1]
            one.listen(BACKLOG)
    except OSError as error:
        for one in sockets:
            one.close()
        raise cannot_listen(
            settings.host, settings.port, settings=settings.setting_names, error=error
        ) from error
    return sockets


def tls_context(settings: ListenSettings) -> ssl.SSLContext | None:
    """Return what TLS is served with, None where it is off; raise StartError."""
    if settings.tls == "off":
        return None
    return server_context(
        TlsFiles(
            certificate=settings.tls_certificate_file,
            key=settings.tls_key_file,
            authorities=settings.tls_client_ca_file,
        )
    )
