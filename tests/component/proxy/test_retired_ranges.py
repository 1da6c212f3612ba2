"""Reads of a queue while retention deletes its beginning. Each message is reported once."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from tests.support.worlds.proxied_broker import calls_of
from tests.support.worlds.proxy_world import HEADERS, ProxyWorld, ResponseCollector, run
from tidemill.common.clock import SystemClock
from tidemill.message.encoding import encode_stored
from tidemill.proxy.cluster.broker_calls import BrokerCalls
from tidemill.proxy.server.call import Call
from tidemill.proxy.server.pull_pages import PullPages
from tidemill.proxy.server.puller import Puller
from tidemill.proxy.server.range_reader import RangeReader
from tidemill.proxy.settings import ProxySettings
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill.transport.aio.call import RpcCall

END = 100
A_PAGE = 64
STORED = encode_stored(
    v2.Message(
        topic=v2.Resource(name="t"),
        body=b"body",
        system_properties=v2.SystemProperties(message_id="id"),
    ),
    message_type=v2.NORMAL,
    now_ms=0,
)


class Queue:
    """A queue that retires its oldest messages after each pull has read them."""

    def __init__(self, retired: list[int], matching: range = range(END)) -> None:
        self._retired = retired  # first offset after each pull
        self._matching = matching
        self._begin = 0
        self.asked: list[int] = []

    async def pull(self, _call: RpcCall, request: bytes) -> bytes:
        offset = link_pb2.PullRequest.FromString(request).offset
        self.asked.append(offset)
        until = min(offset + A_PAGE, END) if self._begin <= offset else offset
        found = [each for each in range(offset, until) if each in self._matching]
        if self._retired:
            self._begin = self._retired.pop(0)
        return link_pb2.PullReply(
            queue_offsets=found,
            log_offsets=found,
            stored_at_ms=[0] * len(found),
            delivery_attempts=[1] * len(found),
            blobs=[STORED] * len(found),
            next_offset=until,
            is_at_end=until == END,
            min_offset=self._begin,
            end_offset=END,
        ).SerializeToString()


class PullResponses(ResponseCollector):
    """The responses of a pull."""

    def __init__(self) -> None:
        super().__init__()
        self.pulled: list[service.PullMessageResponse] = []

    async def send(self, message: bytes) -> None:
        self.pulled.append(service.PullMessageResponse.FromString(message))


def calls_to(queue: Queue) -> AbstractAsyncContextManager[BrokerCalls]:
    """Return calls to a broker with `queue`."""
    return calls_of(Pull=queue.pull)


async def read_all(world: ProxyWorld, queue: Queue) -> tuple[list[int], list[range]]:
    """Read the whole queue. Return the offsets of its messages, and of missing ones."""
    offsets: list[int] = []
    gone: list[range] = []
    async with calls_to(queue) as calls:
        reader = RangeReader(world.cluster, PullPages(calls))
        async for page in reader.read_messages(pb.ReadMessagesRequest(topic="t"), "10.0.0.1"):
            reply = pb.ReadMessagesReply.FromString(page)
            offsets += [each.system_properties.queue_offset for each in reply.messages]
            if reply.is_gone:
                gone.append(range(reply.gone_from, reply.next_offset))
    return offsets, gone


def test_messages_retired_during_a_read_are_returned_once() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.put_topic("t", queues=1)
        queue = Queue(retired=[32, 32])
        assert await read_all(world, queue) == (list(range(END)), [])
        assert queue.asked == [0, A_PAGE]

    run(scenario)


def test_filtered_messages_retired_during_a_read_are_not_missing() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.put_topic("t", queues=1)
        queue = Queue(retired=[32], matching=range(90, END))
        assert await read_all(world, queue) == (list(range(90, END)), [])

    run(scenario)


def test_messages_retired_before_a_read_are_missing() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.put_topic("t", queues=1)
        queue = Queue(retired=[80])
        wanted = [*range(A_PAGE), *range(80, END)]
        assert await read_all(world, queue) == (wanted, [range(A_PAGE, 80)])
        assert queue.asked == [0, A_PAGE, 80]

    run(scenario)


def test_a_filtered_pull_ignores_messages_retired_during_it() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.put_topic("t", queues=1)
        queue = Queue(retired=[32], matching=range(90, END))
        request = service.PullMessageRequest(
            message_queue=v2.MessageQueue(topic=v2.Resource(name="t"), id=0), batch_size=32
        )
        request.message_queue.broker.name = world.cluster.brokers[0].name
        request.long_polling_timeout.FromMilliseconds(5_000)
        async with calls_to(queue) as calls:
            puller = Puller(world.cluster, calls, PullPages(calls), SystemClock(), ProxySettings())
            call = Call(HEADERS, peer=lambda: "test", connection="test", time_remaining_s=10)
            responses = PullResponses()
            await puller.pull_message(call, request.SerializeToString(), responses)
        assert queue.asked == [0, A_PAGE]
        messages = [each.message for each in responses.pulled if each.HasField("message")]
        assert [each.system_properties.queue_offset for each in messages] == [*range(90, END)]

    run(scenario)
