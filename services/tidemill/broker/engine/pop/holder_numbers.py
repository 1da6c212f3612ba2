"""Which client holds a delivery: a number in the delivery table, and the client's id by number.

Numbers of clients that hold nothing any more are given out again: each new client has a look at
some of the others, so there are hardly more than hold something. Each engine has numbers of its
own: records say ids. Beside each number stands when its client was heard last, which no record
says: that is for `renewals`, by its own clock.

While the state catches up with a snapshot the counts mean nothing, since slots are taken over many
at once: the table makes them at its end, and once in a while before.
"""

from __future__ import annotations

from array import array
from typing import final

import numpy as np

NOBODY = 0  # the number of no client, whose id is ""
UNHEARD = -1  # as `heard_at_ms`: not heard since the number was given out
LOOKED_AT = 8  # numbers, when a new one is wanted: more than are needed to find one on average
UNCOUNTED_MAX = 65_536  # ids known before it is looked which of them are in use; 10 MiB


@final
class HolderNumbers:
    """The clients that hold deliveries."""

    def __init__(self) -> None:
        self.client_ids = [""]  # by number
        self.numbers = {"": NOBODY}
        # Of slots, by number. Whoever fills or empties a slot counts: every pop and ack does.
        self.counts = array("q", [0])
        self.heard_at_ms = array("q", [UNHEARD])  # monotonic, by number
        self.is_counting = True
        self._free = array("I")
        self._hand = NOBODY  # the number that was looked at last
        self._uncounted_max = UNCOUNTED_MAX

    def __len__(self) -> int:
        return len(self.numbers) - 1

    def find(self, client_id: str) -> int:
        """Return the number of a client, NOBODY where it holds nothing."""
        return self.numbers.get(client_id, NOBODY)

    @property
    def has_too_many(self) -> bool:
        """Whether it is time to count, while nothing is."""
        return not self.is_counting and len(self.numbers) > self._uncounted_max

    def number_of(self, client_id: str) -> int:
        """Return the number of a client, given out when it is new."""
        number = self.numbers.get(client_id)
        if number is not None:
            return number
        if self.is_counting:
            for _ in range(LOOKED_AT):
                self._look_at_next()
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

    def _look_at_next(self) -> None:
        """Forget the next client if it holds nothing."""
        self._hand = (self._hand + 1) % len(self.client_ids)
        if self.counts[self._hand] <= 0 and self.client_ids[self._hand]:
            self._forget(self._hand)

    def _forget(self, number: int) -> None:
        del self.numbers[self.client_ids[number]]
        self.client_ids[number] = ""
        self._free.append(number)

    def recount(self, numbers: np.ndarray) -> None:
        """Know of each slot in use who holds it, and forget who holds nothing."""
        counts = np.bincount(numbers, minlength=len(self.client_ids))
        self.counts = array("q", counts.astype(np.int64).tobytes())
        for number in np.flatnonzero(counts == 0).tolist():
            if self.client_ids[number]:
                self._forget(number)
        self._uncounted_max = max(UNCOUNTED_MAX, 2 * len(self.numbers))
