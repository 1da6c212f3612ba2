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
still have is for its connections what the free room is for all.
"""

from __future__ import annotations

from typing import final


@final
class MemoryAccount:
    """The bytes that all connections of a process hold."""

    __slots__ = ("bytes", "bytes_max")

    def __init__(self, bytes_max: int) -> None:
        self.bytes = 0
        self.bytes_max = bytes_max


@final
class AddressShare:
    """The bytes that the connections of one address hold."""

    # Its server keeps it for as long as a connection does.
    __slots__ = ("__weakref__", "bytes")

    def __init__(self) -> None:
        self.bytes = 0


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
        if not (self.has_room(count) and self.is_fair(count)):
            return False
        self._add(count)
        return True

    def is_fair(self, count: int) -> bool:
        """Return whether `count` bytes more are no more than is free for all."""
        account, address = self._account, self._address
        free_bytes = account.bytes_max - account.bytes
        if address is not None:
            free_bytes -= address.bytes
        return self.bytes + count <= free_bytes

    def count_granted(self, granted_bytes: int) -> None:
        """Count what flow control lets the client send and what it has not read, as it is now."""
        more = granted_bytes - self._granted_bytes
        self._granted_bytes = granted_bytes
        self._add(more)

    def give_back(self, count: int) -> None:
        """Give room back."""
        self._add(-count)
        assert self.bytes >= 0, "nobody gives back what was not taken"

    def _add(self, count: int) -> None:
        self.bytes += count
        self._account.bytes += count
        if self._address is not None:
            self._address.bytes += count
