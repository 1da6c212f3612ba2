"""Calls of PipelineSource over a real server and client: concurrency, memory and ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias

import grpc
import pytest

from tidemill.common.errors import Conflict, FilterBeyondLimit, IllegalFilter
from tidemill.proxy.metrics import ProxyMetrics
from tidemill.proxy.server.pipeline_source import CALLS_MAX, PipelineMethod, pipeline_methods
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2_grpc
from tidemill.transport.aio.listener import ListenSettings
from tidemill.transport.aio.server import RpcServer
from tidemill.transport.http2.limits import Limits

if TYPE_CHECKING:
    Stub: TypeAlias = pipeline_pb2_grpc.PipelineSourceAsyncStub

PAGE = pb.GetQueuesReply(groups=[pb.BrokerGroupQueues(broker="x" * (1 << 20))])
PAGES = 100


class Source:
    """A configurable handler of GetQueues."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.made = 0  # pages
        self.closed = 0  # calls with an ended answer
        self.has_closed = asyncio.Event()
        self.metrics = ProxyMetrics()

    async def answer(
        self, request: pb.GetQueuesRequest, _address: str
    ) -> AsyncGenerator[pb.GetQueuesReply, None]:
        try:
            if request.topic_pattern == "conflict":
                raise Conflict("not now")
            if request.topic_pattern == "filter":
                raise IllegalFilter("malformed")
            if request.topic_pattern == "long filter":
                raise FilterBeyondLimit("too long")
            if request.topic_pattern == "fault":
                raise ZeroDivisionError
            if request.topic_pattern == "pages":
                for _ in range(PAGES):
                    self.made += 1
                    yield PAGE
            yield pb.GetQueuesReply()
            await self.may_end.wait()
        finally:
            self.closed += 1
            self.has_closed.set()


ROUND_TRIPS = 50  # of other calls; enough time to make many pages


@contextlib.asynccontextmanager
async def served(source: Source) -> AsyncIterator[Stub]:
    methods = pipeline_methods(
        {
            "GetQueues": PipelineMethod(
                pb.GetQueuesRequest, source.answer, lambda _call, _request: None
            )
        },
        source.metrics,
    )
    server = RpcServer(
        methods, Limits(), ListenSettings(host="127.0.0.1", port=0), message_bytes_max=1 << 20
    )
    async with server.serving():
        options = [("grpc.max_receive_message_length", 8 << 20)]
        async with grpc.aio.insecure_channel(server.address, options=options) as channel:
            yield pipeline_pb2_grpc.PipelineSourceStub(channel)


def run(scenario: Callable[[Source, Stub], Awaitable[None]]) -> None:
    async def main() -> None:
        source = Source()
        async with asyncio.timeout(30), served(source) as stub:
            await scenario(source, stub)

    asyncio.run(main())


def test_one_address_gets_at_most_the_free_calls() -> None:
    async def scenario(source: Source, stub: Stub) -> None:
        calls = [stub.GetQueues(pb.GetQueuesRequest()) for _ in range(CALLS_MAX // 2)]
        for call in calls:
            await call.read()
        refused = stub.GetQueues(pb.GetQueuesRequest())
        assert await refused.code() == grpc.StatusCode.UNAVAILABLE
        assert dict(await refused.trailing_metadata())["tidemill-error"] == "Overloaded"
        source.may_end.set()
        for call in calls:
            assert await call.code() == grpc.StatusCode.OK
        again = stub.GetQueues(pb.GetQueuesRequest())
        await again.read()
        assert await again.code() == grpc.StatusCode.OK

    run(scenario)


def test_rejected_filters_are_counted_with_their_reason() -> None:
    async def scenario(source: Source, stub: Stub) -> None:
        for pattern in ("filter", "long filter", "filter", "conflict"):
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.GetQueues(pb.GetQueuesRequest(topic_pattern=pattern)).read()
        assert source.metrics.rejected_filters == {"syntax": 2, "limit": 1}

    run(scenario)


def test_no_page_is_made_for_a_client_that_does_not_read() -> None:
    async def scenario(source: Source, stub: Stub) -> None:
        call = stub.GetQueues(pb.GetQueuesRequest(topic_pattern="pages"))
        await call.read()
        # The buffers of both ends hold some pages. Then the proxy makes no more.
        for _ in range(ROUND_TRIPS):
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.GetQueues(pb.GetQueuesRequest(topic_pattern="conflict")).read()
        assert source.made < PAGES // 2
        source.may_end.set()
        count = 1
        while await call.read() is not grpc.aio.EOF:
            count += 1
        assert count == PAGES + 1

    run(scenario)


def test_a_call_that_is_cancelled_ends_its_answer_at_once() -> None:
    async def scenario(source: Source, stub: Stub) -> None:
        call = stub.GetQueues(pb.GetQueuesRequest())
        await call.read()
        assert source.closed == 0
        call.cancel()
        await source.has_closed.wait()

    run(scenario)


@pytest.mark.parametrize(
    ("pattern", "code", "name"),
    [
        ("conflict", grpc.StatusCode.FAILED_PRECONDITION, "Conflict"),
        ("fault", grpc.StatusCode.INTERNAL, None),
    ],
)
def test_an_error_is_a_status(pattern: str, code: grpc.StatusCode, name: str | None) -> None:
    async def scenario(source: Source, stub: Stub) -> None:
        call = stub.GetQueues(pb.GetQueuesRequest(topic_pattern=pattern))
        assert await call.code() == code
        assert dict(await call.trailing_metadata()).get("tidemill-error") == name
        assert source.closed == 1

    run(scenario)
