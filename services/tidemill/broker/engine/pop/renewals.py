"""Renewal: what push consumers hold is extended while they live, and given back when they do not.

Decided at the deadline, since most of what is popped is acked before it. Extended is by a ladder,
and which step it is follows from how long the delivery has been out. Proxies say who lives; a
client that holds nothing is not kept in mind. Of a client that has ended, or that was not heard for
`SILENT_MS`, all that renews is given back: it is found by a look through the table, in slices, for
all such clients at once.

Of all this the records say what becomes of deliveries, and nothing else: after a start every client
counts as heard just then.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final, NamedTuple, final

import numpy as np

from tidemill.broker.engine.layout.entry import Recorder
from tidemill.broker.engine.layout.pop_checkpoint import FLAG_RENEWS, cut_client_id
from tidemill.broker.engine.layout.renewal import ENTRIES_MAX, Renewal, Why
from tidemill.broker.engine.pop.delivery_table import FLAG_DUE, FREE
from tidemill.broker.engine.pop.holders import NOBODY, UNHEARD
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
GIVEN_BACK_A_TURN: Final = 128  # deliveries, under half a millisecond
_GONE: Final = -2  # as `heard_at_ms`: ended, or silent, and what it held was looked for


class _Leaver(NamedTuple):
    """A client whose deliveries are to be given back."""

    client_id: str
    why: Why
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
                if leaver is not None and leaver.why is Why.CLIENT_SILENT:
                    del leavers[number]

    def ended(self, client_ids: Iterable[str], *, log_end: int) -> None:
        """Give back what clients hold that have ended; nothing popped so far is at `log_end`."""
        clients = self._state.table.clients
        for client_id in map(cut_client_id, client_ids):
            number = clients.find(client_id)
            if number != NOBODY:
                clients.heard_at_ms[number] = _GONE
                self._leaving[number] = _Leaver(client_id, Why.CLIENT_ENDED, log_end)

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
            leaver = _Leaver(clients.client_ids[number], Why.CLIENT_SILENT, log_end)
            self._leaving.setdefault(number, leaver)

    def _is_alive(self, number: int) -> bool:
        heard_at_ms = self._state.table.clients.heard_at_ms[number]
        return heard_at_ms == UNHEARD or heard_at_ms > self._now_ms - SILENT_MS

    # ------------------------------------------------------------ what nobody may have

    def withhold(self, deliveries: Iterable[tuple[int, int]], now_ms: int) -> None:
        """Let deliveries (slot, delivery id) run out that perhaps nobody has got.

        Their client lives, so they would be extended for hours.
        """
        table = self._state.table
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}  # by client and deadline
        for slot, delivery_id in deliveries:
            renews = table.flags[slot] & FLAG_RENEWS and table.live[slot]
            if table.ids[slot] == delivery_id and renews:
                key = table.holders[slot], table.visible_at_ms[slot]
                found.setdefault(key, []).append((slot, delivery_id))
        for (number, until_ms), entries in found.items():
            client_id = table.clients.client_ids[number]
            for begin in range(0, len(entries), ENTRIES_MAX):
                part = entries[begin : begin + ENTRIES_MAX]
                self._recorder.append(
                    Renewal(until_ms, Why.NOT_HANDED_OVER, client_id, part), now_ms
                )

    def withhold_behind(self, log_offset: int, now_ms: int) -> None:
        """Do so with all that was popped behind `log_offset`: a start, with the end of the log."""
        table = self._state.table
        is_behind = np.frombuffer(table.ids, dtype=np.int64) >= log_offset
        slots = np.flatnonzero(is_behind).tolist()
        self.withhold([(slot, table.ids[slot]) for slot in slots], now_ms)

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
                continue
            entries = extended.setdefault((table.holders[slot], until_ms), [])
            entries.append((slot, table.ids[slot]))
            state.count("extended", state.owners[table.owners[slot]], 1)
        for (number, until_ms), entries in extended.items():
            client_id = table.clients.client_ids[number]
            self._recorder.append(Renewal(until_ms, Why.EXTENDED, client_id, entries), now_ms)
        return run_out

    def _extended_until(self, slot: int, now_ms: int) -> int:
        """Return when a delivery runs out next; not later than now: it has."""
        table = self._state.table
        if not self._is_alive(table.holders[slot]):
            return 0
        popped_at_ms = table.popped_at_ms[slot]
        step_ms = step_of(table.visible_at_ms[slot] - popped_at_ms)
        return min(now_ms + step_ms, popped_at_ms + HELD_MAX_MS)

    # ------------------------------------------------------------ giving back

    def give_back_some(self, now_ms: int) -> None:
        """Give back a part of what clients held that do not live any more."""
        if not self._pass:
            self._begin_pass()
            if not self._pass:
                return
        state, table = self._state, self._state.table
        found: dict[int, list[tuple[int, int]]] = {}  # by number
        for slot in self._take_held():
            number, delivery_id = table.holders[slot], table.ids[slot]
            leaver, progress = self._pass[number], state.owners[table.owners[slot]]
            # The number may be another client's by now.
            if leaver.client_id != table.client_id_of(slot) or delivery_id >= leaver.before:
                continue
            if state.is_void(progress, delivery_id):
                continue
            found.setdefault(number, []).append((slot, delivery_id))
            is_ended = leaver.why is Why.CLIENT_ENDED
            what = "given_back_ended" if is_ended else "given_back_silent"
            state.count(what, progress, table.live[slot].bit_count())
        for number, entries in found.items():
            client_id, why, _ = self._pass[number]
            until_ms = now_ms if why is Why.CLIENT_ENDED else now_ms + SILENT_GRACE_MS
            self._recorder.append(Renewal(until_ms, why, client_id, entries), now_ms)
        if self._passed_to >= len(table.ids):
            self._pass = {}

    def _begin_pass(self) -> None:
        numbers = list(islice(self._leaving, CLIENTS_A_PASS))
        self._pass = {number: self._leaving.pop(number) for number in numbers}
        self._passed_to = 0

    def _take_held(self) -> list[int]:
        """Return the next slots of deliveries that renew and are held by those of the pass."""
        table = self._state.table
        begin, end = self._passed_to, min(self._passed_to + SLOTS_A_LOOK, len(table.ids))
        is_leaver = np.zeros(len(table.clients.client_ids), dtype=bool)
        is_leaver[list(self._pass)] = True
        flags = np.frombuffer(table.flags, dtype=np.uint8)[begin:end]
        # What is due already is revive's.
        is_held = (flags & (FLAG_RENEWS | FLAG_DUE)) == FLAG_RENEWS
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
