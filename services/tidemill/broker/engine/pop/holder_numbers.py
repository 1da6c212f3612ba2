"""Numbers of the clients that hold deliveries: the delivery table stores numbers instead of ids.

A number is used again after its client holds nothing. Each new client checks a few numbers, so that
there are few unused ones. Numbers are local to an engine: records contain client ids. Each number
also has the time of the client's last sign of life, for `renewals.py`. No record contains it.

While the state catches up with a snapshot, slots are loaded in bulk and the counts are wrong. The
table recounts at the end of the catch-up, and sometimes before.
"""

from __future__ import annotations

from array import array
from typing import final

import numpy as np

NOBODY = 0  # the number of the client id "": the holder is unknown
UNHEARD = -1  # as `heard_at_ms`: no sign of life since the number was assigned
CHECKED_PER_CLIENT = 8  # numbers that a new client checks: more than needed on average
UNCOUNTED_MAX = 65_536  # ids, 10 MiB: with more, unused ones are dropped during a catch-up


@final
class HolderNumbers:
    """The numbers of the clients that hold deliveries."""

    def __init__(self) -> None:
        self.client_ids = [""]  # by number
        self.numbers = {"": NOBODY}
        # Slots held, by number. The table updates them when it fills or empties a slot.
        self.counts = array("q", [0])
        self.heard_at_ms = array("q", [UNHEARD])  # monotonic, by number
        self.is_counting = True
        self._free = array("I")
        self._checked = NOBODY  # the last checked number
        self._uncounted_max = UNCOUNTED_MAX

    def __len__(self) -> int:
        return len(self.numbers) - 1

    def find(self, client_id: str) -> int:
        """Return the number of a client, NOBODY if it has none."""
        return self.numbers.get(client_id, NOBODY)

    @property
    def has_too_many(self) -> bool:
        """Whether a recount is due during a catch-up."""
        return not self.is_counting and len(self.numbers) > self._uncounted_max

    def number_of(self, client_id: str) -> int:
        """Return the number of a client. Assign one to a new client."""
        number = self.numbers.get(client_id)
        if number is not None:
            return number
        if self.is_counting:
            for _ in range(CHECKED_PER_CLIENT):
                self._check_next()
        if self._free:
            number = self._free.pop()
            self.client_ids[number] = client_id
            self.heard_at_ms[number] = UNHEARD
        else:
            number = len(self.client_ids)
            self.client_ids.append(client_id)
            self.heard_at_ms.append(UNHEARD)
            self.counts.append(0)
        self.numbers[client_id] = number
        return number

    def _check_next(self) -> None:
        """Release the next number if its client holds nothing."""
        self._checked = (self._checked + 1) % len(self.client_ids)
        if self.counts[self._checked] <= 0 and self.client_ids[self._checked]:
            self._forget(self._checked)

    def _forget(self, number: int) -> None:
        del self.numbers[self.client_ids[number]]
        self.client_ids[number] = ""
        self._free.append(number)

    def recount(self, numbers: np.ndarray) -> None:
        """Count the slots of each number. `numbers` has one for each slot in use."""
        counts = np.bincount(numbers, minlength=len(self.client_ids))
        self.counts = array("q", counts.astype(np.int64).tobytes())
        for number in np.flatnonzero(counts == 0).tolist():
            if self.client_ids[number]:
                self._forget(number)
        self._uncounted_max = max(UNCOUNTED_MAX, 2 * len(self.numbers))
