"""The queue of large messages that wait for memory, with fair turns per address (ADR 0030).

    RoomQueue              of a memory account
      └ _AddressQueue      of one client address: its waiting connections, each once
          └ RoomTicket     of one connection; the RoomRequester is the connection's memory

One turn grants room to one message. The addresses take turns, and the connections of an address
take turns within it. So a client with one message waits no longer beside a client with a thousand.

If the free room is too small for the message whose turn it is, the other messages of that address
wait behind it. Otherwise small messages would overtake a large one for ever. A connection that
holds too much memory itself is skipped.

A waiting message already holds one stream window of bytes. Therefore the queue has a limit in
bytes, and an address may hold at most as many bytes as remain for the others. New messages must
leave the bytes of the queue free.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Final, Protocol, final

if TYPE_CHECKING:
    from tidemill.transport.grpc.address_share import AddressShare

# Of an account, for waiting messages: three quarters. A single address may wait with half of that.
# It then leaves five sixteenths for other uses, as much as the other addresses would find.
_WAITING_SHARE: Final = (3, 4)
# Examined in one turn of the event loop: some tens of microseconds. The others are examined in the
# next turns, once each time that there may be more room.
ADDRESSES_PER_TURN: Final = 32
TICKETS_PER_TURN: Final = 32  # of one address


class RoomRequester(Protocol):
    """A connection with waiting messages; called only while it has some."""

    def grant_next(self) -> bool:
        """Let the first of its messages arrive; return False, without a change, if it may not."""

    @property
    def is_short_of_room(self) -> bool:
        """Whether the reason is the free room, not the memory of the connection itself."""


@final
class _AddressQueue:
    """The waiting connections of one address, in the order of their turns."""

    __slots__ = ("bytes", "round", "skipped_count", "tickets")

    def __init__(self) -> None:
        self.tickets: dict[RoomTicket, RoomRequester] = {}
        self.bytes = 0  # held by all waiting messages
        self.round = 0  # of the `RoomQueue`, at the last examination
        self.skipped_count = 0  # connections of that round without a grant

    @property
    def is_exhausted(self) -> bool:
        """Whether all its connections were examined in its round."""
        return self.skipped_count >= len(self.tickets)


@final
class RoomTicket:
    """The ticket of one connection; it does not refer to the connection."""

    __slots__ = ("address", "count")

    def __init__(self, address: AddressShare | None) -> None:
        self.address = address
        self.count = 0  # waiting messages of the connection


@final
class RoomQueue:
    """The messages of one account that wait for room."""

    def __init__(self, account_bytes_max: int) -> None:
        self.on_room: Callable[[], None] | None = None  # called when `grant_room` may find room
        self.bytes = 0  # held by all waiting messages
        self._bytes_max = account_bytes_max * _WAITING_SHARE[0] // _WAITING_SHARE[1]
        self.has_requests = False  # whether any message waits
        self._addresses: dict[AddressShare | None, _AddressQueue] = {}
        self._round = 1  # increases each time that there may be more room

    def is_contended(self, ticket: RoomTicket) -> bool:
        """Return whether its address has waiting messages, which must not be overtaken."""
        return ticket.address in self._addresses

    def reserved_for(self, ticket: RoomTicket) -> int:
        """Return the bytes to leave free for further waiting messages of an address."""
        queue = self._addresses.get(ticket.address)
        own_bytes = queue.bytes if queue is not None else 0
        return max(self._bytes_max - self.bytes - own_bytes, 0) // 2

    def join(self, ticket: RoomTicket, requester: RoomRequester, held_bytes: int) -> bool:
        """Add a message that holds `held_bytes` meanwhile; return False if there are too many."""
        queue = self._addresses.get(ticket.address)
        own_bytes = queue.bytes if queue is not None else 0
        if own_bytes + held_bytes > self._bytes_max - self.bytes:
            return False
        if queue is None:
            queue = self._addresses[ticket.address] = _AddressQueue()
            self.has_requests = True
        self._count(ticket, queue, held_bytes)
        queue.tickets[ticket] = requester
        ticket.count += 1
        self.recheck()
        return True

    def withdraw(self, ticket: RoomTicket, held_bytes: int) -> None:
        """Remove a message."""
        queue = self._addresses[ticket.address]
        self._count(ticket, queue, -held_bytes)
        ticket.count -= 1
        if not ticket.count:
            del queue.tickets[ticket]
            if not queue.tickets:
                del self._addresses[ticket.address]
                self.has_requests = bool(self._addresses)
        self.recheck()

    def _count(self, ticket: RoomTicket, queue: _AddressQueue, held_bytes: int) -> None:
        self.bytes += held_bytes
        queue.bytes += held_bytes
        if ticket.address is not None:
            ticket.address.waiting_bytes += held_bytes

    def recheck(self) -> None:
        """Announce that there may be more room."""
        self._round += 1
        self._schedule()

    def _schedule(self) -> None:
        if self._addresses and self.on_room is not None:
            self.on_room()

    def grant_room(self) -> None:
        """Grant the free room to waiting messages, one per turn.

        If a connection fails, the others get their turns first; then its error is raised.
        """
        failures: list[Exception] = []
        examined, has_unexamined = 0, False
        while self._addresses and examined < min(len(self._addresses), ADDRESSES_PER_TURN):
            address, queue = next(iter(self._addresses.items()))
            try:
                is_granted = self._grant_to(queue)
            except Exception as error:  # noqa: BLE001  # Other connections get their turns.
                failures.append(error)
                is_granted = False
            examined = 0 if is_granted else examined + 1
            if address in self._addresses:
                self._addresses[address] = self._addresses.pop(address)
                has_unexamined |= not queue.is_exhausted
        if has_unexamined or (
            self._addresses and next(iter(self._addresses.values())).round != self._round
        ):
            self._schedule()
        if failures:
            raise failures[0]

    def _grant_to(self, queue: _AddressQueue) -> bool:
        """Grant room to one message of an address; return False if none may have it."""
        if queue.round != self._round:
            queue.round, queue.skipped_count = self._round, 0
        for ticket, requester in list(islice(queue.tickets.items(), TICKETS_PER_TURN)):
            try:
                is_granted = requester.grant_next()
                is_short = not is_granted and requester.is_short_of_room
            except Exception:
                queue.skipped_count += 1
                _to_end(queue, ticket)
                raise
            if is_granted:
                _to_end(queue, ticket)  # The others have their turns first.
                return True
            if is_short:
                queue.skipped_count = len(queue.tickets)
                return False
            # A connection with too much memory is examined again after all others.
            queue.skipped_count += 1
            _to_end(queue, ticket)
        return False


def _to_end(queue: _AddressQueue, ticket: RoomTicket) -> None:
    """Move a connection behind all others of its address, if it still waits."""
    requester = queue.tickets.pop(ticket, None)
    if requester is not None:
        queue.tickets[ticket] = requester
