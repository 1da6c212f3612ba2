"""Choosing messages from a queue: what is there, and what a filter lets through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

from tidemill.broker.engine.pop.messages import MessageStore
from tidemill.broker.engine.pop.progress import Progress
from tidemill.broker.engine.pop.state import PopState
from tidemill.common import stored_message

SCAN_ENTRIES_MAX = 4096  # queue entries one pop looks at for its filter: about a millisecond
SCAN_ENTRIES_AT_ONCE = 512  # read and then compared; most filters are satisfied by fewer


class Taken(NamedTuple):
    """Messages that a pop has chosen from a queue."""

    offsets: Sequence[int]
    log_offsets: Sequence[int]
    next_offset: int


@final
class Scan:
    """Looks through a queue for a group."""

    def __init__(self, state: PopState, store: MessageStore) -> None:
        self._state = state
        self._store = store

    def skip_expired(self, progress: Progress) -> None:
        """Go on behind what retention took, and count it."""
        missed = progress.queue.min_offset - progress.pop_offset
        if missed > 0:
            self._state.count("expired", progress, missed)
            progress.pop_offset = progress.queue.min_offset

    def take(
        self, progress: Progress, offset: int, want: int, tags: frozenset[str]
    ) -> Taken | None:
        """Choose up to `want` matching messages from `offset` on; None: there are none at all."""
        queue = progress.queue
        if offset >= queue.max_offset:
            return None
        if not tags:
            entries = queue.entries(offset, want)
            end = offset + len(entries)
            return Taken(range(offset, end), [entry[0] for entry in entries], end)
        hashes = {stored_message.tag_hash(tag) for tag in tags}
        offsets: list[int] = []
        log_offsets: list[int] = []
        scan_end = min(queue.max_offset, offset + SCAN_ENTRIES_MAX)
        while offset < scan_end and len(offsets) < want:
            for log_offset, _, tag_hash in queue.entries(
                offset, min(scan_end - offset, SCAN_ENTRIES_AT_ONCE)
            ):
                if tag_hash in hashes and self._store.tag(log_offset) in tags:
                    offsets.append(offset)
                    log_offsets.append(log_offset)
                elif progress.named_topic_id != progress.topic_id:
                    self._state.count("filtered_retry", progress, 1)
                offset += 1
                if len(offsets) == want:
                    break
        if offset < queue.max_offset and len(offsets) < want:
            # The rest is looked at in the next turn: others must not wait for a sparse filter.
            self._state.ready.add((progress.group_id, progress.named_topic_id))
        return Taken(offsets, log_offsets, offset)
