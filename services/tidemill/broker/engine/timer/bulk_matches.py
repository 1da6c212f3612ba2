"""Pending timers that match a filter, by ascending id, in slices; and their count for a dry run."""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple, final

import numpy as np

from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.numbers import LogOffset, TimerId, TopicId
from tidemill.broker.engine.layout.timer_entry import DTYPE, TimerEntryDamaged
from tidemill.broker.engine.sorted_search import is_among
from tidemill.broker.engine.tally import Allowance
from tidemill.broker.engine.time_search import TimeSearch
from tidemill.broker.engine.timer.body import BodyDamaged
from tidemill.broker.engine.timer.keyed import KeyedTimers
from tidemill.broker.engine.timer.status import REPLACED_QUEUE, SCHEDULE_QUEUE, DueRange, TimerState
from tidemill.broker.engine.timer.table import PAGE_ENTRIES
from tidemill.common.errors import Repairing
from tidemill.message import stored_message
from tidemill.message.resource_names import TIMER_TOPIC

if TYPE_CHECKING:
    from tidemill.broker.engine.layout.timer_entry import TimerEntry
    from tidemill.broker.engine.message_store import MessageStore
    from tidemill.broker.engine.metadata.catalog import Catalog
    from tidemill.broker.engine.store.consume_queue import ConsumeQueue
    from tidemill.broker.engine.tally import Tally
    from tidemill.broker.engine.timer.body import TimerBodies
    from tidemill.broker.engine.timer.due_change import TimerChange
    from tidemill.broker.engine.timer.index import TimerIndex

TABLE_PAGES_A_STEP: Final = 32  # 16,384 entries, about a millisecond
COUNTED_PAGES_A_STEP: Final = 8  # each timer that matches is sorted three times
BODIES_A_STEP: Final = 64
SAMPLE_MAX: Final = 10  # timers that a count shows
SECONDS_MAX: Final = 65_536  # due times that a count remembers, for its warning
HOUR_MS: Final = 3_600_000
NEVER_REPLACED: Final = 1 << 62


class TimerFilter(NamedTuple):
    """The pending timers that an operation changes. An empty text matches everything."""

    topic_id: int = 0  # 0: all topics
    key: str = ""
    tag: str = ""
    from_ms: int = 0
    to_ms: int = 0  # exclusive; 0: no end

    @property
    def reads_messages(self) -> bool:
        """Whether the table alone does not decide."""
        return bool(self.key or self.tag)


@dataclass(frozen=True, slots=True)
class TimerParts:
    """The parts of the engine that know the timers."""

    index: TimerIndex
    bodies: TimerBodies
    store: MessageStore
    catalog: Catalog
    tally: Tally


class FoundTimers(NamedTuple):
    """The timers of a slice."""

    ids: np.ndarray  # ascending
    rows: np.ndarray  # their entries
    position: int  # the ids before it need no other look
    # Timers with damaged messages: their keys and tags are unknown.
    damaged: frozenset[int] = frozenset()


_NONE: Final = np.zeros(0, DTYPE)
_NO_IDS: Final = np.zeros(0, np.int64)


def _replaced_queue(catalog: Catalog) -> ConsumeQueue | None:
    topic_id = catalog.topic_ids.get(TIMER_TOPIC)
    return None if topic_id is None else catalog.queues.get((topic_id, REPLACED_QUEUE))


@final
class TimerMatches:
    """The pending timers that match a filter, before an id."""

    def __init__(
        self,
        parts: TimerParts,
        wanted: TimerFilter,
        *,
        end: int,
        before: LogOffset | None = None,
        replaced_from: int = NEVER_REPLACED,
    ) -> None:
        """`before` is the log end when the timers were counted. Default: now."""
        self._parts = parts
        self._before = parts.store.log.log_end if before is None else before
        self._wanted = wanted
        # In the queue of replaced messages: the first one that was stored after the count.
        self.replaced_from = replaced_from
        self._due = DueRange(wanted.from_ms, wanted.to_ms)
        self.end = end
        self._keyed = self._begin_walk() if wanted.key else None
        self._keyed_ids: list[int] | None = None  # ascending; None: the walk has not ended
        self._collected: list[int] = []
        self._searched_page = 0  # the pages before it have no other timers of damaged messages

    def _begin_walk(self) -> KeyedTimers:
        parts = self._parts
        return KeyedTimers(
            parts.index, parts.store, parts.tally, self._wanted.key, before=self._before
        )

    @property
    def is_cut(self) -> bool:
        """Whether older timers with the key were not looked at."""
        return self._keyed is not None and self._keyed.is_cut

    def find(self, position: int, items_max: int, *, pages_max: int) -> FoundTimers:
        """Return timers from a position on, at most `items_max`, in a slice.

        The result may be empty while more remain: continue at its position. Raises Repairing while
        a file of the index is damaged: a retry begins the walk over the key again.
        """
        self._parts.index.link_gathered()
        limit = min(items_max, BODIES_A_STEP) if self._wanted.reads_messages else items_max
        if self._keyed is not None and self._keyed_ids is None:
            self._collect()
            return FoundTimers(_NO_IDS, _NONE, position)
        if self._keyed_ids is not None:
            found = self._find_keyed(position, limit)
        else:
            found = self._find_in_table(position, limit, pages_max)
        return self._checked(found) if self._wanted.reads_messages else found

    def _collect(self) -> None:
        assert self._keyed is not None, "the filter has a key"
        try:
            part = self._keyed.step()
        except Repairing:
            self._keyed, self._collected = self._begin_walk(), []
            raise
        if part is None:
            if not self._search_damaged(self._keyed.damaged):
                self._keyed_ids = sorted(set(self._collected))
        else:
            self._collected += [timer_id for timer_id, _ in part if timer_id < self.end]

    def _search_damaged(self, log_offsets: list[LogOffset]) -> bool:
        """Search the timers of damaged messages in a part of the table; return whether to go on."""
        if not log_offsets:
            return False
        index = self._parts.index
        wanted = np.array(sorted(log_offsets), np.int64)
        pages = index.table.live_page_numbers(index.counts.file_live, begin=self._searched_page)
        number = -1
        for number in islice(pages, TABLE_PAGES_A_STEP):
            page = index.table.rows(number)
            self._parts.tally.add(len(page))
            is_match = is_among(wanted, page["log_offset"]) & (page["state"] == TimerState.PENDING)
            ids = number * PAGE_ENTRIES + np.flatnonzero(is_match)
            self._collected += ids[ids < self.end].tolist()
        self._searched_page = number + 1
        return number >= 0

    def _find_keyed(self, position: int, limit: int) -> FoundTimers:
        assert self._keyed_ids is not None, "the walk has ended"
        first = bisect.bisect_left(self._keyed_ids, position)
        part = [one for one in self._keyed_ids[first : first + limit] if one < self.end]
        after = part[-1] + 1 if len(part) == limit else self.end
        entries = [(one, self._parts.index.find_pending(TimerId(one))) for one in part]
        pending = [(one, entry) for one, entry in entries if entry is not None]
        rows = np.zeros(len(pending), DTYPE)
        for at, (_, entry) in enumerate(pending):
            rows[at] = (*entry, 0)
        ids = np.array([one for one, _ in pending], np.int64)
        is_match = self._is_match(ids, rows)
        return FoundTimers(ids[is_match], rows[is_match], after)

    def _find_in_table(self, position: int, limit: int, pages_max: int) -> FoundTimers:
        index = self._parts.index
        ids, rows, count = [_NO_IDS], [_NONE], 0
        live = index.counts.file_live
        pages = index.table.live_page_numbers(live, begin=position // PAGE_ENTRIES)
        for looked, number in enumerate(pages):
            first = number * PAGE_ENTRIES
            if first >= self.end:
                break
            if looked == pages_max or count >= limit:
                return FoundTimers(np.concatenate(ids), np.concatenate(rows), first)
            page = index.table.rows(number)
            self._parts.tally.add(len(page))
            page_ids = first + np.arange(len(page), dtype=np.int64)
            is_match = self._is_match(page_ids, page) & (page_ids >= position)
            found = np.flatnonzero(is_match)
            if len(found) > limit - count:
                found = found[: limit - count]
                ids.append(page_ids[found])
                rows.append(page[found])
                position = int(page_ids[found[-1]]) + 1
                return FoundTimers(np.concatenate(ids), np.concatenate(rows), position)
            count += len(found)
            ids.append(page_ids[found])
            rows.append(page[found])
        return FoundTimers(np.concatenate(ids), np.concatenate(rows), self.end)

    def _is_match(self, ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
        is_match = self._due.find_pending(rows) & (ids < self.end)
        if self._wanted.topic_id:
            is_match &= rows["topic_id"] == self._wanted.topic_id
        self._exclude_replaced(rows, is_match)
        return is_match

    def _exclude_replaced(self, rows: np.ndarray, is_match: np.ndarray) -> None:
        """Exclude timers with a message that was replaced after the count. Raises Repairing."""
        queue = _replaced_queue(self._parts.catalog)
        if queue is None or self.replaced_from >= queue.max_offset:
            return
        try:
            first = queue.entry(max(self.replaced_from, queue.min_offset))[0]
            newer = is_match & (rows["log_offset"] >= first)
            for at in np.flatnonzero(newer).tolist():
                log_offset = int(rows["log_offset"][at])
                offset = queue.offset_behind(LogOffset(log_offset))
                if offset < queue.max_offset and queue.entry(offset)[0] == log_offset:
                    is_match[at] = False
        except BlockFileDamaged as error:
            raise Repairing from error

    def _checked(self, found: FoundTimers) -> FoundTimers:
        """Filter found timers by the key and the tag of their messages.

        Raises Repairing.
        """
        allowance = Allowance(self._parts.tally, items=BODIES_A_STEP)
        kept: list[int] = []
        damaged: list[int] = []
        position = found.position
        for at, timer_id in enumerate(found.ids.tolist()):
            if allowance.is_spent:
                position = timer_id
                break
            has_texts = self._has_texts(TimerId(timer_id))
            if has_texts is not False:
                kept.append(at)
            if has_texts is None:
                damaged.append(timer_id)
        return FoundTimers(found.ids[kept], found.rows[kept], position, frozenset(damaged))

    def _has_texts(self, timer_id: TimerId) -> bool | None:
        """Return whether the message of a timer has the key and the tag; None if it is damaged.

        Raises Repairing while a replica may mend the message.
        """
        parts, wanted = self._parts, self._wanted
        try:
            entry: TimerEntry = parts.index.get(timer_id)
        except TimerEntryDamaged:
            return None
        try:
            blob = parts.bodies.read(timer_id, entry).blob
            parts.tally.add(1, size_bytes=len(blob))
            if wanted.key and not stored_message.has_key(blob, wanted.key):
                return False
            return not wanted.tag or stored_message.tag_of(blob) == wanted.tag
        except BodyDamaged as error:
            if parts.bodies.request_mend(entry.log_offset):
                raise Repairing from error
            return None
        except ValueError:
            return None


@final
class TimerCount:
    """The count of a dry run: call `step` until it returns False, then read the result."""

    def __init__(
        self,
        parts: TimerParts,
        wanted: TimerFilter,
        change: TimerChange,
        *,
        as_of_ms: int,
        firing_ms: int,
        due_max_ms: int,
        quarantined: list[int],
    ) -> None:
        self._parts = parts
        self._change = change
        self._firing_ms = firing_ms
        self._due_max_ms = due_max_ms
        self._quarantined = np.array(sorted(quarantined), np.int64)
        self._matches = TimerMatches(parts, wanted, end=parts.index.next_id)
        self._search = self._search_end(as_of_ms)
        self.begin = self._position = 0
        self.count = self.size_bytes = self.quarantined_count = 0
        self.late_count = 0  # their new due times are after the maximum delay
        self.damaged_count = 0  # part of `count`: their keys and tags are unknown
        self.sample: list[TimerId] = []  # the oldest ones
        self.topics: Counter[TopicId] = Counter()
        self.hours: Counter[int] = Counter()  # by the begin of the hour (ms)
        self.seconds: Counter[int] = Counter()  # new due times; at most SECONDS_MAX of them

    def _search_end(self, as_of_ms: int) -> TimeSearch | None:
        parts = self._parts
        topic_id = parts.catalog.topic_ids.get(TIMER_TOPIC)
        if topic_id is None:
            return None
        queue = parts.catalog.queue(topic_id, SCHEDULE_QUEUE)
        replaced = _replaced_queue(parts.catalog)
        queues = [queue] if replaced is None else [queue, replaced]
        return TimeSearch(parts.store, queues, as_of_ms + 1, falls=parts.catalog.clock_falls)

    @property
    def end(self) -> int:
        """The first timer that was stored after the time of the count."""
        return self._matches.end

    @property
    def replaced_from(self) -> int:
        """The first replaced message after the time of the count, by its queue offset."""
        return self._matches.replaced_from

    @property
    def is_cut(self) -> bool:
        """Whether older timers with the key were not counted."""
        return self._matches.is_cut

    def step(self) -> bool:
        """Do one slice. Raises Repairing."""
        if self._search is not None:
            if self._search.step():
                return True
            end, *replaced_from = self._search.offsets
            self._matches.end = min(self._matches.end, end)
            self._matches.replaced_from = replaced_from[0] if replaced_from else 0
            self._search = None
            return True
        items_max = COUNTED_PAGES_A_STEP * PAGE_ENTRIES
        found = self._matches.find(self._position, items_max, pages_max=COUNTED_PAGES_A_STEP)
        self._note(found.ids, found.rows)
        self.damaged_count += len(found.damaged)
        self._position = found.position
        return self._position < self._matches.end

    def _note(self, ids: np.ndarray, rows: np.ndarray) -> None:
        if not len(ids):
            return
        self.count += len(ids)
        self.size_bytes += int(rows["size"].sum(dtype=np.int64))
        self.quarantined_count += int(is_among(self._quarantined, ids).sum())
        self.sample += [TimerId(one) for one in ids[: SAMPLE_MAX - len(self.sample)].tolist()]
        due = rows["due"].astype(np.int64)
        topics, sizes = np.unique(rows["topic_id"].astype(np.int64), return_counts=True)
        self.topics.update(dict(zip(map(TopicId, topics.tolist()), sizes.tolist(), strict=True)))
        hours, sizes = np.unique(due - due % HOUR_MS, return_counts=True)
        self.hours.update(dict(zip(hours.tolist(), sizes.tolist(), strict=True)))
        new_due = self._change.due_of_rows(ids, due, firing_ms=self._firing_ms)
        if new_due is not None:
            self.late_count += int((new_due > self._due_max_ms).sum())
            seconds, sizes = np.unique(new_due // 1_000, return_counts=True)
            for second, size in zip(seconds.tolist(), sizes.tolist(), strict=True):
                if len(self.seconds) < SECONDS_MAX or second in self.seconds:
                    self.seconds[second] += size

    @property
    def fullest_second(self) -> tuple[int, int]:
        """The fullest second of the new due times, and its timers with those that it has now."""
        links = self._parts.index.links
        best = 0, 0
        for second, added in self.seconds.most_common(1_000):
            known = links.wheel.count(second) if second < links.ring_end_s else 0
            if known + added > best[1]:
                best = second, known + added
        return best
