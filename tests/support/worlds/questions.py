"""Every read-only question about an engine, asked at once.

Messages, topics and groups may be gone at any moment. A question answers without them; it never
fails with another error than a ServiceError.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tidemill.broker.engine.engine import Engine
from tidemill.broker.engine.events.event import EventQuery
from tidemill.broker.engine.layout.numbers import QueueId, TimerId
from tidemill.broker.engine.metadata.catalog import ConsumerGroup, Topic
from tidemill.broker.engine.queries.in_flight import InFlightFilter, QueuePosition
from tidemill.broker.engine.timer.pending import PendingQuery
from tidemill.broker.engine.timer.status import TimerQuery
from tidemill.common.errors import ServiceError
from tidemill.message.client_key import ClientKey

PAGE = 1_000  # longer than any listing of a test
BYTES_MAX = 64 << 20
STEPS_MAX = 100_000


def ask_everything(engine: Engine, now_ms: int) -> None:
    """Ask all questions; each must end, and none may change the state."""
    before = engine.state_mark
    for question in _questions(engine, now_ms):
        with contextlib.suppress(ServiceError):
            for steps, _ in enumerate(question):
                assert steps < STEPS_MAX, "a question does not end"
    assert engine.state_mark == before, "a question changed the state"


def _questions(engine: Engine, now_ms: int) -> Iterator[Iterator[object]]:
    catalog = engine.catalog
    topics = [topic for topic in catalog.topics.values() if catalog.is_alive(topic.id)]
    groups = list(catalog.groups.values())
    for topic in topics:
        yield _of_topic(engine, topic, now_ms)
    for group in groups:
        yield _of_group(engine, group)
        for topic in topics:
            yield _of_pair(engine, group, topic)
    yield _in_flight(engine, now_ms)
    yield _timers(engine, now_ms)
    yield _events(engine)


def _of_topic(engine: Engine, topic: Topic, now_ms: int) -> Iterator[object]:
    inspection = engine.inspection
    yield inspection.queue_status(topic)
    yield inspection.use_of(topic)
    for ago_ms in (0, 1_000, 1_000_000_000):
        search = inspection.look_up_time(topic, now_ms - ago_ms)
        while search.step():
            yield None
    for message_id, key in (("id-m0", ""), ("", "key")):
        found = inspection.search(topic, message_id=message_id, key=key)
        while found.step():
            yield None
    for queue in engine.catalog.queues_of(topic):
        yield inspection.log_bytes(queue)
        for first in (0, int(queue.min_offset), int(queue.max_offset), int(queue.max_offset) + 5):
            read = inspection.read(queue, first, max_messages=PAGE, max_bytes=BYTES_MAX)
            while read.step():
                yield read.take()


def _of_group(engine: Engine, group: ConsumerGroup) -> Iterator[object]:
    inspection = engine.inspection
    yield inspection.pulled_by(group)
    yield inspection.unpulled_by(group)
    yield inspection.topics_read(group)
    for key in inspection.queues_given(group, also=frozenset(engine.catalog.topics)):
        yield inspection.find_progress(key)
        yield inspection.find_lock(key)


def _of_pair(engine: Engine, group: ConsumerGroup, topic: Topic) -> Iterator[object]:
    inspection = engine.inspection
    yield inspection.consumer_offsets(group, topic)
    for number in range(topic.queues):
        key = group.id, topic.id, QueueId(number)
        yield inspection.find_progress(key)
        yield inspection.find_lock(key)


def _in_flight(engine: Engine, now_ms: int) -> Iterator[object]:
    inspection, wanted = engine.inspection, InFlightFilter()
    by_pop = inspection.in_flight(wanted, after=None, max_messages=PAGE)
    while by_pop.step(now_ms):
        yield by_pop.take()
    by_queue = inspection.in_flight_by_queue(
        wanted, first=QueuePosition(0, 0, 0, 0), max_messages=PAGE
    )
    while by_queue.step(now_ms):
        yield by_queue.take()
    for client_id in ("", "client-1", "nobody"):
        yield inspection.in_flight_of(ClientKey(client_id))


def _timers(engine: Engine, now_ms: int) -> Iterator[object]:
    commands = engine.timers.commands
    search = commands.search(TimerQuery(page_size=PAGE))
    while search.step():
        yield None
    for status in search.found:
        yield commands.status(status.timer_id)
    with contextlib.suppress(ServiceError):
        yield commands.status(TimerId(0))
    count = commands.count_due([0, 1_000_000], firing_ms=now_ms)
    while count.step():
        yield None
    walk = commands.pending(PendingQuery(with_messages=True))
    while walk.step():
        yield None


def _events(engine: Engine) -> Iterator[object]:
    log = engine.log
    for position in (int(log.min_offset), int(log.committed_offset)):
        read = engine.events.read(
            EventQuery(),
            from_position=position,
            from_index=0,
            until_position=0,
            log_bytes_max=BYTES_MAX,
            events_max=PAGE,
        )
        while read.step():
            yield read.take()
