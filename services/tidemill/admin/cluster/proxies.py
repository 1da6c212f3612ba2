"""The proxies, asked through brokers about their clients (ADR 0032).

All brokers are asked which proxies they have, and each proxy then through one of them. A client may
call several proxies, and is one client all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple

from tidemill.admin.cluster import calls
from tidemill.admin.cluster.broker_client import BrokerClient
from tidemill.admin.cluster.brokers import Brokers
from tidemill.common.errors import (
    BrokerTimeout,
    BrokerUnreachable,
    ClientMute,
    ClientNotFound,
    ProxyNotFound,
    ProxyUnreachable,
    ServiceError,
)
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

# For a proxy to go over its clients, 100,000 in a tenth of a second beside its traffic.
LIST_TIMEOUT_MS: Final = 3_000
# Beyond what a client has, for the way there and back.
ON_THE_WAY_MS: Final = 1_000
_GONE: Final = (ProxyUnreachable, ProxyNotFound, BrokerUnreachable, BrokerTimeout)


class ProxyRoute(NamedTuple):
    """A proxy, and through whom it is asked."""

    process_id: bytes
    name: str
    via: BrokerClient


class ProxyRoutes(NamedTuple):
    """All proxies that brokers have told of, and the brokers that have told nothing."""

    found: list[ProxyRoute]
    unreachable: list[str]


class ConnectedClient(NamedTuple):
    """A client, as the proxies know it that it calls: the one heard last first."""

    states: list[tuple[ProxyRoute, pb.ClientState]]

    @property
    def newest(self) -> pb.ClientState:
        """What is known best: of the proxy that has its settings, or else heard it last."""
        told = [state for _, state in self.states if state.settings]
        return told[0] if told else self.states[0][1]

    @property
    def speaker(self) -> ProxyRoute | None:
        """Through whom it can be asked."""
        return next((proxy for proxy, state in self.states if state.has_stream), None)


class ConnectedClientPage(NamedTuple):
    """Some clients by their ids; who could not be asked; whether there are more behind them."""

    clients: list[tuple[str, ConnectedClient]]
    unreachable: list[str]
    has_more: bool


async def find_proxies(brokers: Brokers) -> ProxyRoutes:
    """Ask all brokers for their proxies; each proxy is asked through the first that has it."""
    told = await brokers.ask_all(
        lambda member: member.client.call(calls.LIST_PROXIES, pb.ListProxiesRequest())
    )
    found: dict[bytes, ProxyRoute] = {}
    for broker, reply in told.answers:
        via = (await brokers.member(broker)).client
        for each in reply.proxies:
            found.setdefault(each.process_id, ProxyRoute(each.process_id, each.name, via))
    return ProxyRoutes(
        sorted(found.values(), key=lambda each: (each.name, each.process_id)), told.unreachable
    )


async def list_clients(brokers: Brokers, asked: pb.ListClientsRequest) -> ConnectedClientPage:
    """Return a page of the clients of all proxies."""
    proxies = await find_proxies(brokers)
    unreachable = list(proxies.unreachable)
    question = pb.ProxyQuestion(list_clients=asked)
    replies = await asyncio.gather(
        *(_ask(proxy, question, LIST_TIMEOUT_MS) for proxy in proxies.found), return_exceptions=True
    )
    known: dict[str, list[tuple[ProxyRoute, pb.ClientState]]] = {}
    ends: list[str] = []
    for proxy, reply in zip(proxies.found, replies, strict=True):
        if isinstance(reply, _GONE):
            unreachable.append(proxy.name)
        elif isinstance(reply, ServiceError):
            # What one proxy refuses is no reason to hide the clients of the others.
            unreachable.append(f"{proxy.name}: {reply.message}")
        elif isinstance(reply, BaseException):
            raise reply
        else:
            for state in reply.clients.clients:
                known.setdefault(state.client_id, []).append((proxy, state))
            if reply.clients.has_more:
                ends.append(reply.clients.clients[-1].client_id)
    # What one proxy has behind the end of its page nobody knows yet.
    end = min(ends) if ends else None
    client_ids = sorted(each for each in known if end is None or each <= end)
    page = client_ids[: asked.clients_max] if asked.clients_max else client_ids
    clients = [(each, _merged(known[each])) for each in page]
    return ConnectedClientPage(clients, unreachable, bool(ends) or len(page) < len(client_ids))


async def find_client(brokers: Brokers, client_id: str) -> tuple[ConnectedClient, list[str]]:
    """Return a client, and who could not be asked. Raises ClientNotFound, and ProxyUnreachable."""
    asked = pb.ListClientsRequest(client_id=client_id)
    page = await list_clients(brokers, asked)
    if page.clients:
        return page.clients[0][1], page.unreachable
    if page.unreachable:
        raise ProxyUnreachable(
            f"{', '.join(page.unreachable)} cannot be asked, and nobody else knows a client"
            f" {client_id!r}"
        )
    raise ClientNotFound(f"no client {client_id!r} gave a sign of life within two minutes")


async def command_client(brokers: Brokers, command: pb.ClientCommand) -> pb.ClientAnswer:
    """Let a client do something, and return its answer.

    Raises ClientNotFound, ClientMute, ClientTimeout, ProxyUnreachable.
    """
    client, _ = await find_client(brokers, command.client_id)
    proxy = client.speaker
    if proxy is None:
        raise ClientMute.of(command.client_id)
    question = pb.ProxyQuestion(command=command)
    return (await _ask(proxy, question, command.timeout_ms + ON_THE_WAY_MS)).client


async def _ask(proxy: ProxyRoute, question: pb.ProxyQuestion, timeout_ms: int) -> pb.ProxyAnswer:
    request = pb.AskProxyRequest(
        process_id=proxy.process_id, question=question, timeout_ms=timeout_ms
    )
    return await proxy.via.ask_proxy(request)


def _merged(states: Sequence[tuple[ProxyRoute, pb.ClientState]]) -> ConnectedClient:
    return ConnectedClient(sorted(states, key=lambda each: each[1].silent_ms))
