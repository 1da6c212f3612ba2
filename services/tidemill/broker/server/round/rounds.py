"""The round loop: the only caller of the engine.

    1. Take all queued work and apply it. Revive what is due. Try waiting polls again.
    2. Write all records with one writev, or with several if they are large; other tasks get their
       turn in between.
    3. Hand the effects of the round to the release point (`durability.py`). A reply is a promise of
       durability, so it leaves when the round is synced. The next round may be written by then.
    4. Do one slice of the engine's background work.

No timer delays a batch: an idle broker does a request at once, and a busy one finds many requests
after each round. Without work the loop sleeps until the next deadline.

A replica has no rounds. Until it is the master, the loop applies the confirmed log instead, and
does the background work that makes no records.

Invariant: commands reach the engine only from this loop, in a round. Background slices run between
two rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Protocol, TypeVar, final

import structlog

from tidemill.broker.engine.timer.firing_clock import HOLD_MS, FiringClock
from tidemill.broker.server.round.background_work import BREAK_MS_MAX, BackgroundWork
from tidemill.broker.server.round.calls import RoundCall, do_nothing
from tidemill.broker.server.round.disk_trend import DiskTrend
from tidemill.broker.server.round.durability import DISK_BUCKETS_US, US_PER_S
from tidemill.broker.server.round.notices import log_notices
from tidemill.broker.server.round.round_log import RoundLog
from tidemill.broker.server.round.turn import Turn
from tidemill.broker.server.round.work_queue import WorkQueue
from tidemill.common.errors import Draining, NotMaster, Overloaded, QueryFailed, ServiceError
from tidemill.common.histogram import Histogram
from tidemill.common.log import LEVEL
from tidemill.common.slices import run_in_turns

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.metadata.catalog import ConfigChanges
    from tidemill.broker.engine.replica.replica_engine import ReplicaEngine
    from tidemill.broker.server.round.durability import Durability, Syncs
    from tidemill.broker.server.round.long_polling import LongPolling
    from tidemill.broker.server.round.turn import Work
    from tidemill.common.clock import Clock

T = TypeVar("T")

log = structlog.get_logger()

SLEEP_MS_MAX = 10_000  # the longest sleep; bounds how late a wall clock set forward is noticed
REFRESH_MS = 1_000  # period of reading the free space; the disk reserve covers the writes between
REVIVE_BUCKETS_MS = (1, 10, 100, 1000, 2000, 3000)  # those of RocketMQ's buffer scan
FOLLOW_MS = 1_000  # the longest sleep of a replica, which also expires state by the clock
# Time for replicas to confirm the last round of a stop. The master proposes to remove a replica
# from the sync state set if it lags longer.
LAST_CONFIRM_S = 2.0
CALLS_MAX = 1_000  # administrative calls that wait; beyond it a call gets Overloaded


class ConfigReceiver(Protocol):
    """A receiver of configuration changes."""

    def add_config_changes(self, changes: ConfigChanges) -> None:
        """Add the changes to the receiver's effect of the current round."""
        ...

    def note_rejection(self, why: str) -> None:
        """Note why messages are rejected from now on; "": they are accepted again."""
        ...


@final
class Rounds:
    """The queue of work, and the loop that does it.

    It is one class, because every method reads or changes the state of the current round.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        durability: Durability,
        background_syncs: Syncs,
        clock: Clock,
        polls: LongPolling,
        pending_bytes_max: int,
        clock_hold_ms: int = HOLD_MS,
        replica_engine: ReplicaEngine | None = None,
    ) -> None:
        """With a `replica_engine` the broker is a replica, and follows until it is elected."""
        self._replica_engine = replica_engine
        self._promoted = asyncio.Event()
        self._engine = engine
        self._durability = durability
        self._background = BackgroundWork(engine, background_syncs)
        self._sync_count_at_slice = -1
        self._has_break = False  # A slice is due, and waits for a sync of the log.
        self._clock = clock
        self._polls = polls
        self._receivers: dict[ConfigReceiver, None] = {}
        self._pending = WorkQueue(pending_bytes_max)
        self._call_count = 0
        self.failed_read_count = 0
        self._is_round_due = False
        self._has_more_due = False  # after the part of the due work that the last round did
        self._wake = asyncio.Event()  # a round is due, or something was committed
        self._is_draining = False
        self._is_stopped = False
        self._firing_clock = FiringClock(hold_ms=clock_hold_ms)
        # Reads the clock that never goes back, because it stamps the deadlines.
        self._expiry_clock = FiringClock(hold_ms=clock_hold_ms)
        self._refresh_at_ms = 0
        self._disk_trend = DiskTrend()
        self.turn = Turn(engine, polls, clock)
        self.revive_latencies: Histogram[tuple[()]] = Histogram(REVIVE_BUCKETS_MS)
        self.append_times_us: Histogram[tuple[()]] = Histogram(DISK_BUCKETS_US)
        self._written_offset = engine.log.log_end
        self.count = 0
        self._round_log: RoundLog | None = None  # at the level debug
        # Called when half messages are due for a check.
        self.on_checks_due: Callable[[], None] | None = None

    # ------------------------------------------------------------ state, for metrics and readers

    @property
    def engine(self) -> Engine:
        """The engine, for reading only; commands go through `call` and `submit`."""
        return self._engine

    @property
    def is_master(self) -> bool:
        """Whether commands are accepted; always true without replicas."""
        return self._replica_engine is None or self._replica_engine.is_master

    async def wait_until_master(self) -> None:
        """Wait until commands are accepted."""
        if not self.is_master:
            await self._promoted.wait()

    @property
    def sync_times_us(self) -> Histogram[tuple[()]]:
        """Durations of the syncs of the log."""
        return self._durability.sync_times_us

    @property
    def now_ms(self) -> int:
        """The begin of the last round, by wall time."""
        return self.turn.now_ms

    @property
    def firing_clock(self) -> FiringClock:
        """The clock of delayed messages."""
        return self._firing_clock

    @property
    def disk_full_in_s(self) -> float:
        """Seconds until the disk is full at the pace of the last hour; infinite: never."""
        return self._disk_trend.full_in_s

    @property
    def pending_count(self) -> int:
        """The number of frames and calls that wait for the next round."""
        return len(self._pending)

    # ------------------------------------------------------------ work

    async def submit(self, work: Work) -> None:
        """Queue `work` for the next round; wait while too many bytes are queued.

        Raises NotMaster.
        """
        self._check_master()
        await self._pending.wait_for_room()
        self.put(work)

    def put(self, work: Work) -> None:
        """Queue `work` without a limit: only for work that is rare and small."""
        self._pending.add(work)
        self.wake()

    async def call(self, function: Callable[[Engine, Turn], T]) -> T:
        """Run `function(engine, turn)` in a round; return its result once it is durable."""
        return await self.call_slices(_in_one_slice(function))

    async def read(self, function: Callable[[Engine, Turn], T]) -> T:
        """Run `function(engine, turn)`, which changes nothing, in a round.

        An unexpected error fails this read alone: raises QueryFailed.
        """
        return await self.read_slices(_in_one_slice(function))

    async def read_slices(self, function: Callable[[Engine, Turn], Generator[None, None, T]]) -> T:
        """Run a long function, which yields between slices and changes nothing; see `read`."""

        def guarded(engine: Engine, turn: Turn) -> Generator[None, None, T]:
            before = engine.state_mark
            try:
                return (yield from function(engine, turn))
            except ServiceError:
                raise
            except Exception as error:
                if engine.state_mark != before:
                    raise  # It was no read. Only recovery gives a valid state again.
                log.exception("read failed unexpectedly", read=function.__qualname__)
                self.failed_read_count += 1
                raise QueryFailed(
                    "the broker could not answer because of an unexpected error; its log has it"
                ) from error

        return await self.call_slices(guarded)

    async def call_slices(self, function: Callable[[Engine, Turn], Generator[None, None, T]]) -> T:
        """Run a long function, which yields between slices, in one round; see `call`."""
        self._check_master()
        if self._is_draining:
            raise Draining("the broker is stopping; call another broker, or try again later")
        if self._call_count >= CALLS_MAX:
            raise Overloaded(f"{CALLS_MAX} administrative calls already wait; try again later")
        self._call_count += 1
        try:
            call = RoundCall(function)
            await self.submit(call)
            return await call.result
        finally:
            self._call_count -= 1

    def _check_master(self) -> None:
        if not self.is_master:
            raise NotMaster("this replica of the broker group is not the master; call the master")

    async def settle(self) -> None:
        """Wait until everything that is queued now is applied and answered."""
        # The effects of the first barrier's round are released before those of the second.
        for _ in range(2):
            barrier = RoundCall(do_nothing)
            self.put(barrier)
            await barrier.result

    def attach(self, receiver: ConfigReceiver) -> None:
        """Report configuration changes to `receiver` from now on."""
        self._receivers[receiver] = None

    def detach(self, receiver: ConfigReceiver) -> None:
        """Report nothing more to `receiver`."""
        self._receivers.pop(receiver, None)

    def report_rejection(self, why: str) -> None:
        """Report at once why messages are rejected: replies of rounds wait for earlier rounds."""
        for receiver in self._receivers:
            receiver.note_rejection(why)

    def wake(self) -> None:
        """Do a round soon: work is queued, or the clock was moved."""
        self._is_round_due = True
        self._wake.set()

    async def write_checkpoint(self, timeout_s: float) -> None:
        """Write a checkpoint between rounds, for at most `timeout_s`: the next start is short."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._background.write_checkpoint(self.wake)

    def drain(self) -> None:
        """Answer long polls empty, and every later pop at once."""
        self._is_draining = True
        self.wake()

    def stop(self) -> None:
        """Let `run` return after one more round for the queued work."""
        self._is_draining = True
        self._is_stopped = True
        self.wake()

    # ------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Do rounds until stopped; raise if the disk fails, after which nothing may go on."""
        durability, wake = self._durability, self._wake.set
        async with durability.running(wake), self._background.syncing(wake):
            if self._replica_engine is not None:
                await self._follow(self._replica_engine)
            while self.is_master:
                is_last = self._is_stopped
                await self._wait_until(lambda: durability.has_room or self._is_stopped)
                has_more = await self._round()
                if is_last:
                    if not await self._release_all():
                        return  # Memory is ahead of the confirmed log: no file may be written.
                    if self._pending:
                        continue  # Messages of closed links are given back first.
                    self._engine.finish(self._clock.wall_ms())
                    return
                has_more = await self._do_background() or has_more
                if has_more or self._is_round_due:
                    await asyncio.sleep(0)  # Frames must be read before they can queue up.
                else:
                    await self._sleep()

    async def _release_all(self) -> bool:
        """Wait until all effects are released; return False if the replicas do not confirm."""
        try:
            async with asyncio.timeout(None if self._replica_engine is None else LAST_CONFIRM_S):
                await self._wait_until(lambda: self._durability.is_empty)
        except TimeoutError:
            return False
        return True

    async def _follow(self, replica_engine: ReplicaEngine) -> None:
        """Apply the confirmed log until this replica is the master or stops."""
        while self._is_following():
            self._is_round_due = False
            turn = self.turn = Turn(self._engine, self._polls, self._clock)
            if turn.monotonic_ms >= self._refresh_at_ms:
                self._refresh_at_ms = turn.monotonic_ms + REFRESH_MS
                self._disk_trend.update(self._engine, turn.monotonic_ms)
            await run_in_turns(replica_engine.apply_slices())
            if not self._is_following():
                break
            has_more = self._background.is_due(turn) and self._background.step(turn)
            if has_more or self._is_round_due or replica_engine.is_behind:
                await asyncio.sleep(0)
                continue
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FOLLOW_MS / 1000):
                    await self._wake.wait()
        if replica_engine.is_master:
            self._written_offset = self._engine.log.log_end
            self._promoted.set()

    def _is_following(self) -> bool:
        return not (self.is_master or self._is_stopped)

    async def _round(self) -> bool:
        """Do one round; return True if the engine wants another one soon."""
        self._is_round_due = False
        self.count += 1
        engine, polls = self._engine, self._polls
        turn = self.turn = Turn(engine, polls, self._clock)
        turn.is_draining = self._is_draining
        work = self._pending.take()

        if turn.monotonic_ms >= self._refresh_at_ms:
            self._refresh_at_ms = turn.monotonic_ms + REFRESH_MS
            self._disk_trend.update(engine, turn.monotonic_ms)
            engine.store.note_time(turn.monotonic_ms)
            log_notices(engine)
        firing_ms = self._firing_clock.read(self._clock.unsteady_wall_ms(), turn.monotonic_ms)
        turn.firing_ms = min(firing_ms, turn.now_ms)
        expiry_ms = self._expiry_clock.read(turn.now_ms, turn.monotonic_ms)
        turn.expiry_ms = min(expiry_ms, turn.now_ms)
        engine.deduplication.note_time(turn.now_ms, turn.monotonic_ms)
        await run_in_turns(_apply(work, turn))
        begin_s = time.monotonic()
        await run_in_turns(self._do_due(turn))
        self.revive_latencies.observe((), (time.monotonic() - begin_s) * 1000)
        if engine.half_checks.due and self.on_checks_due is not None:
            self.on_checks_due()
        topic_ids, keys = engine.take_ready()
        if topic_ids or keys:
            await run_in_turns(polls.wake(topic_ids, keys))
        if changes := engine.take_config_changes():
            await self._report_changes(changes)
        polls.expire(turn.monotonic_ms)
        if turn.is_draining:
            polls.release()

        await self._write()
        self._durability.add(list(turn.effects.values()), turn.times)
        if LEVEL.is_debug:
            self._round_log = self._round_log or RoundLog(self._engine)
            self._round_log.log_round(self.count, work_count=len(work), began_s=begin_s)
        return self._has_more_due

    async def _write(self) -> None:
        """Write the records of the round."""
        began_s = time.monotonic()
        await run_in_turns(self._engine.write_slices(self.turn.now_ms))
        if self._engine.log.log_end > self._written_offset:
            self._written_offset = self._engine.log.log_end
            self.append_times_us.observe((), (time.monotonic() - began_s) * US_PER_S)

    def _do_due(self, turn: Turn) -> Iterator[None]:
        self._has_more_due = yield from self._engine.due_slices(
            turn.now_ms,
            firing_ms=turn.firing_ms,
            expiry_ms=turn.expiry_ms,
            monotonic_ms=turn.monotonic_ms,
        )

    async def _report_changes(self, changes: ConfigChanges) -> None:
        """Report changes to all links, and wake the polls of deleted topics and groups to fail."""
        for receiver in self._receivers:
            receiver.add_config_changes(changes)
        keys = [
            key
            for group_id in changes.deleted_group_ids
            for key in self._polls.keys_of_group(group_id)
        ]
        if changes.deleted_topic_ids or keys:
            await run_in_turns(self._polls.wake(changes.deleted_topic_ids, keys))

    async def _do_background(self) -> bool:
        """Do one slice of background work; return True if more can be done at once.

        Do at most one slice in a short sync of the log: the sync process, and then everybody with a
        reply, need the CPU. On two cores, slices without a break made a sync of 0.6 ms one of 4 ms.
        """
        background, durability = self._background, self._durability
        self._has_break = False
        if self._is_stopped or not background.is_due(self.turn):
            return False
        if background.needs_quiet:
            # A busy broker has no other quiet moment: no round begins until those in flight are
            # committed. That takes the remaining part of the current sync, and one more sync.
            await self._wait_until(lambda: durability.is_caught_up or self._is_stopped)
        elif not durability.is_caught_up:
            await asyncio.sleep(0)  # Lets the sync of the round begin before the slice.
            is_same = durability.is_syncing and durability.sync_count == self._sync_count_at_slice
            if is_same and background.may_wait(self.turn):
                self._has_break = True
                return False  # The end of the sync, the next round, or BREAK_MS_MAX ends it.
        self._sync_count_at_slice = durability.sync_count
        return background.step(self.turn)

    async def _wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition `holds` that the rounds in flight bring about."""
        while not holds():
            self._wake.clear()
            await self._wake.wait()

    async def _sleep(self) -> None:
        """Sleep until there is work or the next deadline; do background work meanwhile."""
        while not self._is_round_due:
            if self._durability.is_caught_up:
                delay_ms = self._find_delay_ms()
                if delay_ms <= 0:
                    await asyncio.sleep(0)
                    return
                self._wake.clear()
                try:
                    async with asyncio.timeout(delay_ms / 1000):
                        await self._wake.wait()
                except TimeoutError:
                    return
            else:
                # The sync ends before a timer would pay off, and the effects of a round could not
                # be released before its end.
                self._wake.clear()
                try:
                    async with asyncio.timeout(BREAK_MS_MAX / 1000 if self._has_break else None):
                        await self._wake.wait()
                except TimeoutError:
                    return  # The turn of another round has the time for the next slice.
            if await self._do_background():
                return

    def _find_delay_ms(self) -> int:
        """Return the time until the next deadline, at most `SLEEP_MS_MAX`."""
        delay_ms = SLEEP_MS_MAX
        turn = self.turn
        for due_ms in (
            self._engine.next_due_ms(
                turn.now_ms, firing_ms=turn.firing_ms, expiry_ms=turn.expiry_ms
            ),
            self._background.next_ms(),
        ):
            if due_ms is not None:
                delay_ms = min(delay_ms, due_ms - self._clock.wall_ms())
        deadline_ms = self._polls.find_next_deadline_ms()
        if deadline_ms is not None:
            delay_ms = min(delay_ms, deadline_ms - self._clock.monotonic_ms())
        return delay_ms


def _in_one_slice(
    function: Callable[[Engine, Turn], T],
) -> Callable[[Engine, Turn], Generator[None, None, T]]:
    @functools.wraps(function)
    def run(engine: Engine, turn: Turn) -> Generator[None, None, T]:
        yield from ()
        return function(engine, turn)

    return run


def _apply(work: Iterable[Work], turn: Turn) -> Iterator[None]:
    for item in work:
        yield from item.apply(turn)
        yield
