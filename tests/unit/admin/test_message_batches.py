"""The outcomes of a batch of messages while a broker fails, and the cost of a refused batch."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any, NamedTuple, cast

import grpc
import pytest
from starlette.requests import Request

from tests.support.clocks import ManualClock
from tests.support.worlds.fake_calls import CallsByRequest
from tidemill.admin.audit.author import Author
from tidemill.admin.cluster.brokers import Brokers
from tidemill.admin.http.actor import Actor
from tidemill.admin.http.request_access import OPEN
from tidemill.admin.json.messages import BatchOutcomeView, LineOutcome
from tidemill.admin.messages.compose import Composer
from tidemill.admin.routes.message_batches import LINES_MAX, send_messages
from tidemill.common.errors import BadRequest
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

LINE = b'{"body": "a"}\n'


class FailingBroker(CallsByRequest):
    """A broker that fails one send."""

    def __init__(self, failing: int, error: Exception) -> None:
        self.sends = 0
        self._failing, self._error = failing, error

    async def store_message(self, _request: pb.StoreMessageRequest) -> pb.StoreMessageReply:
        self.sends += 1
        if self.sends == self._failing:
            raise self._error
        return pb.StoreMessageReply()


class Member(NamedTuple):
    name: str
    client: FailingBroker


class Cluster:
    def __init__(self, broker: FailingBroker) -> None:
        self._member = Member("broker-0", broker)

    async def members(self) -> list[Member]:
        return [self._member]


def rpc_error(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "RST_STREAM")


async def sent(cluster: object, body: bytes) -> BatchOutcomeView:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {"type": "http", "headers": [(b"content-type", b"application/x-ndjson")]}
    return await send_messages(
        "orders",
        Request(scope, receive),
        cast("Brokers", cluster),
        OPEN,
        Composer(ManualClock(), item_bytes_max=4 << 20),
        Author(Actor("", "", "", "127.0.0.1"), "admin-0", "POST /topics/{topic}/messages:batch"),
        None,
    )


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    ],
)
def test_a_failed_call_keeps_the_outcomes_of_the_stored_lines(code: grpc.StatusCode) -> None:
    broker = FailingBroker(3, rpc_error(code))
    view = asyncio.run(sent(Cluster(broker), LINE * 5))
    stored, unknown, not_sent = LineOutcome.STORED, LineOutcome.UNKNOWN, LineOutcome.NOT_SENT
    found = [one.outcome for one in view.outcomes]
    assert found == [stored, stored, unknown, not_sent, not_sent]
    assert (view.sent, broker.sends) == (2, 3)
    detail = view.outcomes[2].detail or ""
    assert code.name in detail
    assert "may be stored" in detail


@pytest.mark.parametrize("line", [b"\n", b"ab\n"])
def test_a_batch_with_too_many_lines_is_not_split_into_all_of_them(line: bytes) -> None:
    body = b"first\n" + line * ((1 << 20) // len(line))

    async def refused() -> int:
        tracemalloc.start()
        try:
            with pytest.raises(BadRequest, match=f"more than {LINES_MAX} lines"):
                await sent(None, body)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert asyncio.run(refused()) < 4 * len(body)


def test_other_requests_run_between_refused_lines() -> None:
    async def turns_of_another_task() -> int:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        counting = asyncio.create_task(count())
        view = await sent(None, b"no json\n" * LINES_MAX)
        counting.cancel()
        assert {one.outcome for one in view.outcomes} == {LineOutcome.REFUSED}
        return turns

    # The count begins at the first await of the batch.
    assert asyncio.run(turns_of_another_task()) >= LINES_MAX - 1
