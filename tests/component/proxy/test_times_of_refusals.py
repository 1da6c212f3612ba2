"""The times of refusals: they do not separate an unknown user from a wrong signature."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections.abc import Sequence

import pytest

from tests.component.proxy.test_refusals_on_the_wire import Wire, run
from tests.support.worlds.access_world import signed
from tests.support.worlds.proxy_world import HEADERS
from tidemill.security.acl import parse_entry
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.apache.rocketmq.v2 import service_pb2_grpc

CALLS = 200_000  # about 100,000 of each kind, in random order
IN_FLIGHT = 100
USERS = 100
# Two series of one distribution differ by more in one of 150,000 runs.
T_MAX = 4.5
DURATION_S_MAX = 1_800


@pytest.mark.large
def test_the_time_of_a_refusal_does_not_tell_whether_a_user_exists() -> None:
    times_ns: dict[bool, list[int]] = {True: [], False: []}

    async def scenario(wire: Wire) -> None:
        for number in range(USERS):
            wire.users.put_user(f"user-{number:02}", parse_entry("Topic:a", ("Pub",)))
        stub = service_pb2_grpc.MessagingServiceStub(wire.channel)
        asked = service.QueryRouteRequest(topic=v2.Resource(name="a"))
        choices, numbers = random.Random(1), iter(range(CALLS))

        async def call_often() -> None:
            for number in numbers:
                exists = bool(choices.getrandbits(1))
                user = f"{'user' if exists else 'none'}-{choices.randrange(USERS):02}"
                # A date of its own, so that the proxy knows no header.
                headers = {**HEADERS, **signed(user, "another secret", f"2026{number:011}Z")}
                begin_ns = time.perf_counter_ns()
                answer = await stub.QueryRoute(asked, metadata=tuple(headers.items()))
                times_ns[exists].append(time.perf_counter_ns() - begin_ns)
                assert answer.status.code == v2.UNAUTHORIZED
                assert user not in answer.status.message

        async with asyncio.TaskGroup() as tasks:
            for _ in range(IN_FLIGHT):
                tasks.create_task(call_often())

    run(scenario, seconds=DURATION_S_MAX)
    assert abs(welch_t(times_ns[True], times_ns[False])) < T_MAX


def welch_t(some: Sequence[int], others: Sequence[int]) -> float:
    """Return the t of Welch's test: the distance of two means in standard errors."""
    errors = [statistics.variance(each) / len(each) for each in (some, others)]
    return (statistics.fmean(some) - statistics.fmean(others)) / math.sqrt(sum(errors))


def test_welch_t_finds_a_difference_of_one_percent() -> None:
    noise = random.Random(2)
    some, others = ([round(noise.gauss(mean, 100)) for _ in range(20_000)] for mean in (1000, 1010))
    assert abs(welch_t(some, others)) > T_MAX
    assert abs(welch_t(some[::2], some[1::2])) < T_MAX
