"""Lifecycle events beside a history that the test keeps by itself.

The history of a message contains the test's own actions (send, schedule, pop, ack, nack) and their
consequences: fired when due, revived or dead-lettered at the deadline, expired by retention. The
events must be the same, each once. The reader uses only the identities in the events when a message
has expired. Kills, power cuts, failovers, checkpoints, copies of timers and retirement may come at
any point. At the end, the remaining log is read again from its begin, in pieces, with empty caches.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from random import Random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.seeds import examples
from tests.support.worlds.engine_world import GROUP, TOPIC, PoppedMessage, forget_event_lookups
from tests.support.worlds.timer_world import TimerWorld
from tidemill.broker.engine.events.event import Event, EventKind, EventQuery
from tidemill.broker.engine.layout.numbers import QueueId, TopicId
from tidemill.broker.engine.pop.deliveries import AckResult
from tidemill.common.errors import InvalidReceiptHandle

MAX_ATTEMPTS = 3
QUEUES = 2
DURATIONS = st.sampled_from([1_000, 5_000, 70_000, 3_600_000])
ALL = 1 << 40
NUMBERS = st.integers(0, 1 << 30)


@dataclass
class ModelMessage:
    """One message, as the test knows it."""

    events: list[tuple[object, ...]] = field(default_factory=list)
    state: str = "ready"
    attempt: int = 0
    until: int = 0
    handle: tuple[int, int, int] = (0, 0, 0)
    timer_id: int = -1


def key_of(popped: PoppedMessage) -> tuple[int, int, int]:
    return popped.delivery.slot, popped.delivery.delivery_id, popped.delivery.message_index


def read(world: TimerWorld, position: int, number: int = 0, events_max: int = ALL) -> list[Event]:
    """Read all committed events, in pages."""
    found: list[Event] = []
    while True:
        reader = world.engine.events.read(
            EventQuery(),
            from_position=position,
            from_index=number,
            log_bytes_max=ALL,
            events_max=events_max,
        )
        while reader.step():
            pass
        page = reader.take()
        assert len(page) <= events_max
        found += page
        assert (reader.next_position, reader.next_index) > (position, number) or not page
        position, number = reader.next_position, reader.next_index
        if position >= world.engine.log.committed_offset:
            return found


class Fold:
    """The history that a reader builds from successive events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.seen: dict[str, list[tuple[object, ...]]] = defaultdict(list)
        self.moved = 0
        self.by_place: dict[tuple[int, int, int], str] = {}
        self.place_of: dict[str, tuple[int, int, int]] = {}
        self.by_delivery: dict[tuple[int, int], str] = {}

    def take(self, event: Event) -> None:
        assert not self.events or event[:2] > self.events[-1][:2], "in order, each once"
        self.events.append(event)
        kind, place = event.kind, (event.topic_id, event.queue_id, event.queue_offset)
        if kind is EventKind.RESET:
            return
        if kind is EventKind.EXPIRED and event.reason == "retention":
            for offset in range(event.queue_offset, event.end_offset):
                self.seen[self.by_place[*place[:2], offset]].append(("EXPIRED", "retention"))
            return
        text = (
            event.message_id.removeprefix("id-")
            or self.by_delivery[event.delivery_id, event.delivery_index]
        )
        if event.delivery_id and kind is not EventKind.DELIVERED:
            assert self.by_delivery[event.delivery_id, event.delivery_index] == text
        event_fields: tuple[object, ...] = (kind.name,)
        match kind:
            case EventKind.STORED | EventKind.FIRED | EventKind.REVIVED:
                self.by_place[place], self.place_of[text] = text, place
                if kind is EventKind.REVIVED:
                    event_fields = kind.name, event.attempt
            case EventKind.DELIVERED:
                assert self.place_of[text] == place
                self.by_delivery[event.position, event.number] = text
                event_fields = kind.name, event.attempt, event.client_id, event.due_at_ms
                assert event.consumer_group == GROUP
            case EventKind.NACKED | EventKind.RENEWED:
                self.by_delivery[event.position, 0] = text
                event_fields = kind.name, event.due_at_ms
            case EventKind.SCHEDULED:
                event_fields = kind.name, event.due_at_ms
            case EventKind.DEAD_LETTERED | EventKind.EXPIRED:
                event_fields = kind.name, event.reason
            case EventKind.MOVED:
                self.moved += 1
                return
        self.seen[text].append(event_fields)


class EventModel(RuleBasedStateMachine):
    """One topic with two queues, one group, and a small log that loses its first segments."""

    @initialize(seed=st.integers(0, 1 << 16))
    def begin(self, seed: int) -> None:
        self.world = TimerWorld(
            FaultyDisk(Random(seed)),
            segment_bytes=16 << 10,
            retention_bytes=40_000,
            checkpoint_log_bytes=8_000,
            is_followed=True,
        )
        self.known: dict[str, ModelMessage] = {}
        self.out: list[PoppedMessage] = []
        self.fold = Fold()
        self.position = self.number = 0
        self.world.topic(TOPIC, queues=QUEUES)
        self.world.group(max_attempts=MAX_ATTEMPTS)
        # From now on the group reads the topic, so that it can lose messages.
        self.send(1, 0, 0)
        self.pop(1, 1_000, "")

    def new(self, **fields: object) -> str:
        text = f"m{len(self.known)}"
        self.known[text] = ModelMessage(**fields)  # type: ignore[arg-type]  # as in the class
        return text

    # ------------------------------------------------------------ actions

    @rule(count=st.integers(1, 12), queue_id=st.integers(0, QUEUES - 1), size=NUMBERS)
    def send(self, count: int, queue_id: int, size: int) -> None:
        texts = [self.new(events=[("STORED",)]) for _ in range(count)]
        self.world.send(*texts, queue_id=queue_id, size=size % 3_000)
        self.check()

    @rule(delay_ms=st.sampled_from([10_000, 100_000, 4_000_000]), size=st.integers(0, 2_000))
    def schedule(self, delay_ms: int, size: int) -> None:
        text = self.new(state="scheduled", until=self.world.now_ms + delay_ms)
        known = self.known[text]
        known.timer_id = self.world.schedule(text, delay_ms=delay_ms, size=size).queue_offset
        known.events.append(("SCHEDULED", known.until))
        self.check()

    def scheduled(self, number: int) -> ModelMessage | None:
        waiting = [known for known in self.known.values() if known.state == "scheduled"]
        return waiting[number % len(waiting)] if waiting else None

    @rule(number=NUMBERS)
    def recall(self, number: int) -> None:
        if known := self.scheduled(number):
            self.world.cancel(known.timer_id)
            known.state = "recalled"
            known.events.append(("RECALLED",))
            self.check()

    @rule(number=NUMBERS)
    def reschedule(self, number: int) -> None:
        if known := self.scheduled(number):
            # A different time: the same time is not a change.
            known.until += 1 + max(self.world.now_ms - known.until, 0) + 2_000_000 + number % 1_000
            self.world.reschedule(known.timer_id, known.until)
            known.events.append(("SCHEDULED", known.until))
            self.check()

    @rule(want=st.integers(1, 32), duration=DURATIONS, client=st.sampled_from(["", "client-1"]))
    def pop(self, want: int, duration: int, client: str) -> None:
        for one in self.world.pop(want, invisible_ms=duration, client_id=client):
            known = self.known[one.body]
            known.attempt += 1
            assert (known.state, known.attempt) == ("ready", one.attempt)
            known.state, known.handle = "in flight", key_of(one)
            known.until = self.world.now_ms + duration
            known.events.append(("DELIVERED", one.attempt, client, known.until))
            self.out.append(one)
        self.check()

    def some(self, number: int) -> PoppedMessage | None:
        return self.out[number % len(self.out)] if self.out else None

    def live(self, one: PoppedMessage) -> ModelMessage | None:
        known = self.known[one.body]
        return known if (known.state, known.handle) == ("in flight", key_of(one)) else None

    @rule(number=NUMBERS, count=st.integers(1, 20))
    def ack(self, number: int, count: int) -> None:
        if not self.out:
            return
        chosen = {
            id(one): one for one in (self.out[(number + n) % len(self.out)] for n in range(count))
        }
        for one, result in zip(chosen.values(), self.world.ack(*chosen.values()), strict=True):
            known = self.live(one)
            assert (result is AckResult.APPLIED) == (known is not None)
            if known:
                known.state = "acked"
                known.events.append(("ACKED",))
        self.out = [one for one in self.out if self.live(one)]
        self.check()

    @rule(number=NUMBERS, duration=DURATIONS | st.just(0))
    def change(self, number: int, duration: int) -> None:
        one = self.some(number)
        if one is None:
            return
        known = self.live(one)
        try:
            changed = self.world.change(one, duration)
        except InvalidReceiptHandle:
            assert known is None
            return
        assert known is not None
        until = self.world.now_ms + duration
        known.events.append(("RENEWED" if until > known.until else "NACKED", until))
        known.until, known.handle = until, key_of(changed)
        self.out.append(changed)
        self.run_out()

    @rule(number=NUMBERS)
    def forward(self, number: int) -> None:
        one = self.some(number)
        if one is None:
            return
        known = self.live(one)
        try:
            self.world.engine.commands.dead_letter(one.delivery, self.world.now_ms)
        except InvalidReceiptHandle:
            assert known is None
            return
        assert known is not None
        known.state = "dead"
        self.world.run_due()  # The round settles expired messages.
        is_gone = self.is_expired(one.body)
        known.events.append(
            ("EXPIRED", "in_flight") if is_gone else ("DEAD_LETTERED", "forwarded_by_client")
        )
        self.check()

    @rule(duration=st.sampled_from([1, 4_000, 66_000, 3_600_000]))
    def advance(self, duration: int) -> None:
        self.world.advance(duration)
        self.run_out()

    # ------------------------------------------------------------ consequences

    def is_expired(self, text: str) -> bool:
        topic_id, queue_id, offset = self.fold.place_of[text]
        queue = self.world.engine.catalog.queue(TopicId(topic_id), QueueId(queue_id))
        return offset < queue.min_offset

    def run_out(self) -> None:
        """Do with expired deliveries what the engine should have done."""
        self.world.run_due()
        now_ms = self.world.now_ms
        for text, known in self.known.items():
            if known.until > now_ms:
                continue
            if known.state == "scheduled":
                known.state = "ready"
                known.events.append(("FIRED",))
            elif known.state == "in flight":
                if self.is_expired(text):
                    known.state = "gone"
                    known.events.append(("EXPIRED", "in_flight"))
                elif known.attempt >= MAX_ATTEMPTS:
                    known.state = "dead"
                    known.events.append(("DEAD_LETTERED", "attempts_exhausted"))
                else:
                    known.state = "ready"
                    known.events.append(("REVIVED", known.attempt))
        self.check()

    # ------------------------------------------------------------ actions without events

    @rule()
    def checkpoint(self) -> None:
        self.world.checkpoint()

    @rule()
    def retire(self) -> None:
        self.world.background()
        self.check()
        for text, known in self.known.items():
            if known.state == "ready" and self.is_expired(text):
                known.state = "gone"
                known.events.append(("EXPIRED", "retention"))
        self.compare()

    @rule(power_cut=st.booleans())
    def restart(self, power_cut: bool) -> None:
        self.world.restart(power_cut=power_cut)
        self.run_out()

    @rule()
    def fail_over(self) -> None:
        self.world.fail_over()
        self.run_out()

    @rule()
    def restart_without_derived_files(self) -> None:
        disk = self.world.disk.after_kill()
        for folder in ("queues", "index", "snapshots"):
            for name in disk.names(folder):
                disk.remove(name)
        self.world.disk = disk
        self.world.open()
        self.run_out()

    @rule()
    def delete_another_topic(self) -> None:
        self.world.send("x", topic="other")
        self.world.engine.administration.delete_topic("other", self.world.now_ms)
        self.world.commit()

    # ------------------------------------------------------------ checks

    def check(self) -> None:
        """Continue the read."""
        self.world.settle()
        for event in read(self.world, self.position, self.number, events_max=7):
            if event.message_id != "id-x":
                self.fold.take(event)
        self.position, self.number = self.world.engine.log.committed_offset, 0

    def compare(self) -> None:
        events = {text: known.events for text, known in self.known.items()}
        assert {text: self.fold.seen[text] for text in events} == events

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.retire()
        begin = self.world.engine.log.min_offset
        forget_event_lookups(self.world.engine)
        again = [event for event in read(self.world, 0, events_max=5) if event.message_id != "id-x"]
        seen = [event for event in self.fold.events if event.position >= begin]
        assert len(again) == len(seen)
        for one, other in zip(again, seen, strict=True):
            same = (
                "position",
                "number",
                "kind",
                "at_ms",
                "delivery_id",
                "delivery_index",
                "due_at_ms",
                "reason",
                "body_crc32",
            )
            assert [getattr(one, name) for name in same] == [getattr(other, name) for name in same]
            if one.message_id:
                assert one == other
            else:
                assert one.topic == "" or (one[4:8], one[17]) == (other[4:8], other[17])
        assert self.fold.moved == sum(event.kind is EventKind.MOVED for event in self.fold.events)


EventModel.TestCase.settings = settings(
    max_examples=examples(60),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestEventModel = EventModel.TestCase
