"""Clients that have lost a right while they ran.

Brokers give back their deliveries, so their receipt handles are invalid. Push consumers repeat an
ack that was refused with 40100 every second for each message that they hold. They drop a message
with an invalid handle.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, final

from tidemill.common.errors import Banned, InvalidReceiptHandle, ServiceError, Unauthorized
from tidemill.message.client_key import NO_OWNER, ClientKey

if TYPE_CHECKING:
    from tidemill.proxy.server.gated_call import GatedCall

REVOKED_MS: Final = 3_600_000
REVOKED_MAX: Final = 100_000  # beyond it, the oldest one gets 40100 again
SETTLING: Final = frozenset(
    {"ack_message", "change_invisible_duration", "forward_message_to_dead_letter_queue"}
)


@final
class RevokedClients:
    """The clients of the last hour."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._ends_ms: OrderedDict[ClientKey, int] = OrderedDict()  # the oldest first

    def note(self, client: ClientKey) -> None:
        """Note that a client has lost a right."""
        self._ends_ms.pop(client, None)
        self._ends_ms[client] = self._now_ms() + REVOKED_MS
        if len(self._ends_ms) > REVOKED_MAX:
            self._ends_ms.popitem(last=False)

    def answer(self, call: GatedCall, error: ServiceError) -> ServiceError:
        """Return the error that a refused call gets.

        The user is known only after correct credentials. So another user cannot learn that a client
        was revoked.
        """
        if call.method not in SETTLING or not isinstance(error, Unauthorized):
            return error
        client = call.client if call.caller else ClientKey(call.client_id, error.user_id)
        if client.owner == NO_OWNER and not isinstance(error, Banned):
            return error  # Wrong credentials learn nothing.
        ends_ms = self._ends_ms.get(client)
        if ends_ms is None or self._now_ms() > ends_ms:
            return error
        return InvalidReceiptHandle(
            f"this client has lost its rights, and others get its messages: {error.message}"
        )
