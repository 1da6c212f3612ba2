"""Renewal: deliveries of push consumers are extended while their client is alive.

The decision falls at the deadline, because most messages are acked before it. The extension follows
a ladder: its step depends on how long the delivery has been in flight. Proxies report signs of
life. When a client ends, or is silent for `SILENT_MS`, the broker gives its renewed deliveries
back. It finds them by a scan of the table, in slices, for all such clients at once.

Only handed-over deliveries are extended: their proxy has confirmed that the client has them.
Otherwise a reply that was lost with its connection would be extended for hours, because its client
is alive.

The records contain only the new deadlines. After a start every client counts as alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final, NamedTuple, final

import numpy as np

from tidemill.broker.engine.layout.entry import Recorder
from tidemill.broker.engine.layout.pop_checkpoint import FLAG_RELEASED, FLAG_RENEWS, cut_client
from tidemill.broker.engine.layout.renewal import ENTRIES_MAX, Renewal, RenewalReason
from tidemill.broker.engine.pop.deadlines import FLAG_DUE
from tidemill.broker.engine.pop.delivery_table import (
    FREE,
    HANDOVER_PENDING,
    HOLDERS_A_SCAN,
    UNPROVEN,
)
from tidemill.broker.engine.pop.holder_numbers import NOBODY, UNHEARD
from tidemill.broker.engine.pop.state import PopState
from tidemill.broker.engine.tally import Tally
from tidemill.message.client_key import ClientKey

MINUTE_MS: Final = 60_000
# (time in flight below, extension), the steps of RocketMQ.
LADDER_MS: Final = (
    (2 * MINUTE_MS, 1 * MINUTE_MS),
    (5 * MINUTE_MS, 3 * MINUTE_MS),
    (10 * MINUTE_MS, 5 * MINUTE_MS),
    (20 * MINUTE_MS, 10 * MINUTE_MS),
    (50 * MINUTE_MS, 30 * MINUTE_MS),
)
LAST_STEP_MS: Final = 60 * MINUTE_MS
HELD_MAX_MS: Final = 3 * 60 * MINUTE_MS  # after the pop; work that takes longer is stuck
# Proxies report each client every 10 s. Clients send a sign of life every 10 s, some every 30 s.
SILENT_MS: Final = 120_000
# A proxy reports a disconnected client ten seconds after the end of its last connection. A later
# sign of life came through another proxy. A pop without a report counts up to a second late.
HEARD_ELSEWHERE_MS: Final = 8_500
# From that report until the messages of a push consumer are visible: a minute after the end.
DISCONNECTED_GRACE_MS: Final = 50_000
SILENT_GRACE_MS: Final = 1_000  # until a silent client's messages are visible, as in RocketMQ
CHECK_PERIOD_MS: Final = 1_000  # between two checks for silent clients
CLIENTS_A_CHECK: Final = 1_024  # silent clients per check, under half a millisecond
# After a start, for deliveries without a confirmed handover: one renewal, and 15 s for proxies to
# connect again and confirm.
START_GRACE_MS: Final = MINUTE_MS + 15_000
UNPROVEN_A_COMMIT: Final = 65_536  # deliveries: under a MiB of records
GIVEN_BACK_A_TURN: Final = 128  # deliveries, under half a millisecond
_LOST: Final = -2  # as `heard_at_ms`: the client has ended or is silent


# From the scan until the messages of a lost client are visible.
_GRACE_MS: Final = {
    RenewalReason.CLIENT_ENDED: 0,
    RenewalReason.CLIENT_SILENT: SILENT_GRACE_MS,
    RenewalReason.DISCONNECTED: DISCONNECTED_GRACE_MS,
}


class _LostClient(NamedTuple):
    """A client that has ended, is silent or has no connection: its deliveries come back."""

    client: ClientKey
    why: RenewalReason
    before: int  # only deliveries with a lower id: later ones were popped since


@final
class Renewals:
    """The liveness of clients and the renewal of their deliveries."""

    def __init__(self, state: PopState, recorder: Recorder, tally: Tally) -> None:
        self._state = state
        self._recorder = recorder
        self._tally = tally
        self._now_ms = 0  # monotonic, at the last check
        self._check_at_ms = 0  # monotonic
        # By number, bounded by the numbers in use.
        self._lost: dict[int, _LostClient] = {}
        # The clients of the current scan, and its position in the table.
        self._searched: dict[int, _LostClient] = {}
        self._searched_until = 0

    # ------------------------------------------------------------ liveness

    def _numbers_of(self, clients: Iterable[ClientKey]) -> Iterator[int]:
        """Yield the numbers of clients. Clients that hold nothing have none."""
        find = self._state.table.clients.find
        for client in clients:
            yield from find(cut_client(client))

    def note_alive(self, alive: Iterable[ClientKey], *, monotonic_ms: int) -> None:
        """Record signs of life of clients."""
        clients = self._state.table.clients
        for number in self._numbers_of(alive):
            clients.heard_at_ms[number] = monotonic_ms
            for clients_lost in (self._lost, self._searched):
                lost = clients_lost.get(number)
                if lost is not None and lost.why is not RenewalReason.CLIENT_ENDED:
                    del clients_lost[number]

    def note_ended(self, ended: Iterable[ClientKey], *, log_end: int) -> None:
        """Give back the deliveries of ended clients. All deliveries must be below `log_end`."""
        for number in self._numbers_of(ended):
            self._lose(number, RenewalReason.CLIENT_ENDED, log_end)

    def _lose(self, number: int, why: RenewalReason, log_end: int) -> None:
        clients = self._state.table.clients
        clients.heard_at_ms[number] = _LOST
        self._lost[number] = _LostClient(clients.clients[number], why, log_end)

    def note_disconnected(
        self, disconnected: Iterable[ClientKey], *, monotonic_ms: int, log_end: int
    ) -> None:
        """Renew the deliveries of clients without a connection no more, until they are heard again.

        All deliveries must be below `log_end`.
        """
        clients = self._state.table.clients
        for number in self._numbers_of(disconnected):
            if number in self._lost:
                continue
            heard_at_ms = clients.heard_at_ms[number]
            if heard_at_ms >= 0 and monotonic_ms - heard_at_ms < HEARD_ELSEWHERE_MS:
                continue
            self._lose(number, RenewalReason.DISCONNECTED, log_end)

    def next_check_ms(self) -> int | None:
        """Return the ms from the last check until there is work, None for never."""
        if self._lost or self._searched:
            return 0
        if not len(self._state.table.clients):
            return None
        return max(self._check_at_ms - self._now_ms, 0)

    def find_silent(self, *, monotonic_ms: int, log_end: int) -> None:
        """Find silent clients, once per period."""
        self._now_ms = monotonic_ms
        clients = self._state.table.clients
        if monotonic_ms < self._check_at_ms or not len(clients):
            return
        self._check_at_ms = monotonic_ms + CHECK_PERIOD_MS
        heard = np.frombuffer(clients.heard_at_ms, dtype=np.int64)
        heard[heard == UNHEARD] = monotonic_ms
        is_silent = (heard >= 0) & (heard <= monotonic_ms - SILENT_MS)
        is_silent &= np.frombuffer(clients.counts, dtype=np.int64) > 0
        is_silent[NOBODY] = False
        silent = np.flatnonzero(is_silent).tolist()
        if len(silent) > CLIENTS_A_CHECK:
            self._check_at_ms = monotonic_ms  # The next turn finds the others.
        for number in silent[:CLIENTS_A_CHECK]:
            if number in self._lost:
                clients.heard_at_ms[number] = _LOST
            else:
                self._lose(number, RenewalReason.CLIENT_SILENT, log_end)

    def _is_alive(self, number: int) -> bool:
        heard_at_ms = self._state.table.clients.heard_at_ms[number]
        if heard_at_ms == _LOST:
            # A comparison of times is wrong while the machine has run for less than SILENT_MS.
            return False
        return heard_at_ms == UNHEARD or heard_at_ms > self._now_ms - SILENT_MS

    # ------------------------------------------------------------ handover

    def confirm_handovers(self, deliveries: Iterable[tuple[int, int]], now_ms: int) -> None:
        """Confirm that clients have deliveries, given as (slot, delivery id).

        If a start has suspended the renewal of a delivery, a record resumes it. Any other delivery
        needs no record. The liveness of the client is checked at the deadline.
        """
        table = self._state.table
        resumed: list[tuple[int, int]] = []
        for slot, delivery_id in deliveries:
            if slot >= len(table.ids) or table.ids[slot] != delivery_id or not table.live[slot]:
                continue
            table.handover[slot] &= ~HANDOVER_PENDING
            is_over = table.visible_at_ms[slot] <= now_ms or table.flags[slot] & FLAG_DUE
            is_over = is_over or self._is_void(slot)
            is_unproven = table.handover[slot] & UNPROVEN
            if is_unproven and not (is_over or table.flags[slot] & (FLAG_RENEWS | FLAG_RELEASED)):
                resumed.append((slot, delivery_id))
        self._record(resumed, None, RenewalReason.HANDED_OVER, now_ms)

    def suspend_unproven(self, now_ms: int) -> Iterator[None]:
        """Suspend at a start the renewal of deliveries without a confirmed handover in the log.

        A delivery that was extended once was handed over. For the others proxies confirm again
        within START_GRACE_MS. Yields between records. Each of them may be committed alone.
        """
        table = self._state.table
        ids = np.frombuffer(table.ids, dtype=np.int64)
        held_ms = np.frombuffer(table.visible_at_ms, dtype=np.int64) - np.frombuffer(
            table.popped_at_ms, dtype=np.int64
        )
        flags = np.frombuffer(table.flags, dtype=np.uint8)
        is_unproven = (ids != FREE) & (flags & FLAG_RENEWS > 0) & (held_ms <= MINUTE_MS)
        is_unproven &= np.frombuffer(table.live, dtype=np.uint32) > 0
        slots = np.flatnonzero(is_unproven)
        for first in range(0, len(slots), UNPROVEN_A_COMMIT):
            part = slots[first : first + UNPROVEN_A_COMMIT].tolist()
            deliveries = [(slot, table.ids[slot]) for slot in part if not self._is_void(slot)]
            self._record(deliveries, now_ms + START_GRACE_MS, RenewalReason.NOT_HANDED_OVER, now_ms)
            yield

    def _is_void(self, slot: int) -> bool:
        """Return whether a reset or a deletion has voided a delivery in the table."""
        table = self._state.table
        return self._state.is_void(self._state.owners[table.owners[slot]], table.ids[slot])

    def _record(
        self,
        deliveries: Iterable[tuple[int, int]],
        until_ms: int | None,
        why: RenewalReason,
        now_ms: int,
    ) -> None:
        """Record new deadlines of deliveries. Without `until_ms` each keeps its deadline."""
        table = self._state.table
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}  # by client and deadline
        for slot, delivery_id in deliveries:
            at_ms = table.visible_at_ms[slot] if until_ms is None else until_ms
            found.setdefault((table.holders[slot], at_ms), []).append((slot, delivery_id))
        for (number, at_ms), entries in found.items():
            client_id = table.clients.clients[number].client_id
            for begin in range(0, len(entries), ENTRIES_MAX):
                part = entries[begin : begin + ENTRIES_MAX]
                self._recorder.append(Renewal(at_ms, why, client_id, part), now_ms)

    # ------------------------------------------------------------ deadlines

    def extend(self, slots: list[int], now_ms: int) -> list[int]:
        """Extend deliveries at their deadline. Return the deliveries that have run out."""
        state, table = self._state, self._state.table
        run_out: list[int] = []
        extended: dict[tuple[int, int], list[tuple[int, int]]] = {}  # by client and deadline
        for slot in slots:
            until_ms = self._extended_until(slot, now_ms) if table.flags[slot] & FLAG_RENEWS else 0
            if until_ms <= now_ms:
                run_out.append(slot)
                self._count_unread(slot)
                continue
            entries = extended.setdefault((table.holders[slot], until_ms), [])
            entries.append((slot, table.ids[slot]))
            state.count("extended", state.owners[table.owners[slot]], 1)
        for (number, until_ms), entries in extended.items():
            client_id = table.clients.clients[number].client_id
            self._recorder.append(
                Renewal(until_ms, RenewalReason.EXTENDED, client_id, entries), now_ms
            )
        return run_out

    def _count_unread(self, slot: int) -> None:
        table = self._state.table
        if table.flags[slot] & FLAG_RENEWS and self._is_handover_pending(slot):
            progress = self._state.owners[table.owners[slot]]
            self._state.count("given_back_unread", progress, table.live[slot].bit_count())

    def _extended_until(self, slot: int, now_ms: int) -> int:
        """Return the extended deadline of a delivery. It has run out if this is not after now."""
        table = self._state.table
        if not self._is_alive(table.holders[slot]) or self._is_handover_pending(slot):
            return 0
        popped_at_ms = table.popped_at_ms[slot]
        step_ms = step_of(table.visible_at_ms[slot] - popped_at_ms)
        return min(now_ms + step_ms, popped_at_ms + HELD_MAX_MS)

    def _is_handover_pending(self, slot: int) -> bool:
        """Return whether it is unknown that the client has a delivery.

        A settled part proves nothing: proxies give parts back, operators release parts, and a pop
        dead-letters parts. A request of the client about a part proves it.
        """
        return bool(self._state.table.handover[slot] & HANDOVER_PENDING)

    # ------------------------------------------------------------ giving back

    def give_back_slice(self, now_ms: int, *, expiry_ms: int) -> None:
        """Give back one slice of the deliveries of lost clients, without those already due."""
        if not self._searched:
            self._begin_search()
            if not self._searched:
                return
        state, table = self._state, self._state.table
        found: dict[int, list[tuple[int, int]]] = {}  # by number
        for slot in self._take_held(expiry_ms):
            number, delivery_id = table.holders[slot], table.ids[slot]
            lost, progress = self._searched[number], state.owners[table.owners[slot]]
            # The number may belong to another client by now.
            if lost.client != table.client_of(slot) or delivery_id >= lost.before:
                continue
            if self._is_void(slot):
                continue
            if lost.why is RenewalReason.DISCONNECTED:
                if table.visible_at_ms[slot] > now_ms + DISCONNECTED_GRACE_MS:
                    found.setdefault(number, []).append((slot, delivery_id))
                continue
            found.setdefault(number, []).append((slot, delivery_id))
            is_ended = lost.why is RenewalReason.CLIENT_ENDED
            name = "given_back_ended" if is_ended else "given_back_silent"
            state.count(name, progress, table.live[slot].bit_count())
        for number, entries in found.items():
            client, why, _ = self._searched[number]
            until_ms = now_ms + _GRACE_MS[why]
            self._recorder.append(Renewal(until_ms, why, client.client_id, entries), now_ms)
        if self._searched_until >= len(table.ids):
            self._searched = {}

    def _begin_search(self) -> None:
        numbers = list(islice(self._lost, HOLDERS_A_SCAN))
        self._searched = {number: self._lost.pop(number) for number in numbers}
        self._searched_until = 0

    def _take_held(self, expiry_ms: int) -> list[int]:
        """Return the next slots of the scan: renewed deliveries of lost clients.

        This includes deliveries with a renewal that a start has suspended.
        """
        table = self._state.table
        held, self._searched_until = table.held_from(
            self._searched_until, self._searched, expiry_ms=expiry_ms
        )
        is_renewed = np.frombuffer(table.flags, dtype=np.uint8)[held] & FLAG_RENEWS > 0
        is_renewed |= np.frombuffer(table.handover, dtype=np.uint8)[held] & UNPROVEN > 0
        slots: list[int] = held[is_renewed].tolist()
        if len(slots) > GIVEN_BACK_A_TURN:
            self._searched_until = slots[GIVEN_BACK_A_TURN]
            del slots[GIVEN_BACK_A_TURN:]
        self._tally.add(len(slots))
        return slots


def step_of(held_ms: int) -> int:
    """Return the extension of a delivery that has been in flight for `held_ms`."""
    for below_ms, step_ms in LADDER_MS:
        if held_ms < below_ms:
            return step_ms
    return LAST_STEP_MS
