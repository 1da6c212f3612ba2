"""The open streams of clients. Changes of users and bans cause another check of their rights.

So does the end of their credentials.

A waiting poll would otherwise keep the rights of its begin for seconds, and a telemetry stream for
hours.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, final

from tidemill.common.change_checks import ChangeChecks
from tidemill.proxy.server.gated_call import StreamWatch

if TYPE_CHECKING:
    from tidemill.proxy.server.gated_call import GatedCall

# Streams that are checked in one turn of the loop. One with 4,096 topics alone takes a few
# milliseconds, as at its begin.
WATCHED_A_TURN: Final = 64


@final
class StreamWatches:
    """The open streams of the process."""

    def __init__(
        self, check: Callable[[StreamWatch], None], valid_ms: Callable[[GatedCall], int | None]
    ) -> None:
        """`check` ends a stream that has lost its rights.

        `valid_ms` returns the time until the credential of a call ends; None if it does not.
        """
        self._check = check
        self._valid_ms = valid_ms
        self._watches: dict[StreamWatch, None] = {}
        self._checks = ChangeChecks(self._watches, self._check_now, a_turn=WATCHED_A_TURN)

    async def watched(self, call: GatedCall, answering: Awaitable[None]) -> None:
        """Await the answer to a stream; `check` may end it. Raises the error of the end."""
        task = asyncio.current_task()
        assert task is not None, "a method runs in a task"
        watch = call.watch = StreamWatch(call, task)
        self._watches[watch] = None
        self._check_at_end(watch)
        try:
            await answering
        except asyncio.CancelledError:
            if not watch.is_over or task.uncancel():
                raise  # The client has cancelled it, too.
            if watch.error is not None:
                raise watch.error from None
        finally:
            del self._watches[watch]
            call.watch = None
            if watch.end_check is not None:
                watch.end_check.cancel()

    def of_client(self, client_id: str, owner: int | None) -> list[StreamWatch]:
        """Return the open streams of a client; with an owner, only those of this user."""
        return [
            watch
            for watch in self._watches
            if watch.call.client_id == client_id
            and owner in {None, watch.call.client.owner}
            and not watch.is_over
        ]

    def check_soon(self) -> None:
        """Check all streams after a change, some in each turn of the event loop."""
        self._checks.check_soon()

    def _check_now(self, watch: StreamWatch) -> None:
        if watch in self._watches and not watch.is_over:
            self._check(watch)
            self._check_at_end(watch)

    def _check_at_end(self, watch: StreamWatch) -> None:
        """Check a stream again when its credential ends, which is no change of an item."""
        if watch.end_check is not None:
            watch.end_check.cancel()
            watch.end_check = None
        valid_ms = self._valid_ms(watch.call)
        if valid_ms is not None and not watch.is_over:
            loop = asyncio.get_running_loop()
            watch.end_check = loop.call_later((valid_ms + 1) / 1_000, self._check_now, watch)
