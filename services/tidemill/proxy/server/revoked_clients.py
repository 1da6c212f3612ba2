"""Clients that have lost a right while they ran.

Brokers give back their deliveries, so their receipt handles are invalid. Push consumers repeat an
ack that was refused with 40100 every second for each message that they hold. They drop a message
with an invalid handle.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar, final

from tidemill.common.errors import Banned, InvalidReceiptHandle, ServiceError, Unauthorized
from tidemill.message.client_key import NO_OWNER, ClientKey
from tidemill.security.table import VIA_CERTIFICATE, identity_text

if TYPE_CHECKING:
    from tidemill.proxy.server.gated_call import GatedCall, StreamWatch
    from tidemill.security.acl import Resource

REVOKED_MS: Final = 3_600_000
# Clients, and as many identities of clients. Beyond it, the oldest one gets 40100 again.
REVOKED_MAX: Final = 100_000
# Topics and consumer groups in one report to the brokers. A client that has lost more rights loses
# all its deliveries.
LOST_RESOURCES_MAX: Final = 16
# Their end takes the messages from the client.
_CLIENT_STREAMS: Final = frozenset({"telemetry", "receive_message", "pull_message"})
SETTLING: Final = frozenset(
    {"ack_message", "change_invisible_duration", "forward_message_to_dead_letter_queue"}
)

# A client id and an identity: the service account or certificate that the user listed, or the hash
# of its token. If the user was deleted, only the identity is known.
_ClientIdentity: TypeAlias = tuple[str, str]
_KeyT = TypeVar("_KeyT", ClientKey, _ClientIdentity)


@final
class RevokedClients:
    """The clients of the last hour."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        # The ends, the oldest first. Clients with an identity take no places of other clients.
        self._client_ends_ms: OrderedDict[ClientKey, int] = OrderedDict()
        self._identity_ends_ms: OrderedDict[_ClientIdentity, int] = OrderedDict()
        # Called with a client that has lost a right while a stream of it was open, and with the
        # topics and consumer groups of the lost rights; none: it has lost all.
        self.on_revoked: Callable[[ClientKey, Sequence[Resource]], None] = _ignore

    def end_stream(
        self,
        watch: StreamWatch,
        client: ClientKey | None,
        error: ServiceError,
        lost: Sequence[Resource] = (),
        *,
        identity: str = "",
    ) -> None:
        """End a stream, and take from its client the deliveries of the lost resources, or all.

        `identity` is as in `note`.
        """
        watch.end(error)
        if client is None or watch.call.method not in _CLIENT_STREAMS:
            return
        self.note(client, identity)
        self.on_revoked(client, lost if len(lost) <= LOST_RESOURCES_MAX else ())

    def note(self, client: ClientKey, identity: str = "") -> None:
        """Note that a client has lost a right; `identity` was its credential, if not a secret."""
        self._note(self._client_ends_ms, client)
        if identity:
            self._note(self._identity_ends_ms, (client.client_id, identity))

    def _note(self, ends_ms: OrderedDict[_KeyT, int], key: _KeyT) -> None:
        ends_ms.pop(key, None)
        ends_ms[key] = self._now_ms() + REVOKED_MS
        if len(ends_ms) > REVOKED_MAX:
            ends_ms.popitem(last=False)

    def answer(self, call: GatedCall, error: ServiceError) -> ServiceError:
        """Return the error that a refused call gets.

        The user or the identity is known only after correct credentials. So another user cannot
        learn that a client was revoked.
        """
        if call.method not in SETTLING or not isinstance(error, Unauthorized):
            return error
        client = call.client if call.caller else ClientKey(call.client_id, error.user_id)
        ends_ms = [
            self._identity_ends_ms.get((call.client_id, each), 0)
            for each in _identities(call, error)
        ]
        # Wrong credentials learn nothing.
        if client.owner != NO_OWNER or isinstance(error, Banned):
            ends_ms.append(self._client_ends_ms.get(client, 0))
        if self._now_ms() > max(ends_ms, default=0):
            return error
        return InvalidReceiptHandle(
            f"this client has lost its rights, and others get its messages: {error.message}"
        )


def _identities(call: GatedCall, error: Unauthorized) -> Sequence[str]:
    """Return the identities that a call has proven. Its user may not be that of its stream."""
    if call.caller is None:
        return error.identities
    identity = call.caller.known.identity
    if identity.startswith(f"{VIA_CERTIFICATE}:"):
        return [identity_text(VIA_CERTIFICATE, name) for name in call.certificate_names]
    return [identity] if identity else []


def _ignore(_client: ClientKey, _lost: Sequence[Resource]) -> None:
    """Report nothing: no broker is connected."""
