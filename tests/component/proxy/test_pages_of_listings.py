"""Listings over a broker with several pages: the names in each request."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import pytest

from tests.support.worlds.proxied_broker import calls_of
from tests.support.worlds.proxy_world import ProxyWorld, run
from tidemill.common.errors import BadRequest
from tidemill.message import limits
from tidemill.proxy.cluster.broker_calls import BrokerCalls
from tidemill.proxy.server.pipeline_table import ClusterQueues, ListingPages
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill.transport.aio.call import RpcCall

ADDRESS = "10.0.0.1"


class Broker:
    """A broker that lists progress; more groups are missing with each page."""

    def __init__(self, gone: list[list[str]]) -> None:
        self.asked: list[list[str]] = []  # names, by page
        self._gone = gone

    async def list_progress(self, _call: RpcCall, request: bytes) -> bytes:
        names = list(pb.ListProgressRequest.FromString(request).groups)
        self.asked.append(names)
        gone = {name for page in self._gone[: len(self.asked)] for name in page}
        return pb.ListProgressReply(
            missing=[name for name in names if name in gone],
            cursor=str(len(self.asked)) if len(self.asked) < len(self._gone) else "",
        ).SerializeToString()


def calls_to(broker: Broker) -> AbstractAsyncContextManager[BrokerCalls]:
    """Return calls to the fake `broker`."""
    return calls_of(ListProgress=broker.list_progress)


async def missing(pages: ListingPages, names: list[str]) -> list[list[str]]:
    """Return the missing names of each page."""
    answer = pages.method("ListProgress", pb.ListProgressReply, "groups")
    request = pb.ListProgressRequest(groups=names, skips_missing=True)
    return [
        list(pb.ListProgressReply.FromString(page).missing)
        async for page in answer(request, ADDRESS)
    ]


def test_a_missing_name_is_requested_once() -> None:
    async def scenario(world: ProxyWorld) -> None:
        broker = Broker(gone=[["a"], [], ["c"], []])
        async with calls_to(broker) as calls:
            answers = await missing(ListingPages(world.cluster, calls), ["a", "b", "a", "c", "b"])
        assert broker.asked == [["a", "b", "c"], ["b", "c"], ["b", "c"], ["b"]]
        assert answers == [["a"], [], ["c"], []]

    run(scenario)


def test_a_listing_ends_if_all_names_are_missing() -> None:
    async def scenario(world: ProxyWorld) -> None:
        broker = Broker(gone=[["a"], ["b"], []])
        async with calls_to(broker) as calls:
            assert await missing(ListingPages(world.cluster, calls), ["a", "b"]) == [["a"], ["b"]]

    run(scenario)


def test_a_request_with_too_many_names_reaches_no_broker() -> None:
    async def scenario(world: ProxyWorld) -> None:
        broker, many = Broker(gone=[[]]), ["g"] * (limits.NAMES.limit + 1)
        async with calls_to(broker) as calls:
            with pytest.raises(BadRequest, match="at most 4096 entries"):
                await missing(ListingPages(world.cluster, calls), many)
            queues = ClusterQueues(world.cluster, calls)
            for request in (
                pb.GetQueuesRequest(topics=many),
                pb.GetQueuesRequest(topic_pattern="*" * (limits.TOPIC_PATTERN.limit + 1)),
            ):
                with pytest.raises(BadRequest, match="at most"):
                    await anext(queues.get_queues(request, ADDRESS))
        assert not broker.asked

    run(scenario)
