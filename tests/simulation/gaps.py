"""Gaps, purges and replays: messages that retention removes, and groups that an operator resets.

A third of the seeds have gaps. Most of these have a retention of some hundred KiB, which is a few
seconds. The others have no client that never settles, so that topics free settled messages.
Segments go while their messages are ready, in flight, locked, or copies in a retry topic or a
dead-letter topic. An operator resets consumer groups, purges topics, changes their retention and
asks read-only questions.

The store is read before each removal and each reset. So the judge knows exactly which messages may
be missing. A pending delayed message is in no queue: retention must keep it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, Final, NamedTuple, final

from tests.simulation.clients import Client, Subscription, bury, hoard
from tests.simulation.processes import Broker
from tests.simulation.questions import AGO_MS, Questions
from tests.support.worlds.questions import ask_everything
from tidemill.broker.engine.configuration.administration import ResetTarget
from tidemill.broker.engine.engine import Engine
from tidemill.broker.engine.layout import message, queue_entry
from tidemill.broker.engine.layout.block_file import BlockFileDamaged
from tidemill.broker.engine.layout.numbers import QueueId, TopicId
from tidemill.broker.engine.layout.record import RecordKind
from tidemill.broker.engine.layout.trim import TrimmedQueue, TrimReason
from tidemill.broker.engine.metadata.topic_retention import (
    KEEP_FOREVER_MS,
    RETENTION_MS_MIN,
    RetentionChange,
)
from tidemill.broker.engine.queue_trims import Readers
from tidemill.broker.engine.store.consume_queue import ConsumeQueue
from tidemill.broker.engine.upkeep.parts import Steps
from tidemill.broker.server.admin.topics import TopicAdmin
from tidemill.common.errors import QueryFailed, Repairing, ServiceError
from tidemill.message import stored_message
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

GAPS_PART: Final = 1 / 3  # the share of seeds with gaps
RETENTION_BYTES: Final = (0, 0, 200_000, 400_000, 800_000)  # 3 to 10 s of a run; 0: no limit
RETENTION_MS: Final = (20_000, 72 * 3600 * 1000)  # a broker removes by age after a minute
PATIENCE_S: Final = (0.001, 0.01, 1.0, 1.0)  # of the operator
LOOK_S: Final = 1.0
ANSWER_S: Final = 2.0  # until the operator gives up a question
# Orders of the operator, with weights.
ORDERS: Final = {"reset": 3, "purge": 1, "retention": 1, "question": 6}
RETENTIONS: Final = (  # of a topic
    *[RetentionChange(frees_acked=True)] * 5,
    RetentionChange(frees_acked=False),
    RetentionChange(ms=RETENTION_MS_MIN),
    RetentionChange(ms=KEEP_FOREVER_MS),
    RetentionChange(ms=0),
)
OFFSET: Final = 100  # an old one in a long run; a reset moves it into the queue
RESETS: Final = ("latest", "latest", "earliest", "offset", "time")
BURIERS: Final = "buriers"


class ResetEffect(NamedTuple):
    """The messages that a reset voids, and those that come again."""

    void: set[str]
    again: set[str]
    retiring: set[str]  # they may be removed before they come again
    reset_at: int


@final
class Gaps:
    """Retention and an operator, and their effect on the messages of some subscriptions."""

    def __init__(self, seed: int, subscriptions: Sequence[Subscription], random: Random) -> None:
        chosen = Random(f"gaps {seed}")
        self._has_gaps = chosen.random() < GAPS_PART
        self._retention_bytes = chosen.choice(RETENTION_BYTES)
        self._retention_ms = chosen.choice(RETENTION_MS)
        self._brokers: Sequence[Broker] = []
        self._retiring: dict[str, set[str]] = {}  # messages of the segment that is being removed
        self._subscriptions = subscriptions
        self._random = random
        self.findings: list[str] = []

    def prepare(self, brokers: Sequence[Broker]) -> None:
        """Shorten the retention of brokers before they start."""
        self._brokers = brokers
        for broker in brokers if self._has_gaps else ():
            broker.config = replace(
                broker.config,
                retention_bytes=self._retention_bytes,
                retention_ms=self._retention_ms,
            )
            broker.watch = partial(self._watch, broker.name)

    @property
    def has_hoarders(self) -> bool:
        """Whether some clients never settle their messages."""
        return not self._has_gaps or self._retention_bytes > 0

    def begin_clients(self, new_client: Callable[[str], Client]) -> list[asyncio.Task[None]]:
        """Begin clients that fill the dead letters of a group, and hold some of them."""
        if not self._has_gaps:
            return []
        bodies = [
            bury(new_client(f"burier-{topic}"), topic, BURIERS) for topic in ("plain", "fifo")
        ]
        if self.has_hoarders:
            bodies.append(hoard(new_client("mourner"), f"%DLQ%{BURIERS}", "mourners"))
        return [asyncio.ensure_future(one) for one in bodies]

    def begin_operator(self, story: list[str]) -> list[asyncio.Task[None]]:
        """Begin an operator who resets groups and asks questions."""
        return [asyncio.ensure_future(self._operate(story))] if self._has_gaps else []

    def _watch(self, broker: str, engine: Engine) -> None:
        """Record the messages of each segment before retention removes it."""
        retire = engine.retention.retire_oldest

        def watched(now_ms: int) -> Steps:
            messages = _messages_of_the_oldest_segment(engine)
            self._retiring[broker] = set[str]().union(*messages.values())
            for one in self._subscriptions:
                one.history.remove(_without_copies(engine, one, messages))
            yield from retire(now_ms)

        trim = engine.trims.trim

        def watched_trim(
            rows: Sequence[TrimmedQueue], readers: Readers, now_ms: int, **options: Any
        ) -> Generator[None, None, None]:
            messages = _messages_before(engine, rows)
            self._retiring.setdefault(broker, set()).update(*messages.values())
            for one in self._subscriptions:
                removed = _without_later_copies(engine, one, messages, rows)
                if _are_settled(engine, one, rows):
                    removed -= one.history.unsettled()
                one.history.remove(removed)
            yield from trim(rows, readers, now_ms, **options)

        engine.retention.retire_oldest = watched  # type: ignore[method-assign]  # it calls the same
        engine.trims.trim = watched_trim  # type: ignore[method-assign]  # it calls the same

    async def drain(self, end_s: float) -> None:
        """Wait until the lag of the groups is 0: nothing counts a removed message for ever."""
        lag = {"unknown": 0} if self._has_gaps else {}
        while lag and asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(LOOK_S)
            try:
                lag = await self._measure_lag()
            except (ServiceError, TimeoutError):
                continue
        if lag:
            self.findings.append(f"messages that are ready or in flight at the end: {lag}")

    async def _measure_lag(self) -> dict[str, int]:
        """Return the lag of each group that is not at the end of its topic, by broker."""
        lag = Counter[str]()
        async with asyncio.timeout(LOOK_S):
            for broker in self._brokers:
                for one in self._subscriptions:
                    lag[f"{one.group} at {broker.name}"] = await broker.rounds.read(
                        lambda engine, _turn, one=one: _lag_of(engine, one)  # type: ignore[misc]  # no type
                    )
        return {name: count for name, count in lag.items() if count}

    async def _operate(self, story: list[str]) -> None:
        while True:
            await asyncio.sleep(self._random.expovariate(1))
            (order,) = self._random.choices(list(ORDERS), list(ORDERS.values()))
            match order:
                case "reset":
                    what = await self._reset()
                case "purge":
                    what = await self._purge()
                case "retention":
                    what = await self._change_retention()
                case _:
                    await self._ask()
                    continue
            story.append(f"{asyncio.get_running_loop().time():.3f} s: {what}")

    async def _reset(self) -> str:
        """Reset a group at a broker. The operator may give up at any moment."""
        random = self._random
        broker, one = random.choice(self._brokers), random.choice(self._subscriptions)
        what, ago_ms = random.choice(RESETS), random.choice(AGO_MS)
        try:
            async with asyncio.timeout(random.choice(PATIENCE_S)):
                effect = await broker.rounds.call(
                    lambda engine, turn: self._apply_reset(
                        broker.name,
                        engine,
                        one,
                        _target(engine, one, what, turn.now_ms - ago_ms),
                        turn.now_ms,
                    )
                )
        except (ServiceError, TimeoutError) as error:
            return f"reset of {one.group} to {what}: {str(error) or 'given up'}"
        one.history.expect_no_more(effect.void, broker.name)
        one.history.expect_again(effect.again - effect.retiring, effect.reset_at)
        counts = f"{len(effect.void)} void, {len(effect.again)} again"
        return f"reset of {one.group} to {what} at {broker.name}: {counts}"

    def _apply_reset(
        self, broker: str, engine: Engine, one: Subscription, target: ResetTarget, now_ms: int
    ) -> ResetEffect:
        """Reset a group, and record the effect on each of its messages."""
        void, again = _affected(engine, one, target)
        engine.administration.reset_offset(one.group, one.topic, target, now_ms)
        one.history.remove(void)
        reset_at = one.history.replay(again)
        return ResetEffect(void, again, self._retiring.get(broker, set()), reset_at)

    async def _purge(self) -> str:
        """Purge a topic at a broker. The operator may give up at any moment.

        `_watch` records the messages of each queue at the moment of its purge.
        """
        random = self._random
        broker, one = random.choice(self._brokers), random.choice(self._subscriptions)
        request = pb.PurgeTopicRequest(name=one.topic, with_retries=random.random() < 0.5)
        if random.random() < 0.3:
            request.before_timestamp_ms = broker.clock.wall_ms() - random.choice(AGO_MS)
        what = f"purge of {one.topic} at {broker.name}"
        try:
            async with asyncio.timeout(random.choice(PATIENCE_S)):
                reply = await TopicAdmin(broker.rounds).PurgeTopic(request)
        except (ServiceError, TimeoutError) as error:
            return f"{what}: {str(error) or 'given up'}"
        return f"{what}: {reply.messages} messages"

    async def _change_retention(self) -> str:
        """Change the retention of a topic. The operator may give up at any moment."""
        random = self._random
        one, change = random.choice(self._subscriptions), random.choice(RETENTIONS)
        what = f"retention of {one.topic}: {change}"
        try:
            async with asyncio.timeout(random.choice(PATIENCE_S)):
                await self._brokers[0].rounds.call(
                    lambda engine, turn: engine.administration.put_topic(
                        one.topic, type_=None, queues=0, retention=change, now_ms=turn.now_ms
                    )
                )
        except (ServiceError, TimeoutError) as error:
            return f"{what}: {str(error) or 'given up'}"
        return what

    async def _ask(self) -> None:
        """Ask a broker all read-only questions in one round, or one in several."""
        random = self._random
        broker, one = random.choice(self._brokers), random.choice(self._subscriptions)
        rounds = broker.rounds
        message_id = f"{one.topic}-{random.randint(1, one.count + 1)}"
        try:
            async with asyncio.timeout(ANSWER_S):
                if random.random() < 0.3:
                    await rounds.read(lambda engine, turn: ask_everything(engine, turn.now_ms))
                elif rounds.engine.catalog.topics and rounds.engine.catalog.groups:
                    # A removed broker group has neither.
                    await Questions(rounds, random, message_id).ask()
        except (ServiceError, TimeoutError) as error:
            if isinstance(error, QueryFailed):
                self.findings.append(f"a question of {broker.name} failed: {error.__cause__!r}")
        except Exception as error:  # noqa: BLE001  # a finding of any kind
            if broker.is_alive and broker.rounds is rounds:
                self.findings.append(f"a question of {broker.name} ended with {error!r}")


def _lag_of(engine: Engine, one: Subscription) -> int:
    group = engine.catalog.find_group(one.group)
    queues = [] if group is None else engine.inspection.group_progress(group)
    return sum(queue.ready_count + queue.in_flight_count for queue in queues)


def _messages_of_the_oldest_segment(engine: Engine) -> dict[TopicId, set[str]]:
    """Return the keys of the messages in the queues of each topic. A key is the message id."""
    oldest, found = engine.log.segments[0], defaultdict[TopicId, set[str]](set)
    for record in engine.log.reader.walk(oldest, oldest.start):
        if record.header.kind == RecordKind.MESSAGE:
            topic_id = message.PLACE.unpack_from(record.body)[0]
            found[topic_id].add(stored_message.message_id_of(record.tail))
    return found


def _without_copies(
    engine: Engine, one: Subscription, messages: dict[TopicId, set[str]]
) -> set[str]:
    """Return the messages of the oldest segment without a later copy for the group."""
    topic, retries = engine.catalog.find_topic(one.topic), _retry_queues(engine, one)
    removed = set() if topic is None else set(messages.get(topic.id, ()))
    for queue in retries:
        removed |= messages.get(queue.topic_id, set())
        with suppress(BlockFileDamaged):  # The rebuild comes first. Then retention begins again.
            low = queue.offset_behind(engine.log.segments[0].end)
            removed -= _keys(engine, queue, low, queue.max_offset)
    return removed


def _messages_before(engine: Engine, rows: Sequence[TrimmedQueue]) -> dict[TopicId, set[str]]:
    """Return the keys of the messages that rows remove, by topic."""
    found = defaultdict[TopicId, set[str]](set)
    for row in rows:
        queue = engine.catalog.queues[row.topic_id, row.queue_id]
        with suppress(BlockFileDamaged):  # The rebuild comes first. Then retention begins again.
            found[row.topic_id] |= _keys(engine, queue, queue.min_offset, row.low)
    return found


def _without_later_copies(
    engine: Engine,
    one: Subscription,
    messages: dict[TopicId, set[str]],
    rows: Sequence[TrimmedQueue],
) -> set[str]:
    """Return the messages that rows remove without a later copy for the group."""
    topic, lows = engine.catalog.find_topic(one.topic), {row[:2]: row.low for row in rows}
    removed = set() if topic is None else set(messages.get(topic.id, ()))
    for queue in _retry_queues(engine, one):
        removed |= messages.get(queue.topic_id, set())
        low = max(lows.get((queue.topic_id, queue.queue_id), 0), queue.min_offset)
        with suppress(BlockFileDamaged):
            removed -= _keys(engine, queue, low, queue.max_offset)
    return removed


def _are_settled(engine: Engine, one: Subscription, rows: Sequence[TrimmedQueue]) -> bool:
    """Return whether rows may only remove messages that the group has settled."""
    topic, group = engine.catalog.find_topic(one.topic), engine.catalog.find_group(one.group)
    if topic is None or group is None:
        return False
    has_begun = any(topic_id == topic.id for topic_id, _ in group.begun)
    return has_begun and all(row.reason is TrimReason.ACKED for row in rows)


def _target(engine: Engine, one: Subscription, what: str, since_ms: int) -> ResetTarget:
    if what == "time":
        topic = engine.catalog.find_topic(one.topic)
        assert topic is not None, "nothing deletes a judged topic"
        search = engine.inspection.look_up_time(topic, since_ms)
        while search.step():
            pass
        return ResetTarget(offsets=search.offsets)
    if what == "offset":
        return ResetTarget(offset=OFFSET)
    return ResetTarget(earliest=what == "earliest", latest=what == "latest")


def _affected(engine: Engine, one: Subscription, target: ResetTarget) -> tuple[set[str], set[str]]:
    """Return the messages that a reset voids, and those that come again."""
    _, topic, offsets = engine.administration.plan_reset(one.group, one.topic, target)
    void, again = set[str](), set[str]()
    try:
        for queue, offset in zip(engine.catalog.queues_of(topic), offsets.values(), strict=True):
            void |= _keys(engine, queue, queue.min_offset, offset)
            again |= _keys(engine, queue, offset, queue.max_offset)
        for queue in _retry_queues(engine, one):
            void |= _keys(engine, queue, queue.min_offset, queue.max_offset)
    except BlockFileDamaged as error:
        raise Repairing from error
    return void - again, again


def _retry_queues(engine: Engine, one: Subscription) -> list[ConsumeQueue]:
    catalog = engine.catalog
    group, topic = catalog.find_group(one.group), catalog.find_topic(one.topic)
    if group is None or topic is None or (group.id, topic.id) not in catalog.retry_topic_ids:
        return []
    return [catalog.queue(catalog.retry_topic_ids[group.id, topic.id], QueueId(0))]


def _keys(engine: Engine, queue: ConsumeQueue, begin: int, end: int) -> set[str]:
    """Return the keys of the messages from an offset to another one."""
    entries = queue.data(begin, end - begin) if begin < end else b""
    return {
        stored_message.message_id_of(engine.log.read(log_offset)[1])
        for log_offset, _, _ in queue_entry.ENTRY.iter_unpack(entries)
    }
