"""The simulated network: ordered streams, and single messages that may be lost or doubled."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, final

from tidemill.common.replica_group import ReplicaId

if TYPE_CHECKING:
    from tests.simulation.replica_process import ReplicaProcess

DELAY_S_MAX = 0.004  # of a normal message
SLOW_PART = 0.03  # the share of slow messages
SLOW_S_MAX = 0.4  # of a slow message
LOST_PART = 0.02  # the share of single messages that are lost
TWICE_PART = 0.02  # the share of single messages that arrive twice


@final
class Stream:
    """A stream between a dialling replica and its master; a lost message stalls its direction."""

    def __init__(self, number: int, dialler: ReplicaProcess, master: ReplicaProcess) -> None:
        self.number = number
        self.ends = {dialler.name: master, master.name: dialler}
        self.runs = {one.name: one.lives for one in (dialler, master)}
        self.arrives_at_s = dict.fromkeys(self.ends, 0.0)
        # Messages in flight by sender, the oldest first. The loop runs callbacks of one moment in
        # any order, so a callback takes the oldest message. None is the end of the stream.
        self.carried: dict[str, deque[object | None]] = {name: deque() for name in self.ends}
        self.is_stalled = dict.fromkeys(self.ends, False)
        self.closed_by: set[str] = set()


@final
class ReplicaNetwork:
    """The open and blocked directions between processes, and the messages in flight."""

    def __init__(self, random: Random) -> None:
        self.blocked: set[tuple[str, str]] = set()  # (source, target)
        self._random = random
        self._loop = asyncio.get_running_loop()
        self._streams: dict[int, Stream] = {}
        self._numbers = 0
        self.heard_s: dict[tuple[str, str], float] = {}  # by (receiver, sender): the last message
        # Single messages that stay in flight until `let_arrive`, by (source, target).
        self.held: dict[tuple[str, str], list[Callable[[], object]]] = {}
        self.holds: set[tuple[str, str]] = set()  # directions whose messages are held

    def delay_s(self) -> float:
        slow = self._random.random() < SLOW_PART
        return self._random.uniform(0, SLOW_S_MAX if slow else DELAY_S_MAX)

    def send(self, source: str, target: str, arrive: Callable[[], object]) -> None:
        """Carry a single message; it arrives late, twice, or never."""
        if (source, target) in self.holds:
            self.held.setdefault((source, target), []).append(arrive)
            return
        if self._random.random() < LOST_PART:
            return
        for _ in range(2 if self._random.random() < TWICE_PART else 1):
            self._loop.call_later(self.delay_s(), self._arrive, source, target, arrive)

    def _arrive(self, source: str, target: str, arrive: Callable[[], object]) -> None:
        if (source, target) not in self.blocked:
            arrive()

    def let_arrive(self, way: tuple[str, str]) -> None:
        """Deliver the held messages of a direction in the order of their sends."""
        self.holds.discard(way)
        for arrive in self.held.pop(way, []):
            arrive()

    def heal(self) -> None:
        """Open all directions and deliver all held messages."""
        self.blocked.clear()
        self.holds.clear()
        for way in list(self.held):
            self.let_arrive(way)

    # ------------------------------------------------------------ streams

    def dial(self, dialler: ReplicaProcess, master: ReplicaProcess) -> None:
        """Open a stream if both directions are open and the master runs."""
        run = dialler.lives
        self._loop.call_later(self.delay_s(), self._connect, dialler, run, master)

    def _connect(self, dialler: ReplicaProcess, run: int, master: ReplicaProcess) -> None:
        if not dialler.is_alive or dialler.lives != run:
            return
        names = (dialler.name, master.name)
        is_cut = names in self.blocked or names[::-1] in self.blocked
        if is_cut or not master.is_alive:
            self._when_awake(dialler, run, lambda: dialler.stream_closed(None))
            return
        self._numbers += 1
        stream = self._streams[self._numbers] = Stream(self._numbers, dialler, master)
        self._when_awake(dialler, run, lambda: dialler.stream_opened(stream.number))

    def send_on(self, number: int, source: str, message: object) -> None:
        """Send a message on a stream, behind all earlier messages of its sender."""
        stream = self._streams.get(number)
        if stream is None or source in stream.closed_by:
            return
        at_s = max(stream.arrives_at_s[source], self._loop.time() + self.delay_s())
        stream.arrives_at_s[source] = at_s
        stream.carried[source].append(message)
        self._loop.call_at(at_s, self._deliver, stream, source)

    def _deliver(self, stream: Stream, source: str) -> None:
        message = stream.carried[source].popleft()
        if message is None:
            self._report_end(stream, source)
            return
        target = stream.ends[source]
        if (source, target.name) in self.blocked:
            stream.is_stalled[source] = True
        if stream.is_stalled[source] or target.name in stream.closed_by:
            return
        run = stream.runs[target.name]

        def receive() -> None:
            self.heard_s[target.name, source] = self._loop.time()
            target.receive(stream.number, message)

        # A paused replica receives all messages later, in their order.
        self._when_awake(target, run, receive)

    def close(self, number: int, source: str) -> None:
        """Close a stream; the other end is notified if its direction is open."""
        stream = self._streams.get(number)
        if stream is None or source in stream.closed_by:
            return
        stream.closed_by.add(source)
        at_s = max(stream.arrives_at_s[source], self._loop.time() + self.delay_s())
        stream.carried[source].append(None)
        self._loop.call_at(at_s, self._deliver, stream, source)

    def _report_end(self, stream: Stream, source: str) -> None:
        target = stream.ends[source]
        if (source, target.name) in self.blocked or stream.is_stalled[source]:
            return
        if target.name not in stream.closed_by:
            stream.closed_by.add(target.name)
            run = stream.runs[target.name]
            self._when_awake(target, run, lambda: target.stream_closed(stream.number))

    def end_streams_of(self, name: str) -> None:
        """Close all streams of a process that has ended, as its operating system does."""
        for number, stream in list(self._streams.items()):
            if name in stream.ends:
                self.close(number, name)
            if len(stream.closed_by) == 2:
                del self._streams[number]

    def _when_awake(self, target: ReplicaProcess, run: int, act: Callable[[], object]) -> None:
        if target.lives != run or not target.is_alive:
            return
        if target.is_paused:
            target.deferred.append(act)
        else:
            act()

    def silences(self, one: ReplicaProcess) -> tuple[tuple[ReplicaId, int], ...]:
        """Return the milliseconds since a replica heard from each other replica."""
        return tuple(
            (ReplicaId(int(other[-1])), round(1000 * (self._loop.time() - at_s)))
            for (name, other), at_s in sorted(self.heard_s.items())
            if name == one.name
        )
