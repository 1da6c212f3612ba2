"""The contract of a link, for the broker in memory and the real one; tests of a proxy rely on it.

The real broker has rounds and links over a real engine, on a disk in memory. The fake has no time:
it does not revive messages and has no deadlines.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Protocol
from zlib import crc32

import pytest

from tests.support.bodies import body_of
from tests.support.worlds.engine_world import blob
from tests.support.worlds.memory_broker import MemoryBroker
from tests.support.worlds.memory_engine import NOW_MS
from tests.support.worlds.round_world import RoundWorld
from tidemill.broker.engine.pop.readiness import READY_COUNT_MAX
from tidemill.broker.engine.timer.patch import with_due_time
from tidemill.message import stored_message
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

TOPIC, GROUP, ORDERED = "contract", "readers", "readers-in-order"
QUEUES = 2
INVISIBLE_MS = 30_000
POLL_MS = 20_000
UNKNOWN = 1_000_000  # an id of no topic, group or timer


class Proxy(Protocol):
    """The proxy's end of a link."""

    config: pb.ConfigUpdate

    async def send(self, frame: pb.RequestFrame) -> None:
        """Send a frame."""

    async def reply(self) -> pb.ReplyFrame:
        """Return the next reply."""


class Session:
    """A link, and the topics and groups that it has reported."""

    def __init__(self, proxy: Proxy, now_ms: int) -> None:
        self.now_ms = now_ms
        self.proxy = proxy
        self.topics: dict[str, pb.TopicConfig] = {}
        self.groups: dict[str, pb.GroupConfig] = {}
        self.updates: list[pb.ConfigUpdate] = []
        self._sequence = 0
        self._learn(proxy.config)

    @property
    def topic_id(self) -> int:
        return self.topics[TOPIC].id

    @property
    def group_id(self) -> int:
        return self.groups[GROUP].id

    async def ask(self, frame: pb.RequestFrame) -> pb.ReplyFrame:
        """Send a frame, and return all replies up to its answer, merged."""
        self._sequence += 1
        frame.sequence = self._sequence
        await self.proxy.send(frame)
        merged = pb.ReplyFrame()
        while merged.answered_sequence != self._sequence:
            merged.MergeFrom(await self.reply())
        return merged

    async def reply(self) -> pb.ReplyFrame:
        reply = await self.proxy.reply()
        self._learn(reply.config)
        return reply

    def _learn(self, config: pb.ConfigUpdate) -> None:
        self.updates.append(config)
        self.topics |= {topic.name: topic for topic in config.topics}
        self.groups |= {group.name: group for group in config.groups}

    # ------------------------------------------------------------ requests

    async def append(self, *texts: str, queue_id: int = 0, tag: str = "") -> list[int]:
        """Send plain messages; return their offsets."""
        blobs = [blob(text, tag=tag) for text in texts]
        reply = await self.ask(pb.RequestFrame(appends=self.appends(blobs, queue_id=queue_id)))
        assert list(reply.appends.request_ids) == list(range(1, len(texts) + 1))
        assert list(reply.appends.due_at_ms) == [], "nothing was scheduled"
        return list(reply.appends.queue_offsets)

    def appends(
        self, blobs: Iterable[bytes], *, topic_id: int | None = None, queue_id: int = 0
    ) -> pb.AppendBatch:
        batch = pb.AppendBatch()
        for request_id, data in enumerate(blobs, 1):
            batch.request_ids.append(request_id)
            batch.topic_ids.append(self.topic_id if topic_id is None else topic_id)
            batch.queue_ids.append(queue_id)
            batch.crcs.append(crc32(data))
            batch.blobs.append(data)
        return batch

    def notification(
        self,
        *,
        request_id: int = 1,
        group_id: int | None = None,
        topic_id: int | None = None,
        poll_ms: int = 0,
        tags: tuple[str, ...] = (),
    ) -> pb.NotificationRequest:
        return pb.NotificationRequest(
            request_id=request_id,
            group_id=self.group_id if group_id is None else group_id,
            topic_id=self.topic_id if topic_id is None else topic_id,
            poll_duration_ms=poll_ms,
            tags=tags,
        )

    async def ready_count(self, *, tags: tuple[str, ...] = ()) -> int:
        """Return the number of ready messages, without waiting."""
        request = self.notification(request_id=7, tags=tags)
        reply = await self.ask(pb.RequestFrame(notifications=[request]))
        [answered] = reply.notifications
        assert (answered.request_id, answered.is_unsure) == (7, False)
        return answered.ready_count

    def pop_request(
        self,
        *,
        request_id: int = 1,
        group_id: int | None = None,
        topic_id: int | None = None,
        want: int = 32,
        poll_ms: int = 0,
        tags: tuple[str, ...] = (),
    ) -> pb.PopRequest:
        return pb.PopRequest(
            request_id=request_id,
            group_id=self.group_id if group_id is None else group_id,
            topic_id=self.topic_id if topic_id is None else topic_id,
            max_messages=want,
            invisible_duration_ms=INVISIBLE_MS,
            poll_duration_ms=poll_ms,
            tags=tags,
        )

    async def pop(
        self, *, want: int = 32, topic_id: int | None = None, tags: tuple[str, ...] = ()
    ) -> list[pb.Batch]:
        request = self.pop_request(want=want, topic_id=topic_id, tags=tags)
        [answer] = (await self.ask(pb.RequestFrame(pops=[request]))).pops
        assert answer.request_id == 1
        return list(answer.batches)

    async def ack(self, batch: pb.Batch, *indexes: int) -> list[int]:
        """Ack messages of a batch by their index; return the results."""
        acks = pb.AckBatch()
        for request_id, index in enumerate(indexes, 1):
            acks.request_ids.append(request_id)
            acks.group_ids.append(self.group_id)
            acks.topic_ids.append(self.topic_id)
            acks.slots.append(batch.slot)
            acks.delivery_ids.append(batch.delivery_id)
            acks.indexes.append(index)
            acks.visible_at_ms.append(batch.visible_at_ms)
        reply = await self.ask(pb.RequestFrame(acks=acks))
        assert list(reply.acks.request_ids) == list(acks.request_ids)
        return list(reply.acks.results)

    async def change(
        self, batch: pb.Batch, index: int, invisible_ms: int, **how: bool
    ) -> pb.ReplyFrame:
        request = pb.ChangeInvisibleRequest(
            request_id=1,
            group_id=self.group_id,
            topic_id=self.topic_id,
            slot=batch.slot,
            delivery_id=batch.delivery_id,
            index=index,
            visible_at_ms=batch.visible_at_ms,
            invisible_duration_ms=invisible_ms,
            suspend=how.get("suspend", False),
            gives_back=how.get("gives_back", False),
        )
        return await self.ask(pb.RequestFrame(changes=[request]))

    async def dead_letter(self, batch: pb.Batch, index: int) -> pb.ReplyFrame:
        request = pb.DeadLetterRequest(
            request_id=1,
            group_id=self.group_id,
            topic_id=self.topic_id,
            slot=batch.slot,
            delivery_id=batch.delivery_id,
            index=index,
            visible_at_ms=batch.visible_at_ms,
        )
        return await self.ask(pb.RequestFrame(dead_letters=[request]))

    async def schedule(self, delay_ms: int = 60_000) -> tuple[int, int]:
        """Send a delayed message; return its timer id and due time."""
        data = self.delayed(delay_ms)
        reply = await self.ask(pb.RequestFrame(appends=self.appends([data])))
        return reply.appends.queue_offsets[0], reply.appends.due_at_ms[0]

    def delayed(self, delay_ms: int) -> bytes:
        plain = blob("delayed", kind=stored_message.TYPE_DELAY)
        data, _ = with_due_time(plain, crc32(plain), self.now_ms + delay_ms)
        return bytes(data)

    async def cancel(self, timer_id: int, *, topic_id: int | None = None) -> pb.ReplyFrame:
        request = pb.RecallRequest(
            request_id=1, timer_id=timer_id, topic_id=topic_id or self.topic_id
        )
        return await self.ask(pb.RequestFrame(timer_cancels=[request]))


@contextlib.asynccontextmanager
async def in_memory() -> AsyncIterator[Session]:
    broker = MemoryBroker()
    broker.put_topic(TOPIC, queues=QUEUES)
    broker.put_group(GROUP)
    broker.put_group(ORDERED, is_ordered=True)
    async with broker.proxy() as proxy:
        yield Session(proxy, NOW_MS)


@contextlib.asynccontextmanager
async def real() -> AsyncIterator[Session]:
    world = RoundWorld()
    world.world.topic(TOPIC, queues=QUEUES)
    world.world.group(GROUP)
    world.world.group(ORDERED, is_ordered=True)
    world.world.engine.take_config_changes()
    async with world.running(), world.proxy() as proxy:
        yield Session(proxy, world.world.now_ms)


BROKERS: dict[str, Callable[[], AbstractAsyncContextManager[Session]]] = {
    "in memory": in_memory,
    "real": real,
}
Scenario = Callable[[Session], Awaitable[None]]
Run = Callable[[Scenario], None]


@pytest.fixture(params=BROKERS)
def run(request: pytest.FixtureRequest) -> Run:
    """Return a function that runs a scenario on a link to a fresh broker of each kind."""

    def run(scenario: Scenario) -> None:
        async def main() -> None:
            async with asyncio.timeout(20), BROKERS[request.param]() as session:
                await scenario(session)

        asyncio.run(main())

    return run


def bodies(batches: Iterable[pb.Batch]) -> list[str]:
    return [body_of(data).decode() for batch in batches for data in batch.blobs]


def errors(reply: pb.ReplyFrame) -> list[tuple[int, str]]:
    return [(failure.request_id, failure.error) for failure in reply.failures]


# ------------------------------------------------------------ configuration


def test_the_complete_configuration_comes_first(run: Run) -> None:
    async def scenario(session: Session) -> None:
        config = session.proxy.config
        assert config.is_complete
        assert config.auto_create_topics
        assert config.auto_create_groups
        assert config.broker_name
        assert len(config.handle_secret) == 32
        assert {TOPIC} <= {topic.name for topic in config.topics}
        topic, group = session.topics[TOPIC], session.groups[GROUP]
        assert (topic.queues, topic.is_system, topic.version) == (QUEUES, False, 1)
        assert group.delivery_order == pb.DELIVERY_ORDER_CONCURRENT
        assert session.groups[ORDERED].delivery_order == pb.DELIVERY_ORDER_ORDERED
        assert group.max_attempts > 0
        assert group.HasField("exponential") != group.HasField("customized")

    run(scenario)


def test_ensure_creates_missing_names_and_reports_them_before_its_answer(run: Run) -> None:
    async def scenario(session: Session) -> None:
        ensure = pb.EnsureRequest(request_id=7, topic="new", group="new-readers")
        reply = await session.ask(pb.RequestFrame(ensures=[ensure]))
        assert [done.request_id for done in reply.ensures] == [7]
        assert not reply.config.is_complete
        assert session.topics["new"].queues >= 1
        assert session.groups["new-readers"].id != session.topics["new"].id

    run(scenario)


def test_ensure_of_existing_names_changes_nothing(run: Run) -> None:
    async def scenario(session: Session) -> None:
        ensure = pb.EnsureRequest(request_id=7, topic=TOPIC, group=GROUP)
        reply = await session.ask(pb.RequestFrame(ensures=[ensure]))
        assert [done.request_id for done in reply.ensures] == [7]
        assert not reply.config.topics
        assert not reply.config.groups

    run(scenario)


@pytest.mark.parametrize("names", [{"topic": "alone"}, {"group": "alone"}])
def test_ensure_may_name_only_a_topic_or_a_group(run: Run, names: dict[str, str]) -> None:
    async def scenario(session: Session) -> None:
        ensure = pb.EnsureRequest(request_id=7)
        for field, name in names.items():
            setattr(ensure, field, name)
        await session.ask(pb.RequestFrame(ensures=[ensure]))
        assert ("alone" in session.topics) == ("topic" in names)
        assert ("alone" in session.groups) == ("group" in names)

    run(scenario)


# ------------------------------------------------------------ appends


def test_offsets_are_counted_per_queue(run: Run) -> None:
    async def scenario(session: Session) -> None:
        assert await session.append("a", "b") == [0, 1]
        assert await session.append("c", queue_id=1) == [0]
        assert await session.append("d") == [2]

    run(scenario)


def test_a_message_for_a_missing_topic_or_queue_is_rejected_alone(run: Run) -> None:
    async def scenario(session: Session) -> None:
        appends = session.appends([blob("a"), blob("b"), blob("c")])
        appends.topic_ids[0], appends.queue_ids[1] = UNKNOWN, QUEUES
        reply = await session.ask(pb.RequestFrame(appends=appends))
        assert errors(reply) == [(1, "TopicNotFound"), (2, "BadRequest")]
        assert list(reply.appends.request_ids) == [3]
        assert all(failure.message for failure in reply.failures)

    run(scenario)


def test_a_damaged_message_is_rejected(run: Run) -> None:
    async def scenario(session: Session) -> None:
        appends = session.appends([blob("a"), b"no message at all"])
        appends.crcs[0] ^= 1
        reply = await session.ask(pb.RequestFrame(appends=appends))
        assert errors(reply) == [(1, "MessageCorrupted"), (2, "MessageCorrupted")]

    run(scenario)


# ------------------------------------------------------------ pops


def test_a_pop_returns_messages_with_their_delivery(run: Run) -> None:
    async def scenario(session: Session) -> None:
        await session.append("a", "b")
        await session.append("c", queue_id=1)
        batches = sorted(await session.pop(), key=lambda batch: batch.queue_id)
        assert [batch.queue_id for batch in batches] == [0, 1]
        assert bodies(batches) == ["a", "b", "c"]
        first = batches[0]
        assert list(first.indexes) == [0, 1]
        assert list(first.queue_offsets) == [0, 1]
        assert list(first.delivery_attempts) == [1, 1]
        assert list(first.stored_at_ms) == [session.now_ms] * 2
        assert first.popped_at_ms == session.now_ms
        assert first.visible_at_ms == session.now_ms + INVISIBLE_MS
        assert list(first.origin_topics) == []
        assert first.delivery_id != batches[1].delivery_id

    run(scenario)


def test_a_popped_message_is_hidden_only_from_its_group(run: Run) -> None:
    async def scenario(session: Session) -> None:
        await session.append("a")
        assert bodies(await session.pop()) == ["a"]
        assert await session.pop() == []
        await session.ask(pb.RequestFrame(ensures=[pb.EnsureRequest(request_id=1, group="others")]))
        other = session.pop_request(group_id=session.groups["others"].id)
        [answer] = (await session.ask(pb.RequestFrame(pops=[other]))).pops
        assert bodies(answer.batches) == ["a"]

    run(scenario)


def test_a_pop_returns_at_most_max_messages(run: Run) -> None:
    async def scenario(session: Session) -> None:
        await session.append("a", "b", "c")
        assert bodies(await session.pop(want=2)) == ["a", "b"]
        assert bodies(await session.pop(want=2)) == ["c"]

    run(scenario)


@pytest.mark.parametrize("want", [0, 33])
def test_a_pop_of_fewer_than_1_or_more_than_32_messages_is_rejected(run: Run, want: int) -> None:
    async def scenario(session: Session) -> None:
        await session.append("a")
        pop = session.pop_request(want=want)
        assert errors(await session.ask(pb.RequestFrame(pops=[pop]))) == [(1, "BadRequest")]

    run(scenario)


def test_a_pop_with_tags_returns_messages_with_one_of_the_tags(run: Run) -> None:
    async def scenario(session: Session) -> None:
        await session.append("a", tag="red")
        await session.append("b", tag="green")
        await session.append("c")
        await session.append("d", tag="blue")
        assert bodies(await session.pop(tags=("red", "blue"))) == ["a", "d"]
        assert await session.pop() == [], "the others are skipped forever"

    run(scenario)


def test_a_pop_with_an_unknown_group_or_topic_is_rejected(run: Run) -> None:
    async def scenario(session: Session) -> None:
        pops = [
            session.pop_request(request_id=1, group_id=UNKNOWN),
            session.pop_request(request_id=2, topic_id=UNKNOWN),
        ]
        reply = await session.ask(pb.RequestFrame(pops=pops))
        assert errors(reply) == [(1, "GroupNotFound"), (2, "TopicNotFound")]
        assert not reply.pops

    run(scenario)


def test_a_parked_pop_is_answered_by_a_message(run: Run) -> None:
    async def scenario(session: Session) -> None:
        parked = session.pop_request(request_id=9, poll_ms=POLL_MS)
        assert not (await session.ask(pb.RequestFrame(pops=[parked]))).pops
        appends = session.appends([blob("a")])
        reply = await session.ask(pb.RequestFrame(appends=appends))
        if not reply.pops:
            reply = await session.reply()
        assert [(one.request_id, bodies(one.batches)) for one in reply.pops] == [(9, ["a"])]

    run(scenario)


def test_a_cancelled_parked_pop_takes_no_message(run: Run) -> None:
    async def scenario(session: Session) -> None:
        parked = session.pop_request(request_id=9, poll_ms=POLL_MS)
        await session.ask(pb.RequestFrame(pops=[parked]))
        await session.ask(pb.RequestFrame(cancelled_polls=[9]))
        await session.append("a")
        assert bodies(await session.pop()) == ["a"]

    run(scenario)


# ------------------------------------------------------------ notifications


def test_a_notification_counts_ready_messages_and_takes_none(run: Run) -> None:
    async def scenario(session: Session) -> None:
        assert await session.pop() == []
        await session.append("a", "b", tag="red")
        for _ in range(2):
            assert await session.ready_count() == 2
        assert await session.ready_count(tags=("red", "blue")) == 2
        assert await session.ready_count(tags=("blue",)) == 0
        assert bodies(await session.pop()) == ["a", "b"]
        assert await session.ready_count() == 0

    run(scenario)


def test_the_count_of_a_notification_is_limited(run: Run) -> None:
    async def scenario(session: Session) -> None:
        assert await session.pop() == []
        await session.append(*map(str, range(READY_COUNT_MAX + 1)))
        assert await session.ready_count() == READY_COUNT_MAX

    run(scenario)


def test_a_notification_with_an_unknown_group_or_topic_is_rejected(run: Run) -> None:
    async def scenario(session: Session) -> None:
        notifications = [
            session.notification(request_id=1, group_id=UNKNOWN),
            session.notification(request_id=2, topic_id=UNKNOWN),
        ]
        reply = await session.ask(pb.RequestFrame(notifications=notifications))
        assert errors(reply) == [(1, "GroupNotFound"), (2, "TopicNotFound")]
        assert not reply.notifications

    run(scenario)


def test_a_parked_notification_is_answered_by_a_message(run: Run) -> None:
    async def scenario(session: Session) -> None:
        assert await session.pop() == []
        parked = session.notification(request_id=9, poll_ms=POLL_MS)
        assert not (await session.ask(pb.RequestFrame(notifications=[parked]))).notifications
        reply = await session.ask(pb.RequestFrame(appends=session.appends([blob("a")])))
        if not reply.notifications:
            reply = await session.reply()
        assert [(one.request_id, one.ready_count) for one in reply.notifications] == [(9, 1)]

    run(scenario)


def test_a_parked_pop_is_served_before_a_parked_notification(run: Run) -> None:
    async def scenario(session: Session) -> None:
        assert await session.pop() == []
        notification = session.notification(request_id=8, poll_ms=POLL_MS)
        pop = session.pop_request(request_id=9, poll_ms=POLL_MS)
        await session.ask(pb.RequestFrame(notifications=[notification], pops=[pop]))
        reply = await session.ask(pb.RequestFrame(appends=session.appends([blob("a")])))
        if not reply.pops:
            reply = await session.reply()
        [answered] = reply.pops
        assert (answered.request_id, answered.was_parked) == (9, True)
        assert not reply.notifications
        await session.append("b")
        assert bodies(await session.pop()) == ["b"]

    run(scenario)


def test_a_cancelled_parked_notification_is_not_answered(run: Run) -> None:
    async def scenario(session: Session) -> None:
        assert await session.pop() == []
        parked = session.notification(request_id=9, poll_ms=POLL_MS)
        await session.ask(pb.RequestFrame(notifications=[parked]))
        await session.ask(pb.RequestFrame(cancelled_polls=[9]))
        reply = await session.ask(pb.RequestFrame(appends=session.appends([blob("a")])))
        assert not reply.notifications
        assert await session.ready_count() == 1

    run(scenario)


# ------------------------------------------------------------ acks


def test_an_ack_settles_a_delivery_once(run: Run) -> None:
    async def scenario(session: Session) -> None:
        await session.append("a", "b")
        [batch] = await session.pop()
        assert await session.ack(batch, 0) == [pb.ACK_RESULT_APPLIED]
        assert await session.ack(batch, 0, 1) == [pb.ACK_RESULT_ALREADY, pb.ACK_RESULT_APPLIED]
        assert await session.ack(batch, 1, 1) == [pb.ACK_RESULT_ALREADY, pb.ACK_RESULT_ALREADY]

    run(scenario)


def test_an_ack_of_an_unknown_delivery_returns_gone(run: Run) -> None:
    async def scenario(session: Session) -> None:
        await session.append("a")
        [batch] = await session.pop()
        unknown = pb.Batch()
        unknown.CopyFrom(batch)
        unknown.delivery_id += UNKNOWN
        assert await session.ack(unknown, 0) == [pb.ACK_RESULT_GONE]
        assert await session.ack(batch, 0) == [pb.ACK_RESULT_APPLIED]

    run(scenario)


# ------------------------------------------------------------ changes of deliveries in flight


def test_a_changed_duration_makes_a_new_delivery_and_voids_the_first(run: Run) -> None:
    async def scenario(session: Session) -> None:
        await session.append("a", "b")
        [batch] = await session.pop()
        [changed] = (await session.change(batch, 1, 90_000)).changes
        assert changed.request_id == 1
        assert changed.visible_at_ms == session.now_ms + 90_000
        assert changed.delivery_id != batch.delivery_id
        assert errors(await session.change(batch, 1, 90_000)) == [(1, "InvalidReceiptHandle")]
        assert errors(await session.dead_letter(batch, 1)) == [(1, "InvalidReceiptHandle")]
        assert await session.ack(batch, 0, 1) == [pb.ACK_RESULT_APPLIED, pb.ACK_RESULT_GONE]
        assert await session.ack(delivery_of(changed), 0) == [pb.ACK_RESULT_APPLIED]

    run(scenario)


def test_an_acked_message_cannot_be_changed(run: Run) -> None:
    async def scenario(session: Session) -> None:
        await session.append("a")
        [batch] = await session.pop()
        await session.ack(batch, 0)
        assert errors(await session.change(batch, 0, 90_000)) == [(1, "InvalidReceiptHandle")]
        assert errors(await session.dead_letter(batch, 0)) == [(1, "InvalidReceiptHandle")]

    run(scenario)


@pytest.mark.parametrize("how", ["", "suspend", "gives_back"])
def test_a_duration_of_0_makes_a_message_visible_at_once(run: Run, how: str) -> None:
    async def scenario(session: Session) -> None:
        await session.append("a", "b")
        [batch] = await session.pop()
        await session.change(batch, 0, 0, **({how: True} if how else {}))
        again = session.pop_request(request_id=9, poll_ms=POLL_MS)
        reply = await session.ask(pb.RequestFrame(pops=[again]))
        if not reply.pops:
            reply = await session.reply()
        [one] = reply.pops[0].batches
        assert bodies([one]) == ["a"]
        assert list(one.delivery_attempts) == [1 if how else 2]

    run(scenario)


def test_a_dead_letter_ends_a_delivery_and_is_stored_for_its_group(run: Run) -> None:
    async def scenario(session: Session) -> None:
        await session.append("a")
        [batch] = await session.pop()
        reply = await session.dead_letter(batch, 0)
        assert [done.request_id for done in reply.dead_letters] == [1]
        assert await session.ack(batch, 0) == [pb.ACK_RESULT_ALREADY]
        dead = session.topics[f"%DLQ%{GROUP}"]
        assert dead.is_system
        [found] = await session.pop(topic_id=dead.id)
        assert bodies([found]) == ["a"]
        assert list(found.origin_topics) == [TOPIC]

    run(scenario)


# ------------------------------------------------------------ timers


def test_the_answer_to_a_delayed_message_has_its_timer_and_due_time(run: Run) -> None:
    async def scenario(session: Session) -> None:
        blobs = [session.delayed(60_000), blob("plain"), session.delayed(90_000)]
        reply = await session.ask(pb.RequestFrame(appends=session.appends(blobs)))
        first, plain, second = reply.appends.queue_offsets
        assert plain == 0
        assert first != second
        due = [session.now_ms + 60_000, 0, session.now_ms + 90_000]
        assert list(reply.appends.due_at_ms) == due
        assert bodies(await session.pop()) == ["plain"]

    run(scenario)


def test_a_due_delayed_message_is_stored_at_once(run: Run) -> None:
    async def scenario(session: Session) -> None:
        reply = await session.ask(pb.RequestFrame(appends=session.appends([session.delayed(0)])))
        assert list(reply.appends.queue_offsets) == [0]
        assert not any(reply.appends.due_at_ms)
        assert bodies(await session.pop()) == ["delayed"]

    run(scenario)


def test_a_timer_can_be_cancelled_twice(run: Run) -> None:
    async def scenario(session: Session) -> None:
        timer_id, _ = await session.schedule()
        for _ in range(2):
            reply = await session.cancel(timer_id)
            assert list(reply.cancelled_timers) == [1]
            assert not reply.failures

    run(scenario)


def test_a_timer_of_a_different_topic_or_an_unknown_timer_is_not_found(run: Run) -> None:
    async def scenario(session: Session) -> None:
        timer_id, _ = await session.schedule()
        await session.ask(pb.RequestFrame(ensures=[pb.EnsureRequest(request_id=1, topic="other")]))
        other = session.topics["other"].id
        for reply in (
            await session.cancel(timer_id, topic_id=other),
            await session.cancel(timer_id + UNKNOWN),
        ):
            assert errors(reply) == [(1, "MessageNotFound")]
            assert not reply.cancelled_timers

    run(scenario)


# ------------------------------------------------------------ all together


def test_requests_of_all_kinds_travel_in_one_frame(run: Run) -> None:
    async def scenario(session: Session) -> None:
        await session.append("a")
        frame = pb.RequestFrame(
            appends=session.appends([blob("b")]),
            pops=[session.pop_request(request_id=2)],
            ensures=[pb.EnsureRequest(request_id=3, topic="new")],
            timer_cancels=[
                pb.RecallRequest(request_id=4, timer_id=UNKNOWN, topic_id=session.topic_id)
            ],
        )
        reply = await session.ask(frame)
        assert list(reply.appends.request_ids) == [1]
        assert [bodies(pop.batches) for pop in reply.pops] == [["a", "b"]]
        assert [done.request_id for done in reply.ensures] == [3]
        assert errors(reply) == [(4, "MessageNotFound")]

    run(scenario)


def delivery_of(changed: pb.ChangeInvisibleReply) -> pb.Batch:
    return pb.Batch(
        slot=changed.slot, delivery_id=changed.delivery_id, visible_at_ms=changed.visible_at_ms
    )
