"""The size of a message as a client receives it: one response item of ReceiveMessage."""

from __future__ import annotations

from typing import Final

# That a delivery adds to a stored message, at most: names of the topic, handle, store host, times,
# and the origin of a dead letter.
DELIVERY_BYTES: Final = 1 << 10
# Node.js, C# and Rust clients accept 4 MiB per gRPC message.
ITEM_BYTES_MAX: Final = (4 << 20) - (1 << 10)
ITEM_BYTES_MAX_OF_ALL: Final = (4 << 20) + (32 << 10)  # a body of 4 MiB with 16 KiB of properties
