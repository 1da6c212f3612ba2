"""A change at all broker groups that names an expected version: the home changes first."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from tidemill.admin.cluster import calls
from tidemill.admin.cluster.broker_client import BrokerClient
from tidemill.admin.cluster.brokers import Brokers
from tidemill.common.errors import PreconditionFailed
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

NAMES = ("home", "other")


class Cluster:
    """Two broker groups. The home refuses changes after another change of the resource."""

    def __init__(self, *, is_changed: bool) -> None:
        self.is_changed = is_changed
        self.applied: list[str] = []  # in their order

    @contextlib.asynccontextmanager
    async def connect(self, address: str) -> AsyncIterator[BrokerClient]:
        """Connect to the broker group at an address, which is its name."""
        yield cast("BrokerClient", Member(self, address))


class Member:
    """The client of one broker group."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster = cluster
        self._name = name

    async def call(self, call: Any, request: Any) -> Any:
        """Answer the list of broker groups, or a change."""
        if call is calls.LIST_BROKER_GROUPS:
            groups = [
                pb.BrokerGroup(
                    member=pb.ClusterMember(name=name, address=name), is_home=name == "home"
                )
                for name in NAMES
            ]
            return pb.BrokerGroupList(groups=groups)
        await asyncio.sleep(0)
        if not request.dry_run:
            if self._name == "home" and self._cluster.is_changed:
                raise PreconditionFailed("another change came first")
            self._cluster.applied.append(self._name)
        return pb.PurgeTopicReply(messages=1)


def changed(cluster: Cluster) -> list[str]:
    """Purge a topic at all broker groups; return the names in the answer."""

    async def main() -> list[str]:
        brokers = Brokers(["home"], cluster.connect, timeout_ms=5_000)
        async with asyncio.timeout(20), brokers.running():
            answers = await brokers.change_all(
                calls.PURGE_TOPIC,
                dry_run=pb.PurgeTopicRequest(name="t", dry_run=True),
                request=pb.PurgeTopicRequest(name="t"),
                home_first=True,
            )
            return [answer.broker for answer in answers]

    return asyncio.run(main())


def test_all_broker_groups_change_after_the_home() -> None:
    cluster = Cluster(is_changed=False)
    assert changed(cluster) == list(NAMES)
    assert cluster.applied == list(NAMES)


def test_no_broker_group_changes_if_the_home_refuses() -> None:
    cluster = Cluster(is_changed=True)
    with pytest.raises(BaseExceptionGroup) as raised:  # of the tasks of the connections
        changed(cluster)
    assert raised.group_contains(PreconditionFailed)
    assert cluster.applied == []
