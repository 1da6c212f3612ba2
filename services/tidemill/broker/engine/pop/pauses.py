"""The ends of the pauses of consumer groups: parked polls are then tried again.

A pop compares times by itself, so a pause ends in time also if the home of the cluster is down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from tidemill.broker.engine.metadata.catalog import RESUMED

if TYPE_CHECKING:
    from tidemill.broker.engine.layout.numbers import GroupId
    from tidemill.broker.engine.metadata.catalog import Catalog
    from tidemill.broker.engine.pop.state import PopState


@final
class GroupPauses:
    """The pauses that have not ended."""

    def __init__(self, catalog: Catalog, state: PopState) -> None:
        self._catalog = catalog
        self._state = state
        # Pauses stay after their end: the clock may be set back, which begins them again.
        self._woken: set[GroupId] = set()

    def next_due_ms(self) -> int | None:
        """Return the wall time of the next end; None without a pause."""
        ends = self._catalog.pauses.items()
        return min([until for group_id, until in ends if group_id not in self._woken], default=None)

    def end_due(self, now_ms: int) -> None:
        """Wake the polls of groups at the ends of their pauses."""
        pauses, ended = self._catalog.pauses, set()
        for group_id, until_ms in list(pauses.items()):
            if now_ms < until_ms:
                self._woken.discard(group_id)
            elif group_id not in self._woken or until_ms == RESUMED:
                ended.add(group_id)
                self._woken.add(group_id)
            if until_ms == RESUMED:
                del pauses[group_id]
                self._woken.discard(group_id)
        if ended:
            # Each key with a parked poll has a subscription.
            self._state.ready.update([key for key in self._state.subscriptions if key[0] in ended])
