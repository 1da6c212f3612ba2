"""What clients make a server hold, in bytes: one account a process, a share of it a connection.

    MemoryAccount        all that is held for calls of this process
      └ AddressShare     what all connections of one address have of it
        └ MemoryShare    what one connection has: requests on their way, whole, inflated;
                         calls that wait; replies that their client has not read

Whoever is about to hold something takes room for it first, and is refused where there is none. A
share has a bound of its own, and another that sinks as the account fills: nobody may hold more than
is still free. So whoever holds most is refused first, and a newcomer finds as much room as the
largest of those before it has; no size has to be chosen for each number of clients.

The same holds among addresses, since connections cost a stranger nothing: those of one address stop
where they have as much as is free, at half of the account where they are alone. What an address may
still have is for its connections what the free room is for all. What waits for room comes on top.

Who wants to send a large message, and finds no room for it, waits in the account's `RoomQueue`.
"""

from __future__ import annotations

from typing import final

from tidemill.transport.grpc.room_queue import RoomQueue


@final
class MemoryAccount:
    """The bytes that all connections of a process hold."""

    __slots__ = ("bytes", "bytes_max", "queue")

    def __init__(self, bytes_max: int) -> None:
        self.bytes = 0
        self.bytes_max = bytes_max
        self.queue = RoomQueue(bytes_max)


@final
class AddressShare:
    """The bytes that the connections of one address hold."""

    # Its server keeps it for as long as a connection does.
    __slots__ = ("__weakref__", "bytes", "waiting_bytes")

    def __init__(self) -> None:
        self.bytes = 0
        # What those of its messages may hold that wait for room. It has a bound of its own, and is
        # counted once, else messages that wait would leave none for those that may come.
        self.waiting_bytes = 0


@final
class MemoryShare:
    """The bytes that one connection holds."""

    __slots__ = ("_account", "_address", "_granted_bytes", "bytes", "bytes_max")

    def __init__(
        self, account: MemoryAccount, bytes_max: int, address: AddressShare | None = None
    ) -> None:
        """Be a part of `account`, and of what one address has of it; None where there are none."""
        self._account = account
        self._address = address
        self._granted_bytes = 0  # of `bytes`: flow control bounds it by itself
        self.bytes = 0
        self.bytes_max = bytes_max

    def has_room(self, count: int) -> bool:
        """Return whether its own bound leaves room for `count` bytes, whatever others hold."""
        return self.bytes + count - self._granted_bytes <= self.bytes_max

    def take(self, count: int) -> bool:
        """Take room for `count` bytes; False, and nothing is taken, where there is none."""
        # `has_room`, `is_fair` and `_add`, written out: every call takes its room.
        account, address, bytes_then = self._account, self._address, self.bytes + count
        free_bytes = account.bytes_max - account.bytes
        if address is not None and address.bytes > address.waiting_bytes:
            free_bytes -= address.bytes - address.waiting_bytes
        if bytes_then > free_bytes or bytes_then - self._granted_bytes > self.bytes_max:
            return False
        self.bytes = bytes_then
        account.bytes += count
        if address is not None:
            address.bytes += count
        return True

    def add(self, count: int) -> None:
        """Take room for `count` bytes that were promised it, whether there is some or not."""
        self._add(count)

    def is_fair(self, count: int) -> bool:
        """Return whether `count` bytes more are no more than is free for all."""
        account, address = self._account, self._address
        free_bytes = account.bytes_max - account.bytes
        if address is not None and address.bytes > address.waiting_bytes:
            free_bytes -= address.bytes - address.waiting_bytes
        return self.bytes + count <= free_bytes

    def leaves_room(self, count: int, kept_bytes: int) -> bool:
        """Return whether what is free is as much as it holds also once it holds `count` more.

        For what is large: `is_fair` lets one message take the last room, and then who sends a
        hundred bytes is refused beside it. `kept_bytes` are for messages that are to wait.
        """
        return self.is_fair(self._counted(count) + kept_bytes)

    def is_short_of_room(self, count: int, kept_bytes: int) -> bool:
        """Return whether `leaves_room` would not hold for one that holds nothing either."""
        return not self.is_fair(self._counted(count) + kept_bytes - self.bytes)

    def _counted(self, count: int) -> int:
        """Return how much closer `count` bytes bring what it holds and what is free."""
        return count * (2 if self._address is None else 3)

    def count_granted(self, granted_bytes: int) -> None:
        """Count what flow control lets the client send and what it has not read, as it is now."""
        more = granted_bytes - self._granted_bytes
        self._granted_bytes = granted_bytes
        self._add(more)
        if more < 0 and self._account.queue.is_waited_in:
            self._account.queue.look()

    def give_back(self, count: int) -> None:
        """Give room back."""
        account, address = self._account, self._address
        self.bytes -= count
        account.bytes -= count
        if address is not None:
            address.bytes -= count
        if account.queue.is_waited_in:
            account.queue.look()
        assert self.bytes >= 0, "nobody gives back what was not taken"

    def _add(self, count: int) -> None:
        self.bytes += count
        self._account.bytes += count
        if self._address is not None:
            self._address.bytes += count
