"""The memory that a server holds for clients, in bytes: one account per process.

    MemoryAccount        all memory for the calls of this process
      └ AddressShare     the part of all connections of one address
        └ MemoryShare    the part of one connection: incomplete, complete and inflated requests;
                         waiting calls; replies that the client has not read

Code takes room before it holds data, and the call is rejected if there is none. A share has a fixed
limit and a second limit that decreases as the account fills: no share may be larger than the free
room. So the largest client is rejected first, and a new client finds as much room as the largest
other one has. No limit depends on the number of clients.

The same rule holds for addresses, because connections cost a client nothing. The connections of one
address may have as much as is free, at most half of the account. Within an address, its remaining
part takes the place of the free room. Waiting messages are counted in addition.

A large message without room waits in the account's `RoomQueue`.
"""

from __future__ import annotations

from typing import final

from tidemill.transport.grpc.address_share import AddressShare
from tidemill.transport.grpc.room_queue import RoomQueue


@final
class MemoryAccount:
    """The memory of all connections of a process."""

    __slots__ = ("bytes", "bytes_max", "queue")

    def __init__(self, bytes_max: int) -> None:
        self.bytes = 0
        self.bytes_max = bytes_max
        self.queue = RoomQueue(bytes_max)


@final
class MemoryShare:
    """The memory of one connection."""

    __slots__ = ("_account", "_address", "_granted_bytes", "bytes", "bytes_max")

    def __init__(
        self, account: MemoryAccount, bytes_max: int, address: AddressShare | None = None
    ) -> None:
        """Take from `account`, and from the part of one address if there is one."""
        self._account = account
        self._address = address
        self._granted_bytes = 0  # part of `bytes` that flow control limits
        self.bytes = 0
        self.bytes_max = bytes_max

    def has_room(self, count: int) -> bool:
        """Return whether its fixed limit allows `count` more bytes."""
        return self.bytes + count - self._granted_bytes <= self.bytes_max

    def take(self, count: int) -> bool:
        """Take room for `count` bytes; return False, without a change, if there is none."""
        # Inlined `has_room`, `is_fair` and `_add`, because every call takes its room.
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
        """Take room for `count` promised bytes, even if there is none."""
        self._add(count)

    def is_fair(self, count: int) -> bool:
        """Return whether the share stays within the free room with `count` more bytes."""
        account, address = self._account, self._address
        free_bytes = account.bytes_max - account.bytes
        if address is not None and address.bytes > address.waiting_bytes:
            free_bytes -= address.bytes - address.waiting_bytes
        return self.bytes + count <= free_bytes

    def leaves_room(self, count: int, reserved_bytes: int) -> bool:
        """Return whether the free room covers the share after it has taken `count` more bytes.

        This rule is for large messages. `is_fair` lets one message take the last room, and then
        even a message of a hundred bytes is rejected. `reserved_bytes` are for messages that will
        wait.
        """
        return self.is_fair(self._counted(count) + reserved_bytes)

    def is_short_of_room(self, count: int, reserved_bytes: int) -> bool:
        """Return whether `leaves_room` would be false even for an empty share."""
        return not self.is_fair(self._counted(count) + reserved_bytes - self.bytes)

    def _counted(self, count: int) -> int:
        """Return how much closer `count` bytes bring the share and the free room."""
        return count * (2 if self._address is None else 3)

    def count_granted(self, granted_bytes: int) -> None:
        """Set the bytes that flow control allows the client and that the client has not read."""
        more = granted_bytes - self._granted_bytes
        self._granted_bytes = granted_bytes
        self._add(more)
        if more < 0 and self._account.queue.has_requests:
            self._account.queue.recheck()

    def release(self, count: int) -> None:
        """Return room."""
        account, address = self._account, self._address
        self.bytes -= count
        account.bytes -= count
        if address is not None:
            address.bytes -= count
        if account.queue.has_requests:
            account.queue.recheck()
        assert self.bytes >= 0, "only taken room is released"

    def _add(self, count: int) -> None:
        self.bytes += count
        self._account.bytes += count
        if self._address is not None:
            self._address.bytes += count
