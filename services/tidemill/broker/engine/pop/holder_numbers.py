"""Numbers of the clients that hold deliveries: the delivery table stores numbers instead of keys.

A number is used again after its client holds nothing. Each new client checks a few numbers, so that
there are few unused ones. Numbers are local to an engine: records contain keys. Each number
also has the time of the client's last sign of life, for `renewals.py`. No record contains it.

While the state catches up with a snapshot, slots are loaded in bulk and the counts are wrong. The
table recounts at the end of the catch-up, and sometimes before.
"""

from __future__ import annotations

from array import array
from typing import final

import numpy as np
import numpy.typing as npt

from tidemill.message.client_key import NO_OWNER, UNKNOWN_CLIENT, ClientKey

NOBODY = 0  # the number of UNKNOWN_CLIENT
UNHEARD = -1  # as `heard_at_ms`: no sign of life since the number was assigned
CHECKED_PER_CLIENT = 8  # numbers that a new client checks: more than needed on average
UNCOUNTED_MAX = 65_536  # ids, 10 MiB: with more, unused ones are dropped during a catch-up


@final
class HolderNumbers:
    """The numbers of the clients that hold deliveries."""

    def __init__(self) -> None:
        self.clients = [UNKNOWN_CLIENT]  # by number
        self.numbers = {UNKNOWN_CLIENT: NOBODY}
        # Of the clients with an owner, by client id. Without users there are none.
        self._owners: dict[str, set[int]] = {}
        # Slots held, by number. The table updates them when it fills or empties a slot.
        self.counts = array("q", [0])
        self.heard_at_ms = array("q", [UNHEARD])  # monotonic, by number
        self.is_counting = True
        self._free = array("I")
        self._checked = NOBODY  # the last checked number
        self._uncounted_max = UNCOUNTED_MAX

    def __len__(self) -> int:
        return len(self.numbers) - 1

    def find(self, client: ClientKey) -> list[int]:
        """Return the numbers of a client: those of its id with its owner, and with no owner.

        Without an owner, return those of all owners.
        """
        client_id, owner = client
        owners = {owner, NO_OWNER}
        if owner == NO_OWNER:
            owners.update(self._owners.get(client_id, ()))
        numbers = [self.numbers.get(ClientKey(client_id, one), NOBODY) for one in sorted(owners)]
        return [number for number in numbers if number != NOBODY]

    def are_of(self, client: ClientKey, numbers: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
        """Return for each of `numbers` whether it is one of a client."""
        is_found = np.zeros(len(self.clients), dtype=bool)
        is_found[self.find(client)] = True
        return is_found[numbers]

    @property
    def has_too_many(self) -> bool:
        """Whether a recount is due during a catch-up."""
        return not self.is_counting and len(self.numbers) > self._uncounted_max

    def number_of(self, client: ClientKey) -> int:
        """Return the number of a client. Assign one to a new client."""
        number = self.numbers.get(client)
        if number is not None:
            return number
        if self.is_counting:
            for _ in range(CHECKED_PER_CLIENT):
                self._check_next()
        if self._free:
            number = self._free.pop()
            self.clients[number] = client
            self.heard_at_ms[number] = UNHEARD
        else:
            number = len(self.clients)
            self.clients.append(client)
            self.heard_at_ms.append(UNHEARD)
            self.counts.append(0)
        self.numbers[client] = number
        if client.owner != NO_OWNER:
            self._owners.setdefault(client.client_id, set()).add(client.owner)
        return number

    def _check_next(self) -> None:
        """Release the next number if its client holds nothing."""
        self._checked = (self._checked + 1) % len(self.clients)
        if self.counts[self._checked] <= 0 and self.clients[self._checked].client_id:
            self._forget(self._checked)

    def _forget(self, number: int) -> None:
        client_id, owner = client = self.clients[number]
        del self.numbers[client]
        if owner != NO_OWNER:
            owners = self._owners[client_id]
            owners.remove(owner)
            if not owners:
                del self._owners[client_id]
        self.clients[number] = UNKNOWN_CLIENT
        self._free.append(number)

    def recount(self, numbers: np.ndarray) -> None:
        """Count the slots of each number. `numbers` has one for each slot in use."""
        counts = np.bincount(numbers, minlength=len(self.clients))
        self.counts = array("q", counts.astype(np.int64).tobytes())
        for number in np.flatnonzero(counts == 0).tolist():
            if self.clients[number].client_id:
                self._forget(number)
        self._uncounted_max = max(UNCOUNTED_MAX, 2 * len(self.numbers))
