"""The round loop: the one caller of the engine.

    1. take what has queued up and apply it; revive what is due; pop again for those who wait
    2. write all records with one writev; where they are large with several, and others get their
       turn in between
    3. hand what the round has for others to the release point (`durability.py`): an answer is a
       promise of durability, and leaves when the round is synced; the next may be written by then
    4. one slice of the engine's background work

Nobody waits for a timer to fill a batch: an idle broker does a request at once, a busy one finds
many when it has done those before. With nothing to do the loop sleeps until the next deadline.

A replica has no rounds: until it is the master the loop applies what is confirmed instead, and does
the background work that makes no records.

Invariant: commands reach the engine from this loop alone, in a round; background slices lie between
two rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, cast

import structlog

from tidemill.broker.engine.timer.firing_clock import HOLD_MS, FiringClock
from tidemill.broker.server.round.background_work import BackgroundWork
from tidemill.broker.server.round.disk_room import DiskRoom
from tidemill.broker.server.round.durability import DISK_BUCKETS_US, US_PER_S
from tidemill.broker.server.round.round_log import RoundLog
from tidemill.broker.server.round.turn import Turn
from tidemill.common.errors import Draining, NotMaster, Overloaded, ServiceError
from tidemill.common.histogram import Histogram
from tidemill.common.log import is_debug
from tidemill.common.slices import run_in_turns

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.metadata.catalog import ConfigChanges
    from tidemill.broker.engine.replica.group_log import GroupLog
    from tidemill.broker.server.round.durability import Durability, Syncs
    from tidemill.broker.server.round.long_polling import LongPolling
    from tidemill.broker.server.round.turn import Work
    from tidemill.common.clock import Clock

log = structlog.get_logger()

T = TypeVar("T")

SLEEP_MS_MAX = 10_000  # a wall clock that was set forward is noticed within this time
REFRESH_MS = (
    1_000  # between two looks at the free space; the disk's reserve covers the writes between
)
REVIVE_BUCKETS_MS = (1, 10, 100, 1000, 2000, 3000)  # RocketMQ's, of its buffer scan
FOLLOW_MS = 1_000  # a replica lets go of what is over by the clock within this time
# For replicas to confirm the last round of a stop: one that lags for longer is proposed away.
LAST_CONFIRM_S = 2.0
# A broken invariant, and a disk that fails: nothing may go on, whatever was changed before.
FATAL = (AssertionError, OSError)
CALLS_MAX = 1_000  # administrative calls that wait; beyond it they are refused with Overloaded


class ConfigReceiver(Protocol):
    """A receiver of configuration changes."""

    def add_config_changes(self, changes: ConfigChanges) -> None:
        """Add the changes to the receiver's effect of the current round."""
        ...


class Rounds:
    """Work that queues up, and the loop that does it."""

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
        group_log: GroupLog | None = None,
    ) -> None:
        """With a `group_log` the engine has replicas, and is one until it is elected."""
        self._group_log = group_log
        self._promoted = asyncio.Event()
        self._engine = engine
        self._durability = durability
        self._background = BackgroundWork(engine, background_syncs)
        self._clock = clock
        self._polls = polls
        self._receivers: dict[ConfigReceiver, None] = {}
        # Bounded in bytes: beyond `pending_bytes_max` links are not read, and their windows close.
        self._pending: deque[Work] = deque()
        self._pending_bytes = 0
        self._pending_bytes_max = pending_bytes_max
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._calls = 0
        self._is_round_due = False
        self._has_more = False  # of what is due, when the last round had done its part
        self._wake = asyncio.Event()  # a round is due, or something was committed
        self._is_draining = False
        self._is_stopped = False
        self._firing_clock = FiringClock(hold_ms=clock_hold_ms)
        # Over the clock that never goes back, since deadlines are stamped by that one.
        self._expiry_clock = FiringClock(hold_ms=clock_hold_ms)
        self._refresh_at_ms = 0
        self._disk_room = DiskRoom()
        self.turn = Turn(engine, polls, clock)
        self.revive_latencies: Histogram[tuple[()]] = Histogram(REVIVE_BUCKETS_MS)
        self.append_times_us: Histogram[tuple[()]] = Histogram(DISK_BUCKETS_US)
        self._written_offset = engine.log_end
        self.count = 0
        self._round_log = RoundLog(engine) if is_debug() else None

    @property
    def engine(self) -> Engine:
        """The engine, for reading what a scrape needs; never for a command."""
        return self._engine

    @property
    def is_master(self) -> bool:
        """Whether commands are taken: always, where there are no replicas."""
        return self._group_log is None or self._group_log.is_master

    async def mastered(self) -> None:
        """Wait until commands are taken."""
        if not self.is_master:
            await self._promoted.wait()

    @property
    def sync_times_us(self) -> Histogram[tuple[()]]:
        """How long syncs of the log took."""
        return self._durability.sync_times_us

    @property
    def now_ms(self) -> int:
        """When the last round began, by wall time."""
        return self.turn.now_ms

    @property
    def firing_clock(self) -> FiringClock:
        """The clock by which delayed messages are due."""
        return self._firing_clock

    @property
    def disk_full_in_s(self) -> float:
        """Seconds until the disk is full if it goes on like in the last hour; infinite: never."""
        return self._disk_room.full_in_s

    @property
    def pending_count(self) -> int:
        """Frames and calls that wait for the next round."""
        return len(self._pending)

    async def submit(self, work: Work) -> None:
        """Queue `work` for the next round; waits while too many bytes are queued.

        Raises NotMaster.
        """
        self._check_master()
        while not self._has_room.is_set():
            await self._has_room.wait()
        self.put(work)

    def put(self, work: Work) -> None:
        """Queue `work` whatever else is queued: only for what is rare and small."""
        self._pending.append(work)
        self._pending_bytes += work.size_bytes
        if self._pending_bytes >= self._pending_bytes_max:
            self._has_room.clear()
        self.wake()

    async def call(self, function: Callable[[Engine, Turn], T]) -> T:
        """Run `function(engine, turn)` in a round; return its result once that is durable."""

        def at_once(engine: Engine, turn: Turn) -> Generator[None, None, T]:
            yield from ()
            return function(engine, turn)

        return await self.call_slices(at_once)

    async def call_slices(self, function: Callable[[Engine, Turn], Generator[None, None, T]]) -> T:
        """Do as `call` with what takes long, and yields between slices; one round all the same."""
        self._check_master()
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

    def _check_master(self) -> None:
        if not self.is_master:
            raise NotMaster("this replica of the broker group is not its master; ask the master")

    async def settle(self) -> None:
        """Wait until all that is queued now is applied and answered."""
        # What the first round has for others has left before what the second has does.
        for _ in range(2):
            barrier = _Call(_do_nothing)
            self.put(barrier)
            await barrier.result

    def attach(self, receiver: ConfigReceiver) -> None:
        """Tell `receiver` about changes of the configuration from now on."""
        self._receivers[receiver] = None

    def detach(self, receiver: ConfigReceiver) -> None:
        """Forget a receiver that is gone."""
        self._receivers.pop(receiver, None)

    def wake(self) -> None:
        """Do a round soon: something has queued up, or somebody moved the clock."""
        self._is_round_due = True
        self._wake.set()

    def drain(self) -> None:
        """Answer long polls empty, and every later pop at once."""
        self._is_draining = True
        self.wake()

    def stop(self) -> None:
        """Let `run` return after one more round for what is queued."""
        self._is_draining = True
        self._is_stopped = True
        self.wake()

    async def run(self) -> None:
        """Do rounds until stopped; raises when the disk fails, and then nothing may go on."""
        durability, wake = self._durability, self._wake.set
        async with durability.running(wake), self._background.syncing(wake):
            if self._group_log is not None:
                await self._follow(self._group_log)
            while self.is_master:
                is_last = self._is_stopped
                await self._until(lambda: durability.has_room or self._is_stopped)
                has_more = await self._round()
                if is_last:
                    if not await self._let_all_leave():
                        return  # Memory is ahead of what is confirmed: none of it is written.
                    if self._pending:
                        continue  # What was popped for a link that closed comes back yet.
                    self._engine.finish(self._clock.wall_ms())
                    return
                has_more = await self._do_background() or has_more
                if has_more or self._is_round_due:
                    await asyncio.sleep(0)  # Frames must be read to queue up.
                else:
                    await self._rest()

    async def _let_all_leave(self) -> bool:
        """Wait until what rounds have for others has left; False: replicas do not confirm it."""
        try:
            async with asyncio.timeout(None if self._group_log is None else LAST_CONFIRM_S):
                await self._until(lambda: self._durability.is_empty)
        except TimeoutError:
            return False
        return True

    async def _follow(self, group_log: GroupLog) -> None:
        """Apply what is confirmed, until this replica is the master or is to stop."""
        while self._is_following():
            self._is_round_due = False
            turn = self.turn = Turn(self._engine, self._polls, self._clock)
            if turn.monotonic_ms >= self._refresh_at_ms:
                self._refresh_at_ms = turn.monotonic_ms + REFRESH_MS
                self._disk_room.look(self._engine, turn.monotonic_ms)
            await run_in_turns(group_log.apply_slices())
            if not self._is_following():
                break
            has_more = self._background.is_due(turn) and self._background.step(turn)
            if has_more or self._is_round_due or group_log.is_behind:
                await asyncio.sleep(0)
                continue
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FOLLOW_MS / 1000):
                    await self._wake.wait()
        if group_log.is_master:
            self._written_offset = self._engine.log_end
            self._promoted.set()

    def _is_following(self) -> bool:
        return not (self.is_master or self._is_stopped)

    async def _round(self) -> bool:
        """Do one round; True when the engine wants another one soon."""
        self._is_round_due = False
        self.count += 1
        engine, polls = self._engine, self._polls
        turn = self.turn = Turn(engine, polls, self._clock)
        turn.is_draining = self._is_draining
        work, self._pending = self._pending, deque()
        self._pending_bytes = 0
        self._has_room.set()

        if turn.monotonic_ms >= self._refresh_at_ms:
            self._refresh_at_ms = turn.monotonic_ms + REFRESH_MS
            self._disk_room.look(engine, turn.monotonic_ms)
            engine.note_time(turn.monotonic_ms)
            _log_notices(engine)
        firing_ms = self._firing_clock.read(self._clock.unsteady_wall_ms(), turn.monotonic_ms)
        turn.firing_ms = min(firing_ms, turn.now_ms)
        expiry_ms = self._expiry_clock.read(turn.now_ms, turn.monotonic_ms)
        turn.expiry_ms = min(expiry_ms, turn.now_ms)
        await run_in_turns(_apply(work, turn))
        begin_s = time.monotonic()
        await run_in_turns(self._do_due(turn))
        self.revive_latencies.observe((), (time.monotonic() - begin_s) * 1000)
        topic_ids, keys = engine.take_ready()
        if topic_ids or keys:
            await run_in_turns(polls.wake(topic_ids, keys))
        if changes := engine.take_config_changes():
            await self._spread(changes)
        polls.expire(turn.monotonic_ms)
        if turn.is_draining:
            polls.release()

        await self._write()
        self._durability.add(list(turn.effects.values()))
        if self._round_log is not None:
            self._round_log.tell(self.count, work_count=len(work), began_s=begin_s)
        return self._has_more

    async def _write(self) -> None:
        """Write what the round has appended."""
        began_s = time.monotonic()
        await run_in_turns(self._engine.write_slices(self.turn.now_ms))
        if self._engine.log_end > self._written_offset:
            self._written_offset = self._engine.log_end
            self.append_times_us.observe((), (time.monotonic() - began_s) * US_PER_S)

    def _do_due(self, turn: Turn) -> Iterator[None]:
        self._has_more = yield from self._engine.due_slices(
            turn.now_ms,
            firing_ms=turn.firing_ms,
            expiry_ms=turn.expiry_ms,
            monotonic_ms=turn.monotonic_ms,
        )

    async def _spread(self, changes: ConfigChanges) -> None:
        """Tell every link, and wake who waits at what was deleted, so that it learns of it."""
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
        """Do one slice of background work; True when there is more to do at once."""
        background = self._background
        if self._is_stopped or not background.is_due(self.turn):
            return False
        if background.wants_quiet:
            # A busy broker has no such moment but this: no round begins until those in flight are
            # committed. That takes the rest of the sync under way, and one more.
            await self._until(lambda: self._durability.is_caught_up or self._is_stopped)
        elif not self._durability.is_caught_up:
            await asyncio.sleep(0)  # Else the sync of the round would begin after the slice.
        return background.step(self.turn)

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Wait until something that rounds in flight bring about `holds`."""
        while not holds():
            self._wake.clear()
            await self._wake.wait()

    async def _rest(self) -> None:
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
                # The end of the sync is nearer than a deadline is worth, and what a round would
                # have for others could not leave before it.
                self._wake.clear()
                await self._wake.wait()
            if await self._do_background():
                return

    def _find_delay_ms(self) -> int:
        """Return how long nothing is due, at most `SLEEP_MS_MAX`."""
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


def _log_notices(engine: Engine) -> None:
    """Write what an operator should learn of into the log."""
    for (topic, reason), found in engine.timers.deliverer.take_notices().items():
        log.warning(
            "timers not delivered",
            topic=topic,
            reason=reason,
            count=found[0],
            last_timer_id=found[1],
        )
    for notice in engine.consumption.take_notices():
        log.error("message damaged, what is left of it is dead-lettered", **notice._asdict())
    for gate in engine.retention.gate.take_notices():
        room = {"topic": gate.topic, "room_mib": gate.room_bytes >> 20}
        if gate.gives_way:
            log.warning("archive gate gives way: what is not sealed goes for want of room", **room)
        else:
            log.info("archive gate holds again", **room)
    for file in engine.repairs.take_notices():
        log.warning("damaged file derived from the log again", file=file)


def _apply(work: Iterable[Work], turn: Turn) -> Iterator[None]:
    for item in work:
        yield from item.apply(turn)
        yield


def _do_nothing(_engine: Engine, _turn: Turn) -> Generator[None, None, None]:
    yield from ()


class _Call(Generic[T]):
    """One administrative call as work."""

    size_bytes = 1024  # about what it keeps in memory

    def __init__(self, function: Callable[[Engine, Turn], Generator[None, None, T]]) -> None:
        self._function = function
        self._outcome: T | Exception | None = None
        self.result: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def apply(self, turn: Turn) -> Iterator[None]:
        if self.result.cancelled():
            return  # Who asked has gone before anything was done.
        turn.effects[self] = self
        before = turn.engine.state_mark
        try:
            self._outcome = yield from self._function(turn.engine, turn)
        except ServiceError as error:
            self._outcome = error
        except FATAL:
            raise
        except Exception as error:
            # What went wrong halfway through a change leaves a state that nobody has decided on:
            # recovery makes it anew from the log. A look has left nothing.
            if turn.engine.state_mark != before:
                raise
            log.exception("call failed unexpectedly, and has changed nothing")
            self._outcome = error
        yield

    def release(self) -> Iterator[None]:
        if self.result.cancelled():
            return
        if isinstance(self._outcome, Exception):
            self.result.set_exception(self._outcome)
        else:
            self.result.set_result(cast("T", self._outcome))
        yield
