"""The gRPC server: a thin asyncio shell around `grpc.server_connection`.

    server = RpcServer(methods, Limits(), ListenSettings(host=..., port=...))
    async with server.serving(): ...

There is one protocol per connection, one task per call, and one `write` per turn of the event loop
for all ready output. If a client stops reading, the server stops reading from it. Other clients are
not affected.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Final, final
from weakref import WeakValueDictionary

from tidemill.common.change_checks import ChangeChecks
from tidemill.common.deadlines import Deadlines
from tidemill.transport.aio.listener import ListenSettings, RpcListener
from tidemill.transport.aio.misuse_log import MisuseLog
from tidemill.transport.aio.offenders import Offenders
from tidemill.transport.aio.server_protocol import CLOSE_TIMEOUT_S, ServerProtocol
from tidemill.transport.grpc.address_share import AddressShare
from tidemill.transport.grpc.memory import MemoryAccount
from tidemill.transport.grpc.server_connection import CALLS_PER_TURN

if TYPE_CHECKING:
    from tidemill.transport.aio.call import RpcCall, RpcMethod
    from tidemill.transport.grpc.server_call import RequestPolicy
    from tidemill.transport.http2.limits import Limits

# Of a request: four of the largest bodies. It is far above one, so that a body over its own limit
# gets a response with its own code.
MESSAGE_BYTES_MAX: Final = 16 << 20
HELD_BYTES_MAX: Final = 1 << 30  # of all connections of a server, as the default
CHECK_PERIOD_S: Final = 1.0  # between two checks of the connections
CHECKED_PER_TURN: Final = 256  # connections in one turn of the event loop: under a millisecond
BANS_A_TURN: Final = 64  # connections whose address is compared with the bans: 1.5 ms
CONFIRM_TIMEOUT_S: Final = 1.0  # at the end, for clients to confirm that they read their responses
# Connections that a drain asks to leave in one step. Their clients reconnect elsewhere at once, so
# the steps spread the load.
DRAINED_PER_STEP: Final = 5
DRAIN_STEP_S: Final = 0.01  # between two steps: 500 connections take a second
DRAIN_ACK_TIMEOUT_S: Final = 2.0  # for clients to acknowledge; a dead client does not
DRAIN_ASK_SHARE: Final = 0.25  # of a drain's time; the remaining time is for the calls
_STOPPING: Final = "the server stops"
_BANNED: Final = "the address is banned"


@final
class RpcServer:
    """A server of methods by path; `address` is where it listens."""

    def __init__(
        self,
        methods: Mapping[str, RpcMethod],
        limits: Limits,
        listen: ListenSettings,
        *,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        held_bytes_max: int = HELD_BYTES_MAX,
        on_lost: Callable[[Hashable], object] = lambda _connection: None,
        is_banned: Callable[[str], bool] = lambda _host: False,
    ) -> None:
        """Serve `methods`; call `on_lost` with the key of each connection that ends.

        Connections from addresses that `is_banned` names are refused.
        """
        self.methods = methods
        self.policies: Mapping[str, RequestPolicy] = {
            path: method.policy for path, method in methods.items() if method.policy is not None
        }
        self.limits = limits
        self.message_bytes_max = message_bytes_max
        self._on_lost = on_lost
        self._is_banned = is_banned
        self.misuse = MisuseLog()
        self.account = MemoryAccount(held_bytes_max)
        self._is_granting = False  # room, at the end of this turn of the event loop
        # By address; a share exists as long as a connection of its address.
        self._addresses: WeakValueDictionary[str, AddressShare] = WeakValueDictionary()
        self.offenders = Offenders(limits)
        self.accepted_count = 0
        self.connections: set[ServerProtocol] = set()
        self.deadlines: Deadlines[RpcCall] = Deadlines(_expire)
        self.ending: set[asyncio.Task[None]] = set()  # tasks of cancelled calls
        self.is_draining = False
        self.listener = RpcListener(listen, self._new_connection, self.misuse, is_banned)
        self._ban_checks = ChangeChecks(self.connections, self._check_ban, a_turn=BANS_A_TURN)
        self._on_banned: Callable[[Hashable], object] = lambda _connection: None
        # Connections with more than one turn's worth of data, in the order of their next turns.
        self._pending: deque[ServerProtocol] = deque()
        self._is_continuing = False
        self._check_timer: asyncio.TimerHandle | None = None
        self._unchecked: list[ServerProtocol] = []  # of the current check
        self._changed = asyncio.Event()  # set when a connection ends, and during a drain a call

    @property
    def address(self) -> str:
        """The address at which the server listens."""
        return self.listener.address

    @property
    def call_count(self) -> int:
        """The number of calls in progress."""
        return sum(len(connection.calls) for connection in self.connections)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[RpcServer]:
        """Serve until the block ends; raise StartError if the address cannot be used."""
        self.account.queue.on_room = self._grant_room_soon
        async with self.listener.listening():
            try:
                yield self
            finally:
                self.account.queue.on_room = None
                self.listener.close()
                for connection in list(self.connections):
                    connection.close(_STOPPING)
                # With TLS, gRPC's C core may keep its end of a closed connection open.
                await self._wait_until(
                    lambda: all(one.has_read_all for one in self.connections), CLOSE_TIMEOUT_S
                )
                for connection in list(self.connections):
                    connection.abort()
                await self._wait_until(
                    lambda: not (self.connections or self.ending), CLOSE_TIMEOUT_S
                )
                if self._check_timer is not None:
                    self._check_timer.cancel()

    async def drain(self, timeout_s: float) -> None:
        """Accept no new connections, end streams of requests, and wait for the calls."""
        self.is_draining = True
        # First, because a client that leaves reconnects at once, and must find another process at
        # the shared port.
        self.listener.stop_accepting()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._ask_to_leave(timeout_s * DRAIN_ASK_SHARE)
                await self.listener.wait_connected()
                await self._wait_until(self._is_drained, timeout_s)
                # Calls that a client started before it received the request are answered too.
                await self._wait_until(self._is_acknowledged, DRAIN_ACK_TIMEOUT_S)
                await self._wait_until(self._is_drained, timeout_s)
        for connection in self.connections:
            connection.request_last_confirmation()
        await self._wait_until(
            lambda: not any(c.read_confirmations for c in self.connections), CONFIRM_TIMEOUT_S
        )

    async def _ask_to_leave(self, spread_s_max: float) -> None:
        """Ask all connections to leave, in steps; at once if they were asked before."""
        unasked: list[ServerProtocol] = []
        for connection in self.connections:
            if connection.is_drain_announced:
                connection.drain()
            else:
                unasked.append(connection)
        steps = drain_steps(len(unasked), spread_s_max)
        for step in range(steps):
            if step:
                await asyncio.sleep(DRAIN_STEP_S)
            for connection in unasked[step::steps]:
                connection.drain()

    def _is_drained(self) -> bool:
        """Return whether no call is in progress and every client was asked to leave.

        A client that is disconnected before it was asked would take that for an outage.
        """
        return not (self.call_count or self.ending) and all(
            connection.is_drain_announced for connection in self.connections
        )

    def _is_acknowledged(self) -> bool:
        """Return whether every client has answered that it opens no more calls here."""
        return all(connection.is_drain_acknowledged for connection in self.connections)

    async def _wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()

    # ------------------------------------------------------------ for the connections

    def _new_connection(self, peer_host: str, peer_port: int) -> ServerProtocol:
        return ServerProtocol(self, peer_host, peer_port)

    def share_of(self, address: str) -> AddressShare:
        """Return the memory of a client's address."""
        share = self._addresses.get(address)
        if share is None:
            share = self._addresses[address] = AddressShare()
        return share

    def add(self, connection: ServerProtocol) -> None:
        """Add an open connection."""
        self.accepted_count += 1
        self.connections.add(connection)
        if self._is_banned(connection.peer_host):  # since it was accepted
            asyncio.get_running_loop().call_soon(connection.close, _BANNED)
        if self._check_timer is None:
            self._check_later()

    def remove(self, connection: ServerProtocol) -> None:
        """Remove a lost connection."""
        self.connections.discard(connection)
        self.listener.release(connection.peer_host)
        self._on_lost(connection)
        self._changed.set()

    def close_banned(self, on_close: Callable[[Hashable], object]) -> None:
        """Close the connections from banned addresses, some in each turn of the event loop.

        Call `on_close` with the key of each of them before it is closed.
        """
        self._on_banned = on_close
        self._ban_checks.check_soon()

    def _check_ban(self, connection: ServerProtocol) -> None:
        if self._is_banned(connection.peer_host):
            self._on_banned(connection)
            connection.close(_BANNED)

    def continue_later(self, connection: ServerProtocol) -> None:
        """Call `continue_reading` after other connections have had their turns."""
        self._pending.append(connection)
        if not self._is_continuing:
            self._is_continuing = True
            asyncio.get_running_loop().call_soon(self._continue)

    def _continue(self) -> None:
        """Continue pending connections; together they start as many calls as one connection may.

        Connections with little data are served beside them, independent of their number.
        """
        budget = CALLS_PER_TURN
        for _ in range(len(self._pending)):
            budget -= 1 + self._pending.popleft().continue_reading()
            if budget <= 0:
                break
        self._is_continuing = bool(self._pending)
        if self._pending:
            asyncio.get_running_loop().call_soon(self._continue)

    def _grant_room_soon(self) -> None:
        """Grant the room that becomes free in this turn of the event loop."""
        if not self._is_granting:
            self._is_granting = True
            asyncio.get_running_loop().call_soon(self._grant_room)

    def _grant_room(self) -> None:
        self._is_granting = False
        self.account.queue.grant_room()

    def recheck(self) -> None:
        """Check again whether calls and connections have ended."""
        self._changed.set()

    def add_ending(self, task: asyncio.Task[None]) -> None:
        """Wait for the task of a cancelled call before the server stops."""
        self.ending.add(task)
        task.add_done_callback(self._remove_ending)

    def _remove_ending(self, task: asyncio.Task[None]) -> None:
        self.ending.discard(task)
        self._changed.set()

    def _check_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._check_timer = loop.call_later(CHECK_PERIOD_S, self._check)

    def _check(self) -> None:
        """Check all connections, some in each turn of the event loop."""
        now_s = time.monotonic()
        unchecked = self._unchecked or list(self.connections)
        self._unchecked = unchecked[CHECKED_PER_TURN:]
        # The timer is set first, so that an error below does not end the checks.
        if self._unchecked:
            self._check_timer = asyncio.get_running_loop().call_later(0, self._check)
        elif self.connections:
            self._check_later()
        else:
            self._check_timer = None
        for connection in unchecked[:CHECKED_PER_TURN]:
            if connection in self.connections:
                connection.check(now_s)


def drain_steps(count: int, spread_s_max: float) -> int:
    """Return the number of steps, DRAIN_STEP_S apart, that ask `count` connections to leave."""
    steps_max = max(int(spread_s_max / DRAIN_STEP_S), 1)
    return min(max(math.ceil(count / DRAINED_PER_STEP), 1), steps_max)


def _expire(calls: Iterable[RpcCall]) -> None:
    for call in calls:
        call.expire()
