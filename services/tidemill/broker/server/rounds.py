"""The round loop: the one caller of the engine.

    1. take what has queued up and apply it; revive what is due; pop again for those who wait
    2. write all records with one writev
    3. fdatasync in the sync process; meanwhile the next round's work queues up
    4. answer everybody: an answer is a promise of durability
    5. one slice of the engine's background work

Nobody waits for a timer to fill a batch: an idle broker answers a request at once, a busy one finds
many when the sync before has ended. With nothing to do the loop sleeps until the next deadline.

Invariant: only this loop calls the engine, and between 2 and 4 it calls nothing but the sync.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, cast

import structlog

from tidemill.broker.engine.timer.firing_clock import HOLD_MS, FiringClock
from tidemill.broker.server.long_polling import LongPolling
from tidemill.common.errors import Draining, Overloaded, ServiceError
from tidemill.common.latencies import Latencies

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.metadata.catalog import ConfigChanges
    from tidemill.broker.sync_process import HasFileno
    from tidemill.common.clock import Clock

log = structlog.get_logger()

T = TypeVar("T")

TURN_NS = 2_000_000  # 2 ms: longer the loop does not keep others waiting
SLEEP_MS_MAX = 10_000  # a wall clock that was set forward is noticed within this time
REFRESH_MS = (
    1_000  # between two looks at the free space; the disk's reserve covers the writes between
)
REVIVE_BUCKETS_MS = (1, 10, 100, 1000, 2000, 3000)  # RocketMQ's, of its buffer scan
CALLS_MAX = 1_000  # administrative calls that wait; beyond it they are refused with Overloaded


class Syncs(Protocol):
    """What makes files durable."""

    async def sync(self, files: Iterable[HasFileno]) -> None:
        """Return when all that was written to `files` is durable."""
        ...


class Asker(Protocol):
    """Who is answered at the end of a round."""

    def answer(self) -> Iterator[None]:
        """Send what this round has for the asker; yields between slices."""
        ...


class Receiver(Asker, Protocol):
    """Who is told about changes of the configuration."""

    def config_changed(self, changes: ConfigChanges) -> None:
        """Keep the changes for the end of the round."""
        ...


class Work(Protocol):
    """Commands that arrived together."""

    size_bytes: int

    def apply(self, turn: Turn) -> Iterator[None]:
        """Call the engine; yields between slices."""
        ...


class Turn:
    """What a round hands to its work."""

    __slots__ = (
        "_touched",
        "engine",
        "firing_ms",
        "is_draining",
        "monotonic_ms",
        "now_ms",
        "polls",
    )

    def __init__(self, engine: Engine, polls: LongPolling, clock: Clock) -> None:
        self.engine = engine
        self.polls = polls
        self.now_ms = clock.wall_ms()
        self.monotonic_ms = clock.monotonic_ms()
        self.firing_ms = self.now_ms  # by which delayed messages are due
        self.is_draining = False
        self._touched: dict[Asker, None] = {}

    def touch(self, asker: Asker) -> None:
        """Answer `asker` at the end of this round."""
        self._touched[asker] = None

    def touched(self) -> Iterable[Asker]:
        """Return who is to be answered."""
        return self._touched


class Rounds:
    """Work that queues up, and the loop that does it."""

    def __init__(
        self,
        engine: Engine,
        *,
        syncs: Syncs,
        background_syncs: Syncs,
        clock: Clock,
        polls: LongPolling,
        pending_bytes_max: int,
        clock_hold_ms: int = HOLD_MS,
    ) -> None:
        self._engine = engine
        self._syncs = syncs
        self._background_syncs = background_syncs
        self._clock = clock
        self._polls = polls
        self._receivers: dict[Receiver, None] = {}
        # Bounded in bytes: beyond `pending_bytes_max` links are not read, and their windows close.
        self._pending: deque[Work] = deque()
        self._pending_bytes = 0
        self._pending_bytes_max = pending_bytes_max
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._calls = 0
        self._wake = asyncio.Event()
        self._is_draining = False
        self._is_stopped = False
        self._background = engine.background
        self._firing_clock = FiringClock(hold_ms=clock_hold_ms)
        self._is_background_idle = False
        self._background_idle_at_ms = 0
        self._refresh_at_ms = 0
        self._background_files: list[HasFileno] = []
        self._background_synced = asyncio.Event()
        self.turn = Turn(engine, polls, clock)
        self.revive_latencies = Latencies(REVIVE_BUCKETS_MS)
        self.count = 0

    @property
    def engine(self) -> Engine:
        """The engine, for reading what a scrape needs; never for a command."""
        return self._engine

    @property
    def now_ms(self) -> int:
        """When the last round began, by wall time."""
        return self.turn.now_ms

    @property
    def firing_clock(self) -> FiringClock:
        """The clock by which delayed messages are due."""
        return self._firing_clock

    @property
    def pending_count(self) -> int:
        """Frames and calls that wait for the next round."""
        return len(self._pending)

    async def submit(self, work: Work) -> None:
        """Queue `work` for the next round; waits while too many bytes are queued."""
        while not self._has_room.is_set():
            await self._has_room.wait()
        self.put(work)

    def put(self, work: Work) -> None:
        """Queue `work` whatever else is queued: only for what is rare and small."""
        self._pending.append(work)
        self._pending_bytes += work.size_bytes
        if self._pending_bytes >= self._pending_bytes_max:
            self._has_room.clear()
        self._wake.set()

    async def call(self, function: Callable[[Engine, Turn], T]) -> T:
        """Run `function(engine, turn)` in a round; return its result once that is durable."""
        if self._is_draining:
            raise Draining("the broker is about to stop")
        if self._calls >= CALLS_MAX:
            raise Overloaded("too many administrative calls wait; try again later")
        self._calls += 1
        try:
            call = _Call(function)
            await self.submit(call)
            return await call.result
        finally:
            self._calls -= 1

    async def settle(self) -> None:
        """Wait until all that is queued now is applied and answered."""
        # The second round begins when the first has answered everybody.
        for _ in range(2):
            barrier = _Call(lambda _engine, _turn: None)
            self.put(barrier)
            await barrier.result

    def attach(self, receiver: Receiver) -> None:
        """Tell `receiver` about changes of the configuration from now on."""
        self._receivers[receiver] = None

    def detach(self, receiver: Receiver) -> None:
        """Forget a receiver that is gone."""
        self._receivers.pop(receiver, None)

    def wake(self) -> None:
        """Look again what is due: somebody moved the clock."""
        self._wake.set()

    def drain(self) -> None:
        """Answer long polls empty, and every later pop at once."""
        self._is_draining = True
        self._wake.set()

    def stop(self) -> None:
        """Let `run` return after one more round for what is queued."""
        self._is_draining = True
        self._is_stopped = True
        self._wake.set()

    async def run(self) -> None:
        """Do rounds until stopped; raises when the disk fails, and then nothing may go on."""
        async with self._background_syncing():
            while True:
                is_last = self._is_stopped
                has_more = await self._round()
                if is_last:
                    self._engine.finish(self._clock.wall_ms())
                    return
                if self._pending or has_more or self._is_stopped:
                    await asyncio.sleep(0)  # Frames must be read to queue up.
                else:
                    await self._sleep()

    async def _round(self) -> bool:
        """Do one round; True when the engine wants another one soon."""
        self._wake.clear()
        self.count += 1
        engine, polls = self._engine, self._polls
        turn = self.turn = Turn(engine, polls, self._clock)
        turn.is_draining = self._is_draining
        work, self._pending = self._pending, deque()
        self._pending_bytes = 0
        self._has_room.set()

        if turn.monotonic_ms >= self._refresh_at_ms:
            self._refresh_at_ms = turn.monotonic_ms + REFRESH_MS
            engine.refresh()
            for (topic, reason), found in engine.timers.deliverer.take_notices().items():
                log.warning(
                    "timers not delivered",
                    topic=topic, reason=reason, count=found[0], last_timer_id=found[1],
                )  # fmt: skip
        firing_ms = self._firing_clock.read(self._clock.unsteady_wall_ms(), turn.monotonic_ms)
        turn.firing_ms = min(firing_ms, turn.now_ms)
        for item in work:
            await _in_turns(item.apply(turn))
        begin_s = time.monotonic()
        has_more = engine.run_due(turn.now_ms, firing_ms=turn.firing_ms)
        self.revive_latencies.observe((), (time.monotonic() - begin_s) * 1000)
        topic_ids, keys = engine.take_ready()
        if topic_ids or keys:
            await _in_turns(polls.wake(topic_ids, keys))
        if changes := engine.take_config_changes():
            await self._spread(changes)
        polls.expire(turn.monotonic_ms)
        if turn.is_draining:
            polls.release()

        engine.write(turn.now_ms)
        log_offset, files = engine.begin_sync()
        if files:
            await self._syncs.sync(files)
            engine.synced(log_offset)
            self._is_background_idle = False
        for asker in turn.touched():
            await _in_turns(asker.answer())
        return self._run_background() or has_more

    async def _spread(self, changes: ConfigChanges) -> None:
        """Tell every link, and wake who waits at what was deleted, so that it learns of it."""
        for receiver in self._receivers:
            receiver.config_changed(changes)
            self.turn.touch(receiver)
        keys = [
            key
            for group_id in changes.deleted_group_ids
            for key in self._polls.keys_of_group(group_id)
        ]
        if changes.deleted_topic_ids or keys:
            await _in_turns(self._polls.wake(changes.deleted_topic_ids, keys))

    def _run_background(self) -> bool:
        """Do one slice of background work; True when there is more to do at once."""
        turn = self.turn
        now_ms = turn.monotonic_ms
        # Retention is a matter of time alone: nothing need happen for it to have work.
        is_idle = self._is_background_idle and now_ms < self._background_idle_at_ms + SLEEP_MS_MAX
        is_idle = is_idle and not self._background.is_wanted(turn.now_ms)
        if is_idle or self._background_files or self._is_stopped:
            return False
        files = self._background.step(turn.now_ms, firing_ms=turn.firing_ms)
        if files is None:
            self._is_background_idle = True
            self._background_idle_at_ms = now_ms
            return False
        if files:
            self._background_files = list(files)
            self._background_synced.clear()
            self._wants_background_sync.set()
            return False
        return True

    @contextlib.asynccontextmanager
    async def _background_syncing(self) -> AsyncIterator[None]:
        self._wants_background_sync = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(self._sync_background(), name="background sync")
            yield
            task.cancel()

    async def _sync_background(self) -> None:
        while True:
            await self._wants_background_sync.wait()
            self._wants_background_sync.clear()
            await self._background_syncs.sync(self._background_files)
            self._background_files = []
            self._wake.set()

    async def _sleep(self) -> None:
        """Sleep until there is work or the next deadline."""
        delay_ms = SLEEP_MS_MAX
        dues = [self._engine.next_due_ms(self.turn.now_ms, firing_ms=self.turn.firing_ms)]
        if not self._background_files:
            dues.append(self._background.next_ms())
        for due_ms in dues:
            if due_ms is not None:
                delay_ms = min(delay_ms, due_ms - self._clock.wall_ms())
        deadline_ms = self._polls.find_next_deadline_ms()
        if deadline_ms is not None:
            delay_ms = min(delay_ms, deadline_ms - self._clock.monotonic_ms())
        if delay_ms <= 0 or self._wake.is_set():
            await asyncio.sleep(0)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_ms / 1000):
                await self._wake.wait()


class _Call(Generic[T]):
    """One administrative call as work."""

    size_bytes = 1024  # about what it keeps in memory

    def __init__(self, function: Callable[[Engine, Turn], T]) -> None:
        self._function = function
        self._outcome: T | ServiceError | None = None
        self.result: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def apply(self, turn: Turn) -> Iterator[None]:
        turn.touch(self)
        try:
            self._outcome = self._function(turn.engine, turn)
        except ServiceError as error:
            self._outcome = error
        yield

    def answer(self) -> Iterator[None]:
        if self.result.cancelled():
            return
        if isinstance(self._outcome, ServiceError):
            self.result.set_exception(self._outcome)
        else:
            self.result.set_result(cast("T", self._outcome))
        yield


async def _in_turns(slices: Iterator[None]) -> None:
    """Run `slices` to their end, giving way to the event loop after each 2 ms."""
    begin_ns = time.monotonic_ns()
    for _ in slices:
        if time.monotonic_ns() - begin_ns > TURN_NS:
            await asyncio.sleep(0)
            begin_ns = time.monotonic_ns()
