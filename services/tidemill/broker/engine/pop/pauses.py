"""The ends of the pauses of consumer groups: parked polls are then tried again.

A pop compares times by itself, so a pause ends in time also if the home of the cluster is down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from tidemill.broker.engine.metadata.catalog import Catalog
    from tidemill.broker.engine.pop.state import PopState


@final
class GroupPauses:
    """The pauses that have not ended."""

    def __init__(self, catalog: Catalog, state: PopState) -> None:
        self._pauses = catalog.pauses
        self._state = state

    def next_due_ms(self) -> int | None:
        """Return the wall time of the next end; None without a pause."""
        return min(self._pauses.values(), default=None)

    def end_due(self, now_ms: int) -> None:
        """Wake the polls of groups at the ends of their pauses."""
        ended = {group_id for group_id, until_ms in self._pauses.items() if until_ms <= now_ms}
        for group_id in ended:
            del self._pauses[group_id]
        if ended:
            # Each key with a parked poll has a subscription.
            self._state.ready.update([key for key in self._state.subscriptions if key[0] in ended])
