"""A running store under an offline read. After each read, the seed chooses an operation.

The history has the outcome of each operation before `hide`. Later operations count as unknown,
because a copy that begins at that moment may include them or not.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from random import Random
from typing import Any, TypeVar

from tests.support.clients.history import History, Outcome
from tests.support.disk.faulty_disk import FaultyDisk, FaultyFile
from tests.support.disk.quiet import has_pending
from tests.support.worlds.engine_world import GROUP, TOPIC, PoppedMessage, World
from tidemill.broker.engine.layout.numbers import QueueId

SEGMENT = 64 << 10
BACKLOG_MAX = 20  # messages: far fewer than retention keeps
INVISIBLE_MS = 5_000
T = TypeVar("T")


def finish(steps: Generator[Any, None, T]) -> T:
    """Run a generator to its end, and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: T = stop.value
            return result


class BusyFile(FaultyFile):
    """A file that calls `act` after each read."""

    act: Callable[[], None]

    def read_at(self, offset: int, size: int) -> bytes:
        data = super().read_at(offset, size)
        self.act()
        return data


class BusySource:
    """A disk that is read beside a running broker."""

    def __init__(self, disk: FaultyDisk, act: Callable[[], None]) -> None:
        self._disk = disk
        self._act = act

    def names(self, folder: str) -> list[str]:
        return self._disk.names(folder)

    def open(self, name: str) -> BusyFile:
        opened = self._disk.open(name)
        file = BusyFile(self._disk, name, opened._content)
        file.act = self._act
        return file

    def read(self, name: str) -> bytes | None:
        data = self._disk.read(name)
        self._act()
        return data


class Life:
    """One world, its operations, and the history of its clients."""

    def __init__(self, seed: int, *, world: World | None = None, segments_kept: int = 3) -> None:
        self.random = Random(f"life {seed}")
        self.world = world or World(
            FaultyDisk(Random(seed)),
            segment_bytes=SEGMENT,
            retention_bytes=segments_kept * SEGMENT,
            checkpoint_log_bytes=SEGMENT // 2,
        )
        self.history = History()
        self.world.group()
        self.world.topic()
        self._is_hidden = False
        self._count = 0
        self._unsettled: dict[str, int] = {}  # with the log end after the send
        self._out: list[PoppedMessage] = []

    def hide(self) -> None:
        """Count the outcome of all later operations as unknown."""
        self._is_hidden = True

    def live(self, acts: int) -> None:
        """Do some operations."""
        for _ in range(acts):
            self.act()

    def live_about(self, acts: float) -> None:
        """Do this number of operations on average."""
        self.live(int(acts) + (self.random.random() < acts % 1))

    def act(self) -> None:
        """Do one operation. First settle the messages that retention may remove next."""
        low = self._oldest_segment() + SEGMENT
        if self._unsettled and min(self._unsettled.values()) < low + SEGMENT // 2:
            is_near = self.world.engine.log.log_end - low > SEGMENT
            if is_near:
                self._settle()
        chance = self.random.random()
        if chance < 0.35:
            self._step()
        elif chance < 0.65 and len(self._unsettled) < BACKLOG_MAX:
            self._send()
        elif chance < 0.7:
            self.world.advance(self.random.choice((10, 1_000, INVISIBLE_MS + 1)))
        else:
            self._consume()

    def _oldest_segment(self) -> int:
        """Return the begin of the oldest segment with live messages."""
        world = self.world
        queue = world.engine.catalog.queue(world.topic(), QueueId(0))
        if queue.min_offset == queue.max_offset:
            return world.engine.log.min_offset
        return world.engine.log.segment_start(queue.entry(queue.min_offset)[0])

    def _step(self) -> None:
        """Do a slice of background work."""
        world = self.world
        for file in world.engine.background.step(world.now_ms, firing_ms=world.now_ms) or ():
            file.sync()
        if has_pending(world.engine):
            world.commit()

    def _send(self) -> None:
        for _ in range(self.random.randint(1, 4)):
            self._count += 1
            key = f"m{self._count}"
            send = self.history.send(key)
            self.world.send(key, size=self.random.choice((100, 1_500, 6_000)))
            self._unsettled[key] = self.world.engine.log.log_end
            if not self._is_hidden:
                send.ended(Outcome.OK)

    def _settle(self) -> None:
        """Ack all available messages."""
        while self._unsettled:
            self.world.advance(INVISIBLE_MS + 1)
            self._consume(lazy_share=0.0, want=32)

    def _consume(self, *, lazy_share: float = 0.1, want: int = 8) -> None:
        popped = self.world.pop(self.random.randint(1, want), invisible_ms=INVISIBLE_MS)
        if not self._is_hidden:
            self.history.received([one.body for one in popped])
        for one in popped:
            if self.random.random() < lazy_share:
                continue
            ack = self.history.ack(one.body)
            self.world.ack(one)
            self._unsettled.pop(one.body, None)
            if not self._is_hidden:
                ack.ended(Outcome.OK)

    def judge(self, disk: FaultyDisk) -> World:
        """Start on another disk, receive all messages, and compare them with the history."""
        world = World(disk, config=self.world.config, now_ms=self.world.now_ms)
        for _ in range(20):
            world.advance(INVISIBLE_MS + 1)
            while popped := world.pop(invisible_ms=INVISIBLE_MS, topic=TOPIC, group=GROUP):
                self.history.received([one.body for one in popped])
                for one in popped:
                    ack = self.history.ack(one.body)
                    world.ack(one)
                    ack.ended(Outcome.OK)
        verdict = self.history.judge()
        assert verdict.is_clean, str(verdict)
        return world
