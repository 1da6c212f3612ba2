"""The hold of new rounds at a master during a transfer, or while replicas are missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from tidemill.broker.engine.commands import Commands
    from tidemill.broker.engine.replication.master import Master

# As long as a killed replica takes to come back. Clients wait for three seconds or more.
SHORT_HOLD_MS: Final = 2_000


@final
class RoundHold:
    """Whether rounds are held.

    They are held during a transfer, because the target must get the whole log. They are also held
    for SHORT_HOLD_MS while the sync state set is too small, because returning replicas end that
    state. After that time the engine rejects messages. Held requests wait, and links repeat them at
    another replica.
    """

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._short_since_ms: int | None = None
        self._was_held = False

    def update(self, master: Master | None, now_ms: int) -> bool:
        """Return whether no round may begin now; let the engine reject messages after the hold."""
        is_moving = master is not None and not master.accepts_sends
        is_short_held = False
        if master is None or not master.sync_state.is_short:
            self._short_since_ms = None
            self._commands.lacks_replicas = False
        else:
            if self._short_since_ms is None:
                self._short_since_ms = now_ms
            is_short_held = now_ms - self._short_since_ms < SHORT_HOLD_MS
            self._commands.lacks_replicas = not is_short_held
        is_held = is_moving or is_short_held
        self._was_held |= is_held
        return is_held

    def take_end(self, master: Master | None, now_ms: int) -> bool:
        """Return True once after a hold has ended."""
        if self.update(master, now_ms) or not self._was_held:
            return False
        self._was_held = False
        return True
