"""An engine with small timer files, its clock, and a fold of its log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, NamedTuple
from zlib import crc32

from tests.support.bodies import text_of
from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.disk.log_checker import LogChecker, records_of
from tests.support.disk.quiet import has_pending
from tests.support.disk.timer_log_fold import TimerFold
from tests.support.worlds.engine_world import SMALL, TOPIC, World, blob
from tidemill.broker.engine.config import EngineConfig
from tidemill.broker.engine.engine import Engine
from tidemill.broker.engine.layout import message
from tidemill.broker.engine.layout.message import FLAG_TIMER, TimerReason
from tidemill.broker.engine.layout.numbers import LogOffset, QueueId, TimerId, TopicId
from tidemill.broker.engine.layout.record import RecordKind
from tidemill.broker.engine.timer.config import TimerConfig
from tidemill.broker.engine.timer.patch import with_due_time
from tidemill.broker.engine.timer.search import TimerSearch
from tidemill.broker.engine.timer.status import ScheduleResult, TimerQuery, TimerState, TimerStatus
from tidemill.message import stored_message

SECOND_MS = 1_000
MINUTE_MS = 60 * SECOND_MS
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS
START_MS = 1_700_000_000_123
TIMERS = TimerConfig(
    wheel_slots=4_096,
    timer_log_file_bytes=64 * 200,
    table_file_entries=512,
    table_pages_max=8,
    load_chunk_records=64,
    flush_log_bytes=20_000,
)
SPINS_MAX = 3_000  # calls without progress of the clock: the broker would use a whole core
STRIDE_MS = 900 * SECOND_MS  # well under a revolution of the small wheel


class TimerDelivery(NamedTuple):
    """A message that a timer delivered to a topic."""

    text: str
    timer_id: int
    due_at_ms: int
    stored_at_ms: int
    reason: TimerReason
    topic: str
    queue_id: int


class TimerWorld(World):
    """A world that checks its growing log record by record."""

    def __init__(
        self,
        disk: FaultyDisk | None = None,
        *,
        config: EngineConfig = SMALL,
        timer: TimerConfig = TIMERS,
        now_ms: int = START_MS,
        before: TimerWorld | None = None,
        is_followed: bool = False,
        **changes: object,
    ) -> None:
        """Open an engine. `before` is the previous world, whose fold continues."""
        self.fold: LogChecker = before.fold if before else LogChecker()
        self.delivered: list[TimerDelivery] = before.delivered if before else []
        self._judged_to: int = before._judged_to if before else 0
        super().__init__(
            disk, config=config, now_ms=now_ms, is_followed=is_followed, timer=timer, **changes
        )

    @property
    def timers(self) -> TimerFold:
        """The fold of the timer records."""
        self.judge()
        return self.fold.timers

    # ------------------------------------------------------------ commands, each a round

    def schedule(
        self,
        text: str,
        *,
        due_at_ms: int | None = None,
        delay_ms: int | None = None,
        topic: str = TOPIC,
        queue_id: int = 0,
        size: int = 0,
        keys: tuple[str, ...] = (),
        commit: bool = True,
    ) -> ScheduleResult:
        """Send a message with its own due time, or with a delay of `delay_ms`."""
        plain = blob(text, size=size, keys=keys, kind=stored_message.TYPE_DELAY)
        data, crc = with_due_time(plain, crc32(plain), due_at_ms or 0)
        topic_id = self.topic(topic)
        scheduled = self.engine.commands.send(
            TopicId(topic_id),
            QueueId(queue_id),
            bytes(data),
            crc,
            now_ms=self.now_ms,
            firing_ms=self.now_ms,
            delay_ms=delay_ms,
        )
        if commit:
            self.commit()
        return ScheduleResult._make(scheduled)

    def cancel(self, timer_id: int) -> TimerStatus:
        self.engine.timers.commands.cancel(TimerId(timer_id), now_ms=self.now_ms)
        self.commit()
        return self.engine.timers.commands.status(TimerId(timer_id))

    def reschedule(self, timer_id: int, due_at_ms: int, **options: int) -> TimerStatus:
        self.engine.timers.commands.reschedule(
            TimerId(timer_id),
            due_at_ms=due_at_ms,
            now_ms=self.now_ms,
            firing_ms=self.now_ms,
            **options,
        )
        self.commit()
        return self.engine.timers.commands.status(TimerId(timer_id))

    def fire(self, timer_id: int) -> TimerStatus:
        self.engine.timers.commands.fire(
            TimerId(timer_id), now_ms=self.now_ms, firing_ms=self.now_ms
        )
        self.commit()
        return self.engine.timers.commands.status(TimerId(timer_id))

    def state(self, timer_id: int) -> TimerState:
        return self.engine.timers.commands.status(TimerId(timer_id)).state

    def search(self, query: TimerQuery) -> list[TimerStatus]:
        """Return one page of pending timers."""
        search: TimerSearch = self.engine.timers.commands.search(query)
        while search.step():
            pass
        return search.found

    # ------------------------------------------------------------ time

    def advance(self, duration_ms: int) -> None:
        """Advance the clock in coarse strides, and run all due work after each stride."""
        end_ms = self.now_ms + duration_ms
        while self.now_ms < end_ms:
            self.now_ms = min(self.now_ms + STRIDE_MS, end_ms)
            self.run_due()

    def sleep(self, duration_ms: int) -> None:
        """Advance the clock to the engine's next due time, repeatedly, as the broker does."""
        end_ms = self.now_ms + duration_ms
        spins = 0
        while True:
            self.run_due()
            self.engine.take_ready()
            if self.engine.background.is_due(self.now_ms):
                self.background()
            due_ms = self.engine.next_due_ms(self.now_ms, firing_ms=self.now_ms)
            if self.now_ms >= end_ms:
                return
            spins = spins + 1 if due_ms is not None and due_ms <= self.now_ms else 0
            assert spins < SPINS_MAX, "the engine asks to be called again and again, for nothing"
            self.now_ms = min(max(due_ms or end_ms, self.now_ms + 1), end_ms)

    # ------------------------------------------------------------ verdicts

    def judge(self) -> None:
        """Fold the new records, and collect their deliveries."""
        committed = self.engine.log.committed_offset
        if committed == self._judged_to:
            return
        for header, body, tail in records_of(self.disk, self._judged_to):
            if header.log_offset >= committed:
                break
            self._judged_to = header.log_offset + header.size
            self.fold.fold(header, body, tail)
            if header.kind == RecordKind.MESSAGE and header.flags & FLAG_TIMER:
                self._take(header.stored_at_ms, body, tail)

    def _take(self, stored_at_ms: int, body: bytes, tail: bytes) -> None:
        cause = message.decode_timer_cause(body)
        place = message.MessagePosition._make(message.PLACE.unpack_from(body))
        topic = self.fold.timers.topics[place.topic_id]
        text = text_of(tail)
        self.delivered.append(
            TimerDelivery(
                text,
                cause.timer_id,
                cause.due_at_ms,
                stored_at_ms,
                TimerReason(cause.reason),
                topic,
                place.queue_id,
            )
        )

    def texts(self, topic: str = TOPIC) -> list[str]:
        """Return the bodies that timers delivered to a topic, in its order."""
        self.judge()
        return [one.text for one in self.delivered if one.topic == topic]

    def check(self) -> None:
        """Compare the engine's open timers, counts and pins with the log."""
        self.engine.timers.index.link_gathered()
        check_engine(self.engine, self.timers)

    def run_due(self) -> None:
        super().run_due()
        self.judge()

    def background(
        self, steps: int = 100_000, *, between: Callable[[], None] = lambda: None
    ) -> None:
        """Run background work until it is done, at most `steps` steps."""
        self.judge()  # Retention must not remove unread records.
        self.engine.retention.request_look()
        for _ in range(steps):
            files = self.engine.background.step(self.now_ms, firing_ms=self.now_ms)
            if files is None:
                break
            for file in files:
                file.sync()
            if has_pending(self.engine):
                self.commit()
            between()
        else:
            assert steps < 100_000, "background work does not come to an end"
        self.judge()


class UnjudgedWorld(TimerWorld):
    """A world without a check of its log, because retention removes unread messages."""

    def judge(self) -> None:
        """Check nothing."""


def open_timers(engine: Engine) -> Iterator[tuple[int, int, int]]:
    """Yield (id, due time, log offset) of each pending timer by id, for T-7."""
    table = engine.timers.index.table
    for number in table.page_numbers():
        rows = table.rows(number)
        for at in (rows["state"] == TimerState.PENDING).nonzero()[0].tolist():
            row = rows[at]
            yield number * len(rows) + at, int(row["due"]), int(row["log_offset"])


def check_engine(engine: Engine, fold: TimerFold) -> None:
    """Compare table, counts and pins with the fold of the log (T-7, T-9, T-10, T-20)."""
    index, log = engine.timers.index, engine.log
    if index.gathered_due_ms is not None:
        # A later slice of background work adds them to the table. The checks continue then.
        assert index.pending_count == len(fold.open), "T-20"
        assert index.pinned_bytes == sum(one.size for one in fold.open.values())
        return
    known = {n: (one.due_at_ms, one.log_offset) for n, one in fold.open.items()}
    found = {timer_id: (due, offset) for timer_id, due, offset in open_timers(engine)}
    assert found == known, _difference(found, known)
    by_topic = Counter(one.topic_id for one in fold.open.values())
    assert +index.counts.pending == by_topic, "T-20"
    bytes_by_topic: Counter[int] = Counter()
    for one in fold.open.values():
        bytes_by_topic[one.topic_id] += one.size
    assert +index.counts.pending_bytes == bytes_by_topic
    assert min(index.counts.pending.values(), default=0) >= 0, "T-20: a negative count"
    assert index.pending_count == len(known), "T-20"
    assert index.counts.pinned_bytes == sum(one.size for one in fold.open.values())
    pins = Counter(log.segment_start(LogOffset(one.log_offset)) for one in fold.open.values())
    assert +index.counts.pins == pins, "T-10: what pins a segment"
    for timer_id, (_, offset) in known.items():
        assert log.min_offset <= offset < log.log_end, f"T-9, T-10: the body of {timer_id}"
    flusher = engine.timers.flusher
    if index.next_id:
        assert log.min_offset <= flusher.replay_from or log.min_offset == 0, "T-10"
    assert flusher.replay_from <= log.log_end, "T-9"
    assert engine.timers.deliverer.early_count == 0, "T-1"
    assert not +engine.timers.janitor.audit.drift, "an audit had to correct something"


def _difference(found: dict[Any, Any], known: dict[Any, Any]) -> str:
    only_found = sorted(found.items() - known.items())[:5]
    only_known = sorted(known.items() - found.items())[:5]
    return f"T-7: only the engine has {only_found}, only the log has {only_known}"


def without_timer_files(disk: FaultyDisk, *names: str) -> FaultyDisk:
    """Remove timer files without the engine. Default: all."""
    for folder in ("timer", "timer/timerlog", "timer/state"):
        for name in disk.names(folder):
            if not names or name in names:
                disk.remove(name)
    return disk


def timer_files(disk: FaultyDisk) -> list[str]:
    """Return the names of all timer files."""
    folders = ("timer", "timer/timerlog", "timer/state")
    return [name for folder in folders for name in disk.names(folder)]


def seeded_world(seed: int, **options: Any) -> TimerWorld:
    """Return a world on a disk; `seed` chooses the effects of its power cuts."""
    return TimerWorld(FaultyDisk(Random(seed)), **options)
