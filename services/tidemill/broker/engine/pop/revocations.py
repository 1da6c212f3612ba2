"""Revocation: clients that have lost a right lose their deliveries of a consumer group or topic.

Others get the messages at once. This includes deliveries with an invisible duration that their
client has chosen. Each message gets a new delivery that is visible now, as when an operator
releases it: the CK records state it on all replicas, and the table rejects the old handle until its
end. The broker finds the deliveries by a scan of the table, in slices, for all clients at once.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple, final

from tidemill.broker.engine.layout.numbers import DeliverySlot, GroupId, LogOffset, TopicId
from tidemill.broker.engine.layout.pop_checkpoint import cut_client
from tidemill.broker.engine.pop.deliveries import Delivery
from tidemill.broker.engine.pop.delivery_table import HOLDERS_A_SCAN
from tidemill.broker.engine.pop.state import PopState
from tidemill.broker.engine.tally import Tally
from tidemill.common.errors import InvalidReceiptHandle, Overloaded
from tidemill.message.client_key import ClientKey

if TYPE_CHECKING:
    from tidemill.broker.engine.pop.settlement import Settlement

SCOPES_MAX: Final = 16  # of one client; with more, it loses all its deliveries
# A slice ends after the delivery that reaches this number: under a millisecond.
MESSAGES_A_TURN: Final = 64
RETRY_MS: Final = 100  # while the table of deliveries is full


class Scope(NamedTuple):
    """The consumer group and the topic of lost deliveries; None: all of them."""

    group_id: GroupId | None = None
    topic_id: TopicId | None = None

    def covers(self, group_id: GroupId, topic_id: TopicId) -> bool:
        """Return whether deliveries of a consumer group and a topic are lost."""
        return self.group_id in {None, group_id} and self.topic_id in {None, topic_id}


ALL_DELIVERIES: Final = Scope()


class _Revoked(NamedTuple):
    """A client, and the deliveries that it loses."""

    client: ClientKey
    scopes: frozenset[Scope]
    before: LogOffset  # only deliveries with a lower id: later ones were popped since


@final
class Revocations:
    """The clients that have lost a right, until their deliveries are given back."""

    def __init__(self, state: PopState, settlement: Settlement, tally: Tally) -> None:
        self._state = state
        self._settlement = settlement
        self._tally = tally
        # By number, bounded by the numbers in use.
        self._revoked: dict[int, _Revoked] = {}
        # The clients of the current scan, and its position in the table.
        self._searched: dict[int, _Revoked] = {}
        self._searched_until = 0
        self._retry_at_ms = 0

    def note(self, client: ClientKey, scope: Scope, *, log_end: LogOffset) -> None:
        """Give back the deliveries of a client. All deliveries must be below `log_end`."""
        clients = self._state.table.clients
        # Clients that hold nothing have no number.
        for number in clients.find(cut_client(client)):
            holder, scopes = clients.clients[number], frozenset([scope])
            known = self._revoked.get(number)
            if known is not None and known.client == holder:
                scopes |= known.scopes
            if len(scopes) > SCOPES_MAX:
                scopes = frozenset([ALL_DELIVERIES])
            self._revoked[number] = _Revoked(holder, scopes, log_end)

    def next_at_ms(self) -> int | None:
        """Return when `give_back_slice` has work next, None for never."""
        return self._retry_at_ms if self._revoked or self._searched else None

    def give_back_slice(self, now_ms: int, *, expiry_ms: int) -> None:
        """Give back one slice of the deliveries, without those already due."""
        if expiry_ms < self._retry_at_ms:
            return
        if not self._searched:
            if not self._revoked:
                return
            numbers = list(islice(self._revoked, HOLDERS_A_SCAN))
            self._searched = {number: self._revoked.pop(number) for number in numbers}
            self._searched_until = 0
        table = self._state.table
        found, end = table.held_from(self._searched_until, self._searched, expiry_ms=expiry_ms)
        slots: list[int] = found.tolist()
        self._tally.add(len(slots))
        count = 0
        for slot in slots:
            if count >= MESSAGES_A_TURN:
                end = slot
                break
            try:
                count += self._give_back(slot, now_ms)
            except Overloaded:
                # The messages acked until then, or the dropped handles, make room.
                end, self._retry_at_ms = slot, expiry_ms + RETRY_MS
                break
        self._tally.add(count)
        self._searched_until = end
        if end >= len(table.ids):
            self._searched = {}

    def _give_back(self, slot: int, now_ms: int) -> int:
        """Give back the messages of a delivery, and return their number. Raises Overloaded."""
        table = self._state.table
        progress = self._state.owners[table.owners[slot]]
        group_id, topic_id = progress.group_id, progress.named_topic_id
        # The number may belong to another client by now.
        revoked, delivery_id = self._searched[table.holders[slot]], table.ids[slot]
        if revoked.client != table.client_of(slot) or delivery_id >= revoked.before:
            return 0
        if not any(scope.covers(group_id, topic_id) for scope in revoked.scopes):
            return 0
        count = 0
        for index in table.indexes_of(table.live[slot]):
            delivery = Delivery(
                group_id,
                topic_id,
                DeliverySlot(slot),
                LogOffset(delivery_id),
                index,
                table.visible_at_ms[slot],
            )
            # A client processes an ordered batch in order: an attempt counts for the first message.
            is_behind = progress.ordered is not None and count > 0
            # A reset has voided the delivery, or an ack of this round has settled the message.
            with suppress(InvalidReceiptHandle):
                self._settlement.change_invisible(
                    delivery,
                    invisible_duration_ms=0,
                    suspend=is_behind,
                    now_ms=now_ms,
                    by_operator=True,
                )
                self._state.count("given_back_revoked", progress, 1)
                count += 1
        return count
