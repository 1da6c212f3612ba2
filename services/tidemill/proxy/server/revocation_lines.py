"""The log lines of revoked clients, limited per second.

One change of a role may take a right from 100,000 clients at once. Brokers get a report of each of
them, and the log gets some lines and a count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, final

import structlog

if TYPE_CHECKING:
    from tidemill.message.client_key import ClientKey

LINES_PER_S_MAX: Final = 20  # of a proxy; further clients of the second are counted

log = structlog.get_logger()


@final
class RevocationLines:
    """Writes a line for each revoked client, up to the limit."""

    def __init__(self, monotonic_ms: Callable[[], int]) -> None:
        self._monotonic_ms = monotonic_ms
        self._second_ends_ms = 0
        self._line_count = 0  # of the current second
        self._suppressed_count = 0  # clients without a line, since the last line about them

    def note(self, client: ClientKey) -> None:
        """Write a line, or count the client."""
        now_ms = self._monotonic_ms()
        if now_ms >= self._second_ends_ms:
            self.tick()
            self._line_count, self._second_ends_ms = 0, now_ms + 1_000
        if self._line_count >= LINES_PER_S_MAX:
            self._suppressed_count += 1
            return
        self._line_count += 1
        log.info("client revoked", client_id=client.client_id, owner=client.owner)

    def tick(self) -> None:
        """Write the number of clients without a line after their second. Call it each second."""
        if self._suppressed_count and self._monotonic_ms() >= self._second_ends_ms:
            count, self._suppressed_count = self._suppressed_count, 0
            log.info("further clients revoked", count=count, lines_per_s_max=LINES_PER_S_MAX)
