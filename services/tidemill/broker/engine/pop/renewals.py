"""Renewal: what push consumers hold is extended while they live, and given back when they do not.

Decided at the deadline, since most of what is popped is acked before it. Extended is by a ladder,
and which step it is follows from how long the delivery has been out. Proxies say who lives; a
client that holds nothing is not kept in mind. Of a client that has ended, or that was not heard for
`SILENT_MS`, all that renews is given back: it is found by a look through the table, in slices, for
all such clients at once.

Of all this the records say what becomes of deliveries, and nothing else: after a start every client
counts as heard just then. Extended is only what was handed over, of which proxies tell: an answer
that was lost with its connection would be extended for hours, since its client lives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final, NamedTuple, final

import numpy as np

from tidemill.broker.engine.layout.entry import Recorder
from tidemill.broker.engine.layout.pop_checkpoint import FLAG_RELEASED, FLAG_RENEWS, cut_client_id
from tidemill.broker.engine.layout.renewal import ENTRIES_MAX, Renewal, RenewalReason
from tidemill.broker.engine.pop.deadlines import FLAG_DUE
from tidemill.broker.engine.pop.delivery_table import FREE, HANDOVER_PENDING, UNPROVEN
from tidemill.broker.engine.pop.holder_numbers import NOBODY, UNHEARD
from tidemill.broker.engine.pop.state import PopState
from tidemill.broker.engine.tally import Tally

MINUTE_MS: Final = 60_000
# By which a delivery is extended that has been out for less than so long; the reference's steps.
LADDER_MS: Final = (
    (2 * MINUTE_MS, 1 * MINUTE_MS),
    (5 * MINUTE_MS, 3 * MINUTE_MS),
    (10 * MINUTE_MS, 5 * MINUTE_MS),
    (20 * MINUTE_MS, 10 * MINUTE_MS),
    (50 * MINUTE_MS, 30 * MINUTE_MS),
)
LAST_STEP_MS: Final = 60 * MINUTE_MS
HELD_MAX_MS: Final = 3 * 60 * MINUTE_MS  # from the pop on: work that takes longer hangs
SILENT_MS: Final = 120_000  # proxies report a client every 10 s; clients speak every 10 s, some 30
SILENT_GRACE_MS: Final = 1_000  # until what a silent client held is visible; the reference's
LOOK_PERIOD_MS: Final = 1_000  # between two looks at who has fallen silent
CLIENTS_A_LOOK: Final = 1_024  # that are found to be silent, under half a millisecond
CLIENTS_A_PASS: Final = 4_096  # whose deliveries are looked for together; more wait for the next
SLOTS_A_LOOK: Final = 65_536  # of the table, in one slice: under 300 microseconds
# After a start, for what it cannot know to have been handed over: a renewal's time, and that for
# proxies to come back and to tell.
START_GRACE_MS: Final = MINUTE_MS + 15_000
UNPROVEN_A_COMMIT: Final = 65_536  # deliveries: under a MiB of records
GIVEN_BACK_A_TURN: Final = 128  # deliveries, under half a millisecond
_GONE: Final = -2  # as `heard_at_ms`: ended, or silent, and what it held was looked for


class _Leaver(NamedTuple):
    """A client whose deliveries are to be given back."""

    client_id: str
    why: RenewalReason
    before: int  # deliveries of this identity or a later one were popped since


@final
class Renewals:
    """Who lives, and what that means for deliveries that renew."""

    def __init__(self, state: PopState, recorder: Recorder, tally: Tally) -> None:
        self._state = state
        self._recorder = recorder
        self._tally = tally
        self._now_ms = 0  # monotonic, at the last look
        self._look_at_ms = 0  # monotonic
        # By number. Bounded by the numbers that are in use.
        self._leaving: dict[int, _Leaver] = {}
        # Of those the ones that are looked for, and how far in the table.
        self._pass: dict[int, _Leaver] = {}
        self._passed_to = 0

    # ------------------------------------------------------------ who lives

    def alive(self, client_ids: Iterable[str], *, monotonic_ms: int) -> None:
        """Note that clients have given signs of life; who holds nothing is not kept."""
        clients = self._state.table.clients
        for client_id in client_ids:
            number = clients.find(cut_client_id(client_id))
            if number == NOBODY:
                continue
            clients.heard_at_ms[number] = monotonic_ms
            for leavers in (self._leaving, self._pass):
                leaver = leavers.get(number)
                if leaver is not None and leaver.why is RenewalReason.CLIENT_SILENT:
                    del leavers[number]

    def ended(self, client_ids: Iterable[str], *, log_end: int) -> None:
        """Give back what clients hold that have ended; nothing popped so far is at `log_end`."""
        clients = self._state.table.clients
        for client_id in map(cut_client_id, client_ids):
            number = clients.find(client_id)
            if number != NOBODY:
                clients.heard_at_ms[number] = _GONE
                self._leaving[number] = _Leaver(client_id, RenewalReason.CLIENT_ENDED, log_end)

    def next_look_ms(self) -> int | None:
        """Return in how many ms from the last look on there is something to do; None: never."""
        if self._leaving or self._pass:
            return 0
        if not len(self._state.table.clients):
            return None
        return max(self._look_at_ms - self._now_ms, 0)

    def look(self, *, monotonic_ms: int, log_end: int) -> None:
        """Find out who has fallen silent, once a period."""
        self._now_ms = monotonic_ms
        clients = self._state.table.clients
        if monotonic_ms < self._look_at_ms or not len(clients):
            return
        self._look_at_ms = monotonic_ms + LOOK_PERIOD_MS
        heard = np.frombuffer(clients.heard_at_ms, dtype=np.int64)
        heard[heard == UNHEARD] = monotonic_ms
        is_silent = (heard >= 0) & (heard <= monotonic_ms - SILENT_MS)
        is_silent &= np.frombuffer(clients.counts, dtype=np.int64) > 0
        is_silent[NOBODY] = False
        silent = np.flatnonzero(is_silent).tolist()
        if len(silent) > CLIENTS_A_LOOK:
            self._look_at_ms = monotonic_ms  # And the others in the next turn.
        for number in silent[:CLIENTS_A_LOOK]:
            clients.heard_at_ms[number] = _GONE
            leaver = _Leaver(clients.client_ids[number], RenewalReason.CLIENT_SILENT, log_end)
            self._leaving.setdefault(number, leaver)

    def _is_alive(self, number: int) -> bool:
        heard_at_ms = self._state.table.clients.heard_at_ms[number]
        if heard_at_ms == _GONE:
            # Also while the machine has run for less than SILENT_MS: by time it would be alive.
            return False
        return heard_at_ms == UNHEARD or heard_at_ms > self._now_ms - SILENT_MS

    # ------------------------------------------------------------ what nobody may have

    def handed_over(self, deliveries: Iterable[tuple[int, int]], now_ms: int) -> None:
        """Know of deliveries (slot, delivery id) that their clients have them.

        Of one that renews no more, since a start did not know that, it is recorded; and of no
        other, whatever a proxy names. Whether its client lives still is seen at its deadline.
        """
        table = self._state.table
        again: list[tuple[int, int]] = []
        for slot, delivery_id in deliveries:
            if slot >= len(table.ids) or table.ids[slot] != delivery_id or not table.live[slot]:
                continue
            table.handover[slot] &= ~HANDOVER_PENDING
            is_over = table.visible_at_ms[slot] <= now_ms or table.flags[slot] & FLAG_DUE
            is_over = is_over or self._is_void(slot)
            is_unproven = table.handover[slot] & UNPROVEN
            if is_unproven and not (is_over or table.flags[slot] & (FLAG_RENEWS | FLAG_RELEASED)):
                again.append((slot, delivery_id))
        self._record(again, None, RenewalReason.HANDED_OVER, now_ms)

    def begin(self, now_ms: int) -> Iterator[None]:
        """Renew nothing at a start of which the log does not say that its client has it.

        What was extended once was handed over; of the rest proxies tell again, within the minute
        that all of it is given. Yields between records that may be committed by themselves.
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
        """Whether a delivery that is still in the table was voided by a reset or a deletion."""
        table = self._state.table
        return self._state.is_void(self._state.owners[table.owners[slot]], table.ids[slot])

    def _record(
        self,
        deliveries: Iterable[tuple[int, int]],
        until_ms: int | None,
        why: RenewalReason,
        now_ms: int,
    ) -> None:
        """Record what becomes of deliveries; where no `until_ms` is given each keeps its time."""
        table = self._state.table
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}  # by client and deadline
        for slot, delivery_id in deliveries:
            at_ms = table.visible_at_ms[slot] if until_ms is None else until_ms
            found.setdefault((table.holders[slot], at_ms), []).append((slot, delivery_id))
        for (number, at_ms), entries in found.items():
            client_id = table.clients.client_ids[number]
            for begin in range(0, len(entries), ENTRIES_MAX):
                part = entries[begin : begin + ENTRIES_MAX]
                self._recorder.append(Renewal(at_ms, why, client_id, part), now_ms)

    # ------------------------------------------------------------ deadlines

    def extend(self, slots: list[int], now_ms: int) -> list[int]:
        """Extend deliveries whose deadline has come; return those that have run out."""
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
            client_id = table.clients.client_ids[number]
            self._recorder.append(
                Renewal(until_ms, RenewalReason.EXTENDED, client_id, entries), now_ms
            )
        return run_out

    def _count_unread(self, slot: int) -> None:
        table = self._state.table
        if table.flags[slot] & FLAG_RENEWS and self._is_on_its_way(slot):
            progress = self._state.owners[table.owners[slot]]
            self._state.count("given_back_unread", progress, table.live[slot].bit_count())

    def _extended_until(self, slot: int, now_ms: int) -> int:
        """Return when a delivery runs out next; not later than now: it has."""
        table = self._state.table
        if not self._is_alive(table.holders[slot]) or self._is_on_its_way(slot):
            return 0
        popped_at_ms = table.popped_at_ms[slot]
        step_ms = step_of(table.visible_at_ms[slot] - popped_at_ms)
        return min(now_ms + step_ms, popped_at_ms + HELD_MAX_MS)

    def _is_on_its_way(self, slot: int) -> bool:
        """Whether perhaps nobody has a delivery.

        That a part of it is settled proves nothing: proxies give parts back, operators release
        them, and a pop itself dead-letters some. What its client says of a part does.
        """
        return bool(self._state.table.handover[slot] & HANDOVER_PENDING)

    # ------------------------------------------------------------ giving back

    def give_back_some(self, now_ms: int, *, expiry_ms: int) -> None:
        """Give back a part of what clients held that do not live any more, of what is not due."""
        if not self._pass:
            self._begin_pass()
            if not self._pass:
                return
        state, table = self._state, self._state.table
        found: dict[int, list[tuple[int, int]]] = {}  # by number
        for slot in self._take_held(expiry_ms):
            number, delivery_id = table.holders[slot], table.ids[slot]
            leaver, progress = self._pass[number], state.owners[table.owners[slot]]
            # The number may be another client's by now.
            if leaver.client_id != table.client_id_of(slot) or delivery_id >= leaver.before:
                continue
            if self._is_void(slot):
                continue
            found.setdefault(number, []).append((slot, delivery_id))
            is_ended = leaver.why is RenewalReason.CLIENT_ENDED
            what = "given_back_ended" if is_ended else "given_back_silent"
            state.count(what, progress, table.live[slot].bit_count())
        for number, entries in found.items():
            client_id, why, _ = self._pass[number]
            until_ms = now_ms if why is RenewalReason.CLIENT_ENDED else now_ms + SILENT_GRACE_MS
            self._recorder.append(Renewal(until_ms, why, client_id, entries), now_ms)
        if self._passed_to >= len(table.ids):
            self._pass = {}

    def _begin_pass(self) -> None:
        numbers = list(islice(self._leaving, CLIENTS_A_PASS))
        self._pass = {number: self._leaving.pop(number) for number in numbers}
        self._passed_to = 0

    def _take_held(self, expiry_ms: int) -> list[int]:
        """Return the next slots that those of the pass hold and that renew.

        Or that did before a start, which did not know whether they had been handed over.
        """
        table = self._state.table
        begin, end = self._passed_to, min(self._passed_to + SLOTS_A_LOOK, len(table.ids))
        is_leaver = np.zeros(len(table.clients.client_ids), dtype=bool)
        is_leaver[list(self._pass)] = True
        flags = np.frombuffer(table.flags, dtype=np.uint8)[begin:end]
        is_held = flags & FLAG_RENEWS > 0
        is_held |= np.frombuffer(table.handover, dtype=np.uint8)[begin:end] & UNPROVEN > 0
        # What is due already is revive's: to give it back would make it later.
        is_held &= flags & FLAG_DUE == 0
        is_held &= np.frombuffer(table.visible_at_ms, dtype=np.int64)[begin:end] > expiry_ms
        is_held &= is_leaver[np.frombuffer(table.holders, dtype=np.uint32)[begin:end]]
        is_held &= np.frombuffer(table.ids, dtype=np.int64)[begin:end] != FREE
        is_held &= np.frombuffer(table.live, dtype=np.uint32)[begin:end] != 0
        slots: list[int] = (np.flatnonzero(is_held) + begin).tolist()
        self._passed_to = end
        if len(slots) > GIVEN_BACK_A_TURN:
            self._passed_to = slots[GIVEN_BACK_A_TURN]
            del slots[GIVEN_BACK_A_TURN:]
        self._tally.add(len(slots))
        return slots


def step_of(held_ms: int) -> int:
    """Return by how much a delivery is extended that has been out for so long."""
    for below_ms, step_ms in LADDER_MS:
        if held_ms < below_ms:
            return step_ms
    return LAST_STEP_MS
