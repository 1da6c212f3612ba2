"""The proxy sends new addresses of members to the home, also while another request runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

from tidemill.proxy.cluster.members import MemberLinks
from tidemill.proxy.link import BrokerLink
from tidemill.proxy.link.broker_configuration import BrokerConfiguration
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

OLD = {"b-0": "old:10", "b-1": "old:11"}
NEW = {"b-0": "new:20", "b-1": "new:21"}


class Peer:
    """A broker behind its link: its configuration, and the members that it was asked to found."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.configuration = BrokerConfiguration()
        self.configured = asyncio.Event()
        self.on_change: Callable[[], None] = lambda: None
        self.pending = SimpleNamespace(fail_all=lambda _reason: None)
        self.asked: asyncio.Queue[dict[str, str]] = asyncio.Queue()
        self.may_answer = asyncio.Event()

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def ask(
        self, _command: object, request: link_pb2.FoundClusterRequest, *, timeout_ms: int
    ) -> None:
        assert timeout_ms > 0
        self.asked.put_nowait({member.name: member.address for member in request.members})
        await self.may_answer.wait()

    def report(self, name: str, members: dict[str, str]) -> None:
        configuration = self.configuration
        configuration.broker_name = name
        configuration.membership = link_pb2.Membership(
            cluster_id="c",
            home_name="b-0",
            home_address=members["b-0"],
            members=[link_pb2.ClusterMember(name=one, address=at) for one, at in members.items()],
        )
        self.configured.set()
        self.on_change()


def test_a_member_that_reports_during_a_request_is_sent_after_it() -> None:
    async def act() -> None:
        peers: dict[str, Peer] = {}

        def open_link(address: str) -> BrokerLink:
            return cast(BrokerLink, peers.setdefault(address, Peer(address)))

        members = MemberLinks(list(NEW.values()), open_link)
        async with asyncio.timeout(30), members.running():
            home, other = peers[NEW["b-0"]], peers[NEW["b-1"]]
            home.report("b-0", OLD)
            assert await home.asked.get() == {"b-0": NEW["b-0"]}
            # The other member reports before the answer, and no further change follows.
            other.report("b-1", OLD)
            home.may_answer.set()
            assert await home.asked.get() == NEW
            home.report("b-0", NEW)
            assert {group.link.address for group in members.all} == set(NEW.values())
            assert home.asked.empty()

    asyncio.run(act())
