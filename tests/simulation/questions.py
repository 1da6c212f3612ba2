"""Read-only calls of operators, which take several turns of the event loop of a broker.

Between two slices of an answer, retention removes messages, an operator resets groups or deletes
topics, and consumers receive and ack.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random
from typing import Final, final

from tidemill.broker.metrics.traffic import Traffic
from tidemill.broker.server.admin.consumer_groups import ConsumerGroupAdmin
from tidemill.broker.server.admin.deliveries import DeliveryAdmin
from tidemill.broker.server.admin.messages import MessageAdmin
from tidemill.broker.server.admin.timers import TimerAdmin
from tidemill.broker.server.admin.topics import TopicAdmin
from tidemill.broker.server.reader.listings import BrokerReader
from tidemill.broker.server.reader.pulls import PullReader
from tidemill.broker.server.round.rounds import Rounds
from tidemill.common.errors import QueryFailed
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pipeline
from tidemill.transport.grpc.status import RpcCode, RpcError

AGO_MS: Final = (100, 1_000, 5_000, 3_600_000)
WAIT_MS: Final = 1_000


@final
class Questions:
    """Calls about random topics, consumer groups, messages and positions of a broker."""

    def __init__(self, rounds: Rounds, random: Random, message_id: str) -> None:
        self._rounds = rounds
        self._random = random
        self._message_id = message_id
        catalog = rounds.engine.catalog
        self._topic = random.choice(list(catalog.topics.values()))
        self._group = random.choice(list(catalog.groups.values()))
        self._queue = random.choice(list(catalog.queues_of(self._topic)))
        low, high = int(self._queue.min_offset), int(self._queue.max_offset)
        self._offset = random.choice((0, low, random.randint(low, high), high))

    async def ask(self) -> None:
        """Call one method. Raises QueryFailed if the answer is an unexpected error."""
        calls: list[Callable[[], Awaitable[object]]] = [
            self._read_events,
            self._read_listing,
            self._read_messages,
            self._read_timers,
            self._read_groups,
            self._pull,
        ]
        try:
            await self._random.choice(calls)()
        except RpcError as error:
            if error.code == RpcCode.INTERNAL:
                raise QueryFailed(str(error)) from error

    async def _read_events(self) -> object:
        log = self._rounds.engine.log
        position = self._random.randint(int(log.min_offset), int(log.committed_offset))
        request = pipeline.ReadEventsRequest(
            from_position=self._random.choice((0, position)),
            message_id=self._random.choice(("", self._message_id)),
        )
        request.from_message = bool(request.message_id) and self._random.random() < 0.5
        return await BrokerReader(self._rounds).ReadEvents(request)

    async def _read_listing(self) -> object:
        reader, names = BrokerReader(self._rounds), [self._topic.name]
        match self._random.randrange(4):
            case 0:
                return await reader.GetQueues(pipeline.GetQueuesRequest(topics=names))
            case 1:
                return await reader.ListProgress(pipeline.ListProgressRequest())
            case 2:
                return await reader.ListPending(pipeline.ListPendingRequest(with_messages=True))
            case _:
                return await reader.ListInFlight(pipeline.ListInFlightRequest())

    async def _read_messages(self) -> object:
        admin, topic = MessageAdmin(self._rounds, Traffic()), self._topic.name
        if self._random.random() < 0.5:
            return await admin.FindMessages(
                pb.FindMessagesRequest(topic=topic, message_id=self._message_id)
            )
        return await admin.ReadMessages(
            pb.ReadMessagesRequest(
                topic=topic, queue_id=self._queue.queue_id, from_offset=self._offset
            )
        )

    async def _read_timers(self) -> object:
        admin = TimerAdmin(self._rounds)
        match self._random.randrange(3):
            case 0:
                return await admin.ListTimers(pb.ListTimersRequest(page_size=100))
            case 1:
                return await admin.CountTimers(pb.CountTimersRequest(within_ms=[1_000, 60_000]))
            case _:
                return await admin.GetTimer(
                    pb.GetTimerRequest(timer_id=self._random.randrange(100))
                )

    async def _read_groups(self) -> object:
        match self._random.randrange(4):
            case 0:
                progress = pb.GetGroupProgressRequest(name=self._group.name)
                return await ConsumerGroupAdmin(self._rounds).GetGroupProgress(progress)
            case 1:
                topic = pb.GetTopicStatusRequest(name=self._topic.name)
                return await TopicAdmin(self._rounds).GetTopicStatus(topic)
            case 2:
                return await DeliveryAdmin(self._rounds).GetHeld(pb.GetHeldRequest())
            case _:
                wanted = pb.DeliveryFilter(group=self._group.name)
                return await DeliveryAdmin(self._rounds).GetDeliveries(
                    pb.GetDeliveriesRequest(filter=wanted)
                )

    async def _pull(self) -> object:
        reader = PullReader(self._rounds, Traffic())
        topic_id, queue_id, offset = self._topic.id, self._queue.queue_id, self._offset
        match self._random.randrange(3):
            case 0:
                since_ms = self._rounds.now_ms - self._random.choice(AGO_MS)
                return await reader.QueryOffset(
                    pb.QueryOffsetRequest(
                        topic_id=topic_id, queue_id=queue_id, timestamp_ms=since_ms
                    )
                )
            case 1:
                return await reader.AwaitMessage(
                    pb.AwaitMessageRequest(
                        topic_id=topic_id, queue_id=queue_id, offset=offset, wait_ms=WAIT_MS
                    )
                )
            case _:
                return await reader.Pull(
                    pb.PullRequest(topic_id=topic_id, queue_id=queue_id, offset=offset)
                )
