"""The hold of new rounds at a master during a transfer, or while it cannot confirm anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidemill.broker.engine.commands import Commands
    from tidemill.broker.engine.replication.master import Master

# As long as a killed replica takes to come back. Clients wait for three seconds or more.
SHORT_HOLD_MS: Final = 2_000

log = structlog.get_logger()


@final
class RoundHold:
    """Whether rounds are held.

    They are held during a transfer, because the target must get the whole log. They are also held
    for SHORT_HOLD_MS while nothing can be confirmed, because returning replicas or the controllers
    end that state. After that time the engine rejects messages. Held requests wait, and links
    repeat them at another replica.
    """

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        # Called with the reason when messages are rejected from now on; "" ends that.
        self.on_rejection: Callable[[str], None] = lambda _why: None
        self._unconfirmed_since_ms: int | None = None
        self._was_held = False

    def update(self, master: Master | None, now_ms: int) -> bool:
        """Return whether no round may begin now; let the engine reject messages after the hold."""
        is_moving = master is not None and not master.accepts_sends
        is_unconfirmed_held = False
        if not (why := _why_unconfirmed(master)):
            self._unconfirmed_since_ms = None
        else:
            if self._unconfirmed_since_ms is None:
                self._unconfirmed_since_ms = now_ms
            is_unconfirmed_held = now_ms - self._unconfirmed_since_ms < SHORT_HOLD_MS
        self._reject_sends("" if is_unconfirmed_held else why)
        is_held = is_moving or is_unconfirmed_held
        self._was_held |= is_held
        return is_held

    def take_end(self, master: Master | None, now_ms: int) -> bool:
        """Return True once after a hold has ended."""
        if self.update(master, now_ms) or not self._was_held:
            return False
        self._was_held = False
        return True

    def _reject_sends(self, why: str) -> None:
        if why == self._commands.why_unconfirmed:
            return
        self._commands.why_unconfirmed = why
        self.on_rejection(why)
        if why:
            log.warning("messages are rejected, because none can be confirmed", reason=why)
        else:
            log.info("messages are accepted again")


def _why_unconfirmed(master: Master | None) -> str:
    """Return why this master can confirm nothing; empty if it can, or is no master."""
    if master is None:
        return ""
    if master.sync_state.is_short:
        return "too few replicas are in sync"
    if master.sync_state.is_doubtful:
        return "its master stood still, and no controller has confirmed yet that it is the master"
    return ""
