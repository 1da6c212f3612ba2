"""The admin process's choice of the home, for different broker seeds."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.processes.processes import broker, standalone
from tidemill.admin.cluster import calls
from tidemill.admin.cluster.broker_client import broker_client
from tidemill.admin.cluster.brokers import Brokers
from tidemill.common.errors import BrokerUnreachable
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

TIMEOUT_MS = 5_000
NOBODY = "127.0.0.1:1"  # A port without a server.


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The addresses of two broker groups, the home first."""
    with standalone(tmp_path_factory.mktemp("seeds") / "data", "--groups=2") as running:
        with httpx.Client(trust_env=False) as client:
            items = client.get(f"{running.admin}/api/v1/broker-groups").json()["items"]
        yield [item["address"] for item in items]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The addresses of two brokers that belong to no cluster."""
    folder: Path = tmp_path_factory.mktemp("alone")
    with (
        broker(folder / "x", "--name=alone-0") as (_, first, _),
        broker(folder / "y", "--name=alone-1") as (_, second, _),
    ):
        yield [first, second]


def members_of(*seeds: str) -> list[tuple[str, str]]:
    """Return names and addresses, the home first."""

    async def scenario() -> list[tuple[str, str]]:
        connect = functools.partial(broker_client, timeout_ms=TIMEOUT_MS)
        brokers = Brokers(seeds, connect, timeout_ms=TIMEOUT_MS)
        async with brokers.running():
            found = [(member.name, member.address) for member in await brokers.members()]
            assert (
                await (await brokers.home()).call(
                    calls.GET_BROKER_STATUS, pb.GetBrokerStatusRequest()
                )
            ).name == found[0][0]
            return found

    return asyncio.run(scenario())


def test_any_seed_returns_all_members(cluster: list[str]) -> None:
    expected = [("broker-0", cluster[0]), ("broker-1", cluster[1])]
    for seeds in ([cluster[0]], [cluster[1]], [NOBODY, cluster[1]], cluster[::-1]):
        assert members_of(*seeds) == expected


def test_a_single_broker_is_its_own_home(alone: list[str]) -> None:
    assert members_of(alone[0]) == [("alone-0", alone[0])]


def test_one_of_several_seeds_that_belongs_to_no_cluster_is_not_believed(
    cluster: list[str], alone: list[str]
) -> None:
    """The broker was removed or has no cluster yet: changes at this broker would be lost."""
    assert members_of(*alone, cluster[1])[0] == ("broker-0", cluster[0])
    with pytest.raises(BaseExceptionGroup) as raised:
        members_of(*alone)
    [error] = raised.value.exceptions
    assert isinstance(error, BrokerUnreachable)
    assert "does not belong to a cluster yet" in error.message
