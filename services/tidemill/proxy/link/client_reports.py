"""Reports about clients for one broker: their lives, ends, hand-overs and subscriptions.

The broker renews the deliveries of a client while the client lives. A client calls the proxy every
few seconds and counts as ended after two minutes of silence, so one report per `REPORT_PERIOD_MS`
is enough. The end of a client, and a lost right, are reported at once. All may be lost with a
stream: the next call of the client is reported again, and a client whose end was lost falls silent.

The hand-overs of the last minute are reported again on each stream, because a broker that starts
does not know them. Older hand-overs are in its log, since it has extended those deliveries. The
subscriptions are reported again on each stream, too.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable
from itertools import islice
from typing import Final, NamedTuple, TypeVar, final

from tidemill.message.client_key import ClientKey
from tidemill.security.acl import Resource, ResourceType

K = TypeVar("K")

REPORT_PERIOD_MS: Final = 10_000  # a twelfth of the silence after which a client counts as ended
CLIENTS_PER_FRAME_MAX: Final = 1_024  # of each kind: 0.5 ms of the broker's time, 255 KiB at most
HANDOVERS_PER_FRAME_MAX: Final = 4_096  # less than a millisecond of the broker's time
# Age at which a hand-over is forgotten: the first deadline of a push consumer, and the time that an
# answer may take.
HANDOVER_RETENTION_MS: Final = 75_000
HANDOVERS_MAX: Final = 65_536  # about 10 MB; a broker that starts redelivers the older ones
SUBSCRIPTIONS_PER_FRAME_MAX: Final = 1_024  # 0.5 ms of the broker's time
SUBSCRIPTIONS_MAX: Final = 16_384  # of groups that have not polled; the oldest are forgotten
# Time that a report waits for a request to travel with, before a frame leaves for it alone.
REPORT_DELAY_S: Final = 0.1


class RevokedRight(NamedTuple):
    """A client, and the consumer group and the topic of the deliveries that it loses."""

    client: ClientKey
    group: str = ""  # empty: all
    topic: str = ""  # empty: all


def revoked_rights(client: ClientKey, lost: Collection[Resource]) -> list[RevokedRight]:
    """Return the lost rights of a client on topics and consumer groups; without any, all."""
    if not lost:
        return [RevokedRight(client)]
    return [
        RevokedRight(client, group=name)
        if type_ is ResourceType.GROUP
        else RevokedRight(client, topic=name)
        for type_, name in lost
    ]


class FrameReports(NamedTuple):
    """The reports of one frame."""

    alive: list[ClientKey]
    ended: list[ClientKey]
    disconnected: list[ClientKey]
    handovers: list[tuple[int, int]]  # deliveries, by slot and identity
    subscriptions: list[tuple[int, int]]  # ids of consumer groups and topics
    revoked: list[RevokedRight]


@final
class ClientReports:
    """The reports that wait for a frame, and the time of the last report of each client."""

    def __init__(self, *, clients_max: int) -> None:
        """Keep at most `clients_max` clients of each kind; forget the oldest first."""
        self._clients_max = clients_max
        self._reported_at_ms: OrderedDict[ClientKey, int] = OrderedDict()  # the oldest report first
        # Dictionaries, since they keep the order.
        self._alive: dict[ClientKey, None] = {}
        self._ended: dict[ClientKey, None] = {}
        self._disconnected: dict[ClientKey, None] = {}
        self._revoked: dict[RevokedRight, None] = {}
        # The last hand-overs with their times, and how many of the newest are not reported yet.
        self._handovers: deque[tuple[int, tuple[int, int]]] = deque(maxlen=HANDOVERS_MAX)
        self._unreported = 0
        # All subscriptions, and those that are not reported yet.
        self._subscriptions: dict[tuple[int, int], None] = {}
        self._new_subscriptions: dict[tuple[int, int], None] = {}

    def __bool__(self) -> bool:
        return bool(
            self._alive
            or self._ended
            or self._disconnected
            or self._revoked
            or self._unreported
            or self._new_subscriptions
        )

    @property
    def has_urgent(self) -> bool:
        """Whether the end of a client, or a lost right, waits for a frame."""
        return bool(self._ended or self._revoked)

    def add_alive(self, client: ClientKey, now_ms: int) -> bool:
        """Note a call of a client, by monotonic time; return whether a report is due."""
        reported_at_ms = self._reported_at_ms
        if now_ms - reported_at_ms.get(client, now_ms - REPORT_PERIOD_MS) < REPORT_PERIOD_MS:
            return False
        reported_at_ms[client] = now_ms
        reported_at_ms.move_to_end(client)
        _cut(reported_at_ms, self._clients_max)
        self._alive[client] = None
        _cut(self._alive, self._clients_max)
        return True

    def add_ended(self, client: ClientKey) -> None:
        """Note the end of a client. Its next call is reported at once."""
        self._reported_at_ms.pop(client, None)
        self._alive.pop(client, None)
        self._ended[client] = None
        _cut(self._ended, self._clients_max)

    def add_revoked(self, revoked: RevokedRight) -> None:
        """Note that a client has lost a right."""
        self._revoked[revoked] = None
        _cut(self._revoked, self._clients_max)

    def add_disconnected(self, client: ClientKey) -> None:
        """Note that a client has no connection. Its next call is reported at once."""
        self._reported_at_ms.pop(client, None)
        self._alive.pop(client, None)
        self._disconnected[client] = None
        _cut(self._disconnected, self._clients_max)

    def add_handovers(self, deliveries: Iterable[tuple[int, int]], now_ms: int) -> None:
        """Note that a client has received deliveries, by slot and identity."""
        handovers = self._handovers
        for delivery in deliveries:
            handovers.append((now_ms, delivery))
            self._unreported += 1
        while handovers and handovers[0][0] < now_ms - HANDOVER_RETENTION_MS:
            handovers.popleft()
        self._unreported = min(self._unreported, len(handovers))

    def add_subscription(self, group_id: int, topic_id: int) -> bool:
        """Note the subscription of a consumer; return whether a report is due."""
        pair = group_id, topic_id
        if pair in self._subscriptions:
            return False
        self._subscriptions[pair] = self._new_subscriptions[pair] = None
        _cut(self._subscriptions, SUBSCRIPTIONS_MAX)
        _cut(self._new_subscriptions, SUBSCRIPTIONS_MAX)
        return True

    def forget_store(self) -> None:
        """Forget the hand-overs and subscriptions: the store with their ids was replaced."""
        self._handovers.clear()
        self._unreported = 0
        self._subscriptions.clear()
        self._new_subscriptions.clear()

    def take(self) -> FrameReports:
        """Return the reports of the next frame, and remove them."""
        first = len(self._handovers) - self._unreported
        last = min(first + HANDOVERS_PER_FRAME_MAX, len(self._handovers))
        handovers = [self._handovers[n][1] for n in range(first, last)]
        self._unreported -= len(handovers)
        return FrameReports(
            _take(self._alive, CLIENTS_PER_FRAME_MAX),
            _take(self._ended, CLIENTS_PER_FRAME_MAX),
            _take(self._disconnected, CLIENTS_PER_FRAME_MAX),
            handovers,
            _take(self._new_subscriptions, SUBSCRIPTIONS_PER_FRAME_MAX),
            _take(self._revoked, CLIENTS_PER_FRAME_MAX),
        )

    def close(self) -> None:
        """Report everything again: the broker of the next stream may be new."""
        self._reported_at_ms.clear()
        self._unreported = len(self._handovers)
        self._new_subscriptions = dict(self._subscriptions)


def _cut(known: dict[K, None] | OrderedDict[K, int], count_max: int) -> None:
    while len(known) > count_max:
        del known[next(iter(known))]


def _take(waiting: dict[K, None], count_max: int) -> list[K]:
    taken = list(islice(waiting, count_max))
    for key in taken:
        del waiting[key]
    return taken
