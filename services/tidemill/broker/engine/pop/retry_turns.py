"""When a pop reads a retry queue before the queue of its topic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.broker.engine.layout.block_file import BlockFileDamaged

if TYPE_CHECKING:
    from tidemill.broker.engine.message_store import MessageStore
    from tidemill.broker.engine.pop.progress import PopProgress

RETRY_SHARE = 5  # every fifth pop looks at the retry topic first, as in the reference (20 %)
RETRY_WAIT_MAX_MS = 1_000  # a retry message that has waited this long always goes first


def is_retry_first(store: MessageStore, turn: int, retry: PopProgress, now_ms: int) -> bool:
    """Return whether the pop of this turn reads a retry queue with messages first."""
    if turn % RETRY_SHARE == 0:
        return True
    return _waits_since(store, retry, now_ms) < now_ms - RETRY_WAIT_MAX_MS


def _waits_since(store: MessageStore, progress: PopProgress, now_ms: int) -> int:
    offset = progress.next_offset
    if offset == progress.queue.max_offset:
        return now_ms  # All messages have expired.
    try:
        return store.stored_at(progress.queue, offset)[1]
    except BlockFileDamaged:
        return now_ms
