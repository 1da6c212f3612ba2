"""The queue of large messages that wait for memory, with fair turns per address (ADR 0030).

    RoomQueue              of a memory account
      └ _AddressQueue      of one client address: its waiting connections, each once
          └ RoomTicket     of one connection; the RoomRequester is the connection itself

One turn grants room to one message. The addresses take turns, and the connections of an address
take turns within it. So a client with one message waits no longer beside a client with a thousand.

If the free room is too small for the message whose turn it is, the other messages of that address
wait behind it. Otherwise small messages would overtake a large one for ever. A connection that
holds too much memory itself is skipped.

A waiting message already holds one stream window of bytes. Therefore the queue has a limit in
bytes. One address may use at most as much of the queue as it leaves free for the others. New
messages must leave the bytes of the queue free.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Final, Protocol, final

if TYPE_CHECKING:
    from tidemill.transport.grpc.memory import AddressShare

# Of an account, for messages that wait: three quarters. An address that is alone may wait with half
# of these, and has as much as others would find left, five sixteenths, for all else.
_WAITING_SHARE: Final = (3, 4)
# Looked at in one turn of the loop: some tens of microseconds. Those behind them are looked at in
# the turns that follow, each once for each time that there may be more room.
ADDRESSES_LOOKED_AT: Final = 32
PLACES_LOOKED_AT: Final = 32  # of one address


class RoomRequester(Protocol):
    """A connection with messages that wait; asked only while it has some."""

    def grant_next(self) -> bool:
        """Let the first of its messages come; False, and nothing has changed: it may not."""

    @property
    def is_short_of_room(self) -> bool:
        """Whether that is because there is little room, and not because of what it has itself."""


@final
class _AddressQueue:
    """The connections of one address that wait, in the order of their turns."""

    __slots__ = ("bytes", "passed_count", "places", "round")

    def __init__(self) -> None:
        self.places: dict[RoomTicket, RoomRequester] = {}
        self.bytes = 0  # held by all that wait
        self.round = 0  # of the queue, at the last look
        self.passed_count = 0  # of the connections, looked at in vain in that round

    @property
    def is_passed(self) -> bool:
        """Whether there is nobody left to be looked at in its round."""
        return self.passed_count >= len(self.places)


@final
class RoomTicket:
    """The place of one connection, which keeps it; it does not keep the connection."""

    __slots__ = ("address", "count")

    def __init__(self, address: AddressShare | None) -> None:
        self.address = address
        self.count = 0  # of its messages that wait


@final
class RoomQueue:
    """All messages that wait for room in one account."""

    def __init__(self, account_bytes_max: int) -> None:
        self.on_room: Callable[[], None] | None = None  # called when an `offer` may find room
        self.bytes = 0  # held by all that wait
        self._bytes_max = account_bytes_max * _WAITING_SHARE[0] // _WAITING_SHARE[1]
        self.is_waited_in = False  # whether anybody waits
        self._turns: dict[AddressShare | None, _AddressQueue] = {}
        self._round = 1  # one for each time that there may be more room

    def is_contended(self, place: RoomTicket) -> bool:
        """Whether somebody of its address waits: who comes later does not pass them."""
        return place.address in self._turns

    def kept_for(self, place: RoomTicket) -> int:
        """Return what more messages of an address may hold that come to wait."""
        turns = self._turns.get(place.address)
        own_bytes = turns.bytes if turns is not None else 0
        return max(self._bytes_max - self.bytes - own_bytes, 0) // 2

    def join(self, place: RoomTicket, waiter: RoomRequester, held_bytes: int) -> bool:
        """Let a message wait that holds as much meanwhile; False: too many wait."""
        turns = self._turns.get(place.address)
        own_bytes = turns.bytes if turns is not None else 0
        if own_bytes + held_bytes > self._bytes_max - self.bytes:
            return False
        if turns is None:
            turns = self._turns[place.address] = _AddressQueue()
            self.is_waited_in = True
        self._count(place, turns, held_bytes)
        turns.places[place] = waiter
        place.count += 1
        self.look()
        return True

    def leave(self, place: RoomTicket, held_bytes: int) -> None:
        """Let a message wait no more."""
        turns = self._turns[place.address]
        self._count(place, turns, -held_bytes)
        place.count -= 1
        if not place.count:
            del turns.places[place]
            if not turns.places:
                del self._turns[place.address]
                self.is_waited_in = bool(self._turns)
        self.look()

    def _count(self, place: RoomTicket, turns: _AddressQueue, held_bytes: int) -> None:
        self.bytes += held_bytes
        turns.bytes += held_bytes
        if place.address is not None:
            place.address.waiting_bytes += held_bytes

    def look(self) -> None:
        """Tell that there may be room, where somebody waits for it."""
        self._round += 1
        self._ask_again()

    def _ask_again(self) -> None:
        if self._turns and self.on_room is not None:
            self.on_room()

    def offer(self) -> None:
        """Give those who wait the room that there is, a message each in turn.

        Raises what one of those who wait has failed with, once the others have had their turns.
        """
        failures: list[Exception] = []
        looked_at, has_left = 0, False
        while self._turns and looked_at < min(len(self._turns), ADDRESSES_LOOKED_AT):
            address, turns = next(iter(self._turns.items()))
            try:
                is_granted = self._offer_to(turns)
            except Exception as error:  # noqa: BLE001  # Its own: the others wait for their turns.
                failures.append(error)
                is_granted = False
            looked_at = 0 if is_granted else looked_at + 1
            if address in self._turns:
                self._turns[address] = self._turns.pop(address)
                has_left |= not turns.is_passed
        if has_left or (self._turns and next(iter(self._turns.values())).round != self._round):
            self._ask_again()
        if failures:
            raise failures[0]

    def _offer_to(self, turns: _AddressQueue) -> bool:
        """Give one message of an address room; False where none of those in front may have it."""
        if turns.round != self._round:
            turns.round, turns.passed_count = self._round, 0
        for place, waiter in list(islice(turns.places.items(), PLACES_LOOKED_AT)):
            try:
                is_granted = waiter.grant_next()
                is_short = not is_granted and waiter.is_short_of_room
            except Exception:
                turns.passed_count += 1
                _to_end(turns, place)
                raise
            if is_granted:
                _to_end(turns, place)  # The others have their turns first.
                return True
            if is_short:
                turns.passed_count = len(turns.places)
                return False
            # Who has too much itself is looked at again after all the others, who may have room.
            turns.passed_count += 1
            _to_end(turns, place)
        return False


def _to_end(turns: _AddressQueue, place: RoomTicket) -> None:
    """Let a connection have its next turn after all others of its address, if it still waits."""
    waiter = turns.places.pop(place, None)
    if waiter is not None:
        turns.places[place] = waiter
