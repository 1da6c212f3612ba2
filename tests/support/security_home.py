"""A home broker with security items and proxies alone, behind the calls of the admin process."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import BrokerAnswer, BrokerAnswers
from tidemill.admin.cluster.security_client import SecurityClient
from tidemill.broker.engine.metadata.security_items import SecurityItems
from tidemill.common.errors import BrokerUnreachable, Conflict, ProxyUnreachable
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb


async def _nothing() -> None:
    pass


class ProxyRelay(NamedTuple):
    """A member of the broker groups, with a connection to the proxies."""

    client: SecurityHome


class SecurityHome:
    """The home, in place of all brokers. It counts and compares as a broker does."""

    def __init__(self) -> None:
        self.table = SecurityItems()
        self.audits: list[pb.ChangeAuthor] = []  # of changes
        self.recorded: list[pb.ChangeAuthor] = []  # of actions without a change
        self.is_up = True
        self.is_copy = False  # whether another broker group answers for the home
        # By name. A proxy without a state does not answer.
        self.proxies: dict[str, pb.SecurityState | None] = {}
        self.are_proxies_current = True  # whether they have each change at once
        # Awaited before each change, so that another change comes first.
        self.before_change: Callable[[], Awaitable[None]] = _nothing

    @property
    def client(self) -> SecurityClient:
        """The client of the admin process."""
        return SecurityClient(self)  # type: ignore[arg-type]  # It has the calls that the client makes.

    def put(self, *items: dict[str, Any]) -> None:
        """Change the table without a check."""
        for item in items:
            self.table.version += 1
            self.table.apply({**item, "version": self.table.version})

    def find(self, kind: str, name: str) -> dict[str, Any] | None:
        """Return an item, decoded."""
        found = self.table.find((kind, name))
        return None if found is None else json.loads(found)

    async def home(self) -> SecurityHome:
        """Return the client of the home."""
        return self

    async def call_home(self, call: object, request: Any) -> BrokerAnswers[Any]:
        """Answer a read."""
        unreachable = ["home"] if self.is_copy else []
        return BrokerAnswers([BrokerAnswer("b", await self.call(call, request))], unreachable)

    async def call_all(self, call: object, _request: object) -> BrokerAnswers[Any]:
        """Answer a read of all brokers."""
        assert call is calls.LIST_PROXIES
        known = [pb.ProxyName(process_id=name.encode(), name=name) for name in self.proxies]
        return BrokerAnswers([BrokerAnswer("b", pb.ProxyList(proxies=known))], [])

    async def member(self, _name: str) -> ProxyRelay:
        """Return the client that relays to proxies."""
        return ProxyRelay(self)

    async def ask_proxy(self, request: pb.AskProxyRequest) -> pb.ProxyAnswer:
        """Answer for a proxy."""
        name = request.process_id.decode()
        state = self.proxies[name]
        if state is None:
            raise ProxyUnreachable(f"{name} is down")
        if self.are_proxies_current:
            state.version = self.table.version
        return pb.ProxyAnswer(security=state)

    async def call(self, call: object, request: Any) -> Any:
        """Answer a call."""
        if not self.is_up:
            raise BrokerUnreachable("the home is down")
        if call is calls.LIST_SECURITY:
            return self._list(request)
        if call is calls.RECORD_AUDIT:
            self.recorded.append(request.audit)
            return pb.RecordAuditReply()
        assert call is calls.CHANGE_SECURITY
        await self.before_change()
        return self._change(request)

    def _list(self, request: pb.ListSecurityRequest) -> pb.ListSecurityReply:
        if request.name:
            found = self.table.find((request.kind, request.name))
            return pb.ListSecurityReply(
                items=[] if found is None else [found], version=self.table.version
            )
        after = request.after_name or None
        page = self.table.page(request.kind, after, limit=request.limit, bytes_max=1 << 20)
        return pb.ListSecurityReply(
            items=page.items, version=self.table.version, has_more=page.has_more
        )

    def _change(self, request: pb.ChangeSecurityRequest) -> pb.ChangeSecurityReply:
        if request.expected_version != self.table.version:
            raise Conflict("another change came first")
        items = [json.loads(item) for item in request.items]
        if request.dry_run:
            return pb.ChangeSecurityReply(version=self.table.version + len(items))
        self.audits.append(request.audit)
        self.put(*items)
        return pb.ChangeSecurityReply(version=self.table.version)
