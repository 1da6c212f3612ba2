"""Questions to proxies about their clients, relayed by brokers (ADR 0032).

All brokers are asked for their proxies, and each proxy is asked through one broker. A client that
calls several proxies is one client in the result.
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
from tidemill.message.client_key import NO_OWNER
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

# A proxy lists 100,000 clients in a tenth of a second besides its traffic.
LIST_TIMEOUT_MS: Final = 3_000
CLIENTS_NAMED_MAX = 100  # in the answer of a deletion
# In addition to the timeout of the client, for the network and the relays.
RELAY_TIMEOUT_MS: Final = 1_000
# Named as unreachable if no broker knows a proxy: after a start, proxies connect within 2 s.
ALL_PROXIES: Final = "all proxies"
_PROXY_UNREACHABLE_ERRORS: Final = (
    ProxyUnreachable,
    ProxyNotFound,
    BrokerUnreachable,
    BrokerTimeout,
)


class ProxyRoute(NamedTuple):
    """A proxy and the broker that relays questions to it."""

    process_id: bytes
    name: str
    via: BrokerClient


class ProxyRoutes(NamedTuple):
    """All proxies that brokers know, and the unreachable brokers."""

    proxies: list[ProxyRoute]
    unreachable: list[str]


class ConnectedClient(NamedTuple):
    """The states of one client at its proxies, the most recently active first."""

    states: list[tuple[ProxyRoute, pb.ClientState]]

    @property
    def newest(self) -> pb.ClientState:
        """The state of the proxy that knows its settings, or else of the latest one."""
        complete = [state for _, state in self.states if state.settings]
        return complete[0] if complete else self.states[0][1]

    @property
    def stream_route(self) -> ProxyRoute | None:
        """The proxy with a telemetry stream of the client."""
        return next((proxy for proxy, state in self.states if state.has_stream), None)


class ConnectedClientPage(NamedTuple):
    """Clients ordered by id and user, the unreachable processes, and whether more clients follow.

    Two users with one id are two clients.
    """

    clients: list[tuple[str, ConnectedClient]]
    unreachable: list[str]
    has_more: bool


async def find_proxies(brokers: Brokers) -> ProxyRoutes:
    """Ask all brokers for their proxies. The first broker that knows a proxy relays to it."""
    lists = await brokers.call_all(calls.LIST_PROXIES, pb.ListProxiesRequest())
    found: dict[bytes, ProxyRoute] = {}
    for broker, reply in lists.answers:
        via = (await brokers.member(broker)).client
        for each in reply.proxies:
            found.setdefault(each.process_id, ProxyRoute(each.process_id, each.name, via))
    return ProxyRoutes(
        sorted(found.values(), key=lambda each: (each.name, each.process_id)), lists.unreachable
    )


class ProxyAnswers(NamedTuple):
    """The answers of the proxies, and the processes without one."""

    answers: list[tuple[ProxyRoute, pb.ProxyAnswer]]
    unreachable: list[str]


async def ask_all(brokers: Brokers, question: pb.ProxyQuestion, timeout_ms: int) -> ProxyAnswers:
    """Ask all proxies at the same time. An error of one proxy hides no answer of another."""
    routes = await find_proxies(brokers)
    replies = await asyncio.gather(
        *(ask_proxy(proxy, question, timeout_ms) for proxy in routes.proxies),
        return_exceptions=True,
    )
    found = ProxyAnswers([], list(routes.unreachable))
    if not routes.proxies:
        found.unreachable.append(ALL_PROXIES)
    for proxy, reply in zip(routes.proxies, replies, strict=True):
        if isinstance(reply, _PROXY_UNREACHABLE_ERRORS):
            found.unreachable.append(proxy.name)
        elif isinstance(reply, ServiceError):
            found.unreachable.append(f"{proxy.name}: {reply.message}")
        elif isinstance(reply, BaseException):
            raise reply
        else:
            found.answers.append((proxy, reply))
    return found


async def list_clients(brokers: Brokers, request: pb.ListClientsRequest) -> ConnectedClientPage:
    """Return a page of the clients of all proxies.

    A page ends behind an id, so it may be larger than the request wants: by the clients of other
    users with its last id.
    """
    asked = await ask_all(brokers, pb.ProxyQuestion(list_clients=request), LIST_TIMEOUT_MS)
    known: dict[tuple[str, str], list[tuple[ProxyRoute, pb.ClientState]]] = {}
    ends: list[str] = []
    for proxy, reply in asked.answers:
        for state in reply.clients.clients:
            known.setdefault((state.client_id, state.user), []).append((proxy, state))
        if reply.clients.has_more:
            ends.append(reply.clients.clients[-1].client_id)
    # Clients behind the end of a cut page of one proxy are unknown.
    end = min(ends) if ends else None
    keys = sorted(each for each in known if end is None or each[0] <= end)
    page = keys[: _whole_ids(keys, request.clients_max)] if request.clients_max else keys
    clients = [(each[0], _merged(known[each])) for each in page]
    return ConnectedClientPage(clients, asked.unreachable, bool(ends) or len(page) < len(keys))


def _whole_ids(keys: Sequence[tuple[str, str]], count: int) -> int:
    """Return `count`, or more if the clients with the last id go on."""
    while 0 < count < len(keys) and keys[count][0] == keys[count - 1][0]:
        count += 1
    return count


async def list_client_ids(brokers: Brokers, request: pb.ListClientsRequest) -> list[str]:
    """Return the ids of clients, of the reachable proxies, at most CLIENTS_NAMED_MAX."""
    request.clients_max = CLIENTS_NAMED_MAX
    page = await list_clients(brokers, request)
    return list(dict.fromkeys(client_id for client_id, _ in page.clients))


async def find_client(
    brokers: Brokers, client_id: str, owner: int = NO_OWNER
) -> tuple[ConnectedClient, list[str]]:
    """Return a client of an owner, or of all owners together, and the unreachable processes.

    Raises ClientNotFound, ProxyUnreachable.
    """
    page = await list_clients(brokers, pb.ListClientsRequest(client_id=client_id, owner=owner))
    if page.clients:
        states = [state for _, client in page.clients for state in client.states]
        return _merged(states), page.unreachable
    raise _unknown(client_id, page.unreachable)


async def command_client(brokers: Brokers, command: pb.ClientCommand) -> pb.ClientAnswer:
    """Send a command to a client and return its answer.

    Raises ClientNotFound, ClientMute, ClientTimeout, ProxyUnreachable.
    """
    client, _ = await find_client(brokers, command.client_id)
    proxy = client.stream_route
    if proxy is None:
        raise ClientMute.of(command.client_id)
    question = pb.ProxyQuestion(command=command)
    return (await ask_proxy(proxy, question, command.timeout_ms + RELAY_TIMEOUT_MS)).client


class KickAnswers(NamedTuple):
    """The proxies that knew a kicked client, and the processes that did not answer."""

    kicked: list[tuple[str, pb.KickedClient]]
    unreachable: list[str]


async def kick_client(brokers: Brokers, kick: pb.KickClient) -> KickAnswers:
    """Kick a client at all proxies. Raises ClientNotFound or ProxyUnreachable."""
    asked = await ask_all(brokers, pb.ProxyQuestion(kick=kick), LIST_TIMEOUT_MS)
    kicked = [(p.name, reply.kicked) for p, reply in asked.answers if reply.kicked.is_known]
    answers = KickAnswers(kicked, asked.unreachable)
    if not answers.kicked:
        raise _unknown(kick.client_id, answers.unreachable, kick.user)
    return answers


async def ask_proxy(
    proxy: ProxyRoute, question: pb.ProxyQuestion, timeout_ms: int
) -> pb.ProxyAnswer:
    """Send a question to a proxy. Raises ServiceError."""
    request = pb.AskProxyRequest(
        process_id=proxy.process_id, question=question, timeout_ms=timeout_ms
    )
    return await proxy.via.ask_proxy(request)


def _unknown(client_id: str, unreachable: Sequence[str], user: str = "") -> ServiceError:
    client = f"client {client_id!r}" + (f" of user {user}" if user else "")
    if ALL_PROXIES in unreachable:
        return ProxyUnreachable(
            f"no proxy has answered about {client}: no broker is connected to a proxy; try again"
            " in 2 s"
        )
    if unreachable:
        return ProxyUnreachable(
            f"{', '.join(unreachable)} cannot be reached, and the other proxies do not know"
            f" {client}; try again later"
        )
    return ClientNotFound(f"{client} is unknown: no request or heartbeat for 2 minutes")


def _merged(states: Sequence[tuple[ProxyRoute, pb.ClientState]]) -> ConnectedClient:
    return ConnectedClient(sorted(states, key=lambda each: each[1].silent_ms))
