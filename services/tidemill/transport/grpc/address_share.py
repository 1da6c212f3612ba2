"""The memory that the connections of one client address hold together."""

from __future__ import annotations

from typing import final


@final
class AddressShare:
    """The memory of the connections of one address."""

    # The server keeps it as long as a connection does.
    __slots__ = ("__weakref__", "bytes", "waiting_bytes")

    def __init__(self) -> None:
        self.bytes = 0
        # The bytes that waiting messages may hold. They have their own limit and are counted once.
        # Otherwise waiting messages would leave no room for granted ones.
        self.waiting_bytes = 0
