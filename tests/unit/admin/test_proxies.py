"""What several proxies tell of their clients becomes one list."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple, cast

import pytest

from tests.support.worlds.fake_calls import CallsByRequest
from tidemill.admin.cluster.brokers import BrokerAnswer, BrokerAnswers, Brokers
from tidemill.admin.cluster.proxies import (
    ConnectedClientPage,
    command_client,
    find_client,
    list_clients,
)
from tidemill.common.errors import ClientMute, ClientNotFound, Overloaded, ProxyUnreachable
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb


class FakeProxy(NamedTuple):
    """A proxy: its clients, or why it does not answer; and how many it tells of at once."""

    name: str
    clients: dict[str, pb.ClientState]
    refusal: Exception | None = None
    most: int = 1_000


class FakeBroker(CallsByRequest):
    """A broker to which some proxies are attached."""

    def __init__(self, *proxies: FakeProxy) -> None:
        self.proxies = {proxy.name.encode(): proxy for proxy in proxies}
        self.asked: list[str] = []

    async def list_proxies(self, _request: pb.ListProxiesRequest) -> pb.ProxyList:
        names = [pb.ProxyName(process_id=key, name=p.name) for key, p in self.proxies.items()]
        return pb.ProxyList(proxies=names)

    async def ask_proxy(self, request: pb.AskProxyRequest) -> pb.ProxyAnswer:
        proxy = self.proxies[request.process_id]
        self.asked.append(proxy.name)
        if proxy.refusal is not None:
            raise proxy.refusal
        if request.question.HasField("command"):
            return pb.ProxyAnswer(client=pb.ClientAnswer(stack=proxy.name))
        asked = request.question.list_clients
        if asked.client_id:
            found = proxy.clients.get(asked.client_id)
            return pb.ProxyAnswer(clients=pb.ClientList(clients=[found] if found else []))
        rest = sorted(each for each in proxy.clients if each > asked.after)
        most = min(asked.clients_max, proxy.most)
        page = [proxy.clients[each] for each in rest[:most]]
        return pb.ProxyAnswer(clients=pb.ClientList(clients=page, has_more=len(rest) > most))


class FakeBrokers:
    """All brokers, and those that are away."""

    def __init__(self, *brokers: FakeBroker, away: list[str] | None = None) -> None:
        self.brokers = {f"broker-{n}": broker for n, broker in enumerate(brokers)}
        self.away = away or []

    async def call_all(self, call: object, request: object) -> BrokerAnswers[Any]:
        answers = [
            BrokerAnswer(name, await broker.call(call, request))
            for name, broker in self.brokers.items()
        ]
        return BrokerAnswers(answers, self.away)

    async def member(self, name: str) -> Any:
        class Member(NamedTuple):
            client: FakeBroker

        return Member(self.brokers[name])


def state(
    client_id: str, *, silent_ms: int = 0, settings: bytes = b"", stream: bool = False
) -> Any:
    return pb.ClientState(
        client_id=client_id, silent_ms=silent_ms, settings=settings, has_stream=stream
    )


def proxy(name: str, *clients: pb.ClientState, refusal: Exception | None = None) -> FakeProxy:
    return FakeProxy(name, {each.client_id: each for each in clients}, refusal)


def listed(brokers: FakeBrokers, *, after: str = "", most: int = 100) -> ConnectedClientPage:
    asked = pb.ListClientsRequest(after=after, clients_max=most)
    return asyncio.run(list_clients(cast("Brokers", brokers), asked))


def test_pages_of_several_proxies_are_one_list_without_gaps() -> None:
    first = proxy("p0", *(state(f"c{n:03}") for n in range(0, 90, 3)))
    second = proxy("p1", *(state(f"c{n:03}") for n in range(1, 10, 3)))
    third = proxy("p2", *(state(f"c{n:03}") for n in range(0, 90, 2)))
    brokers = FakeBrokers(FakeBroker(first, second), FakeBroker(third, first))
    wanted = sorted({*first.clients, *second.clients, *third.clients})
    found: list[str] = []
    while True:
        page = listed(brokers, after=found[-1] if found else "", most=7)
        found += [client_id for client_id, _ in page.clients]
        if not page.has_more:
            break
    assert found == wanted


def test_a_page_that_one_proxy_cuts_short_ends_there() -> None:
    """It has no room for as many as were asked for, and what it has behind them is not known."""
    short = proxy("p0", *(state(f"c{n}") for n in range(4)))._replace(most=1)
    long = proxy("p1", state("c5"), state("c6"))
    page = listed(FakeBrokers(FakeBroker(short, long)))
    assert [client_id for client_id, _ in page.clients] == ["c0"]
    assert page.has_more


def test_what_two_proxies_have_beyond_a_page_is_on_the_next_one() -> None:
    brokers = FakeBrokers(FakeBroker(proxy("p0", state("a")), proxy("p1", state("b"))))
    page = listed(brokers, most=1)
    assert ([client_id for client_id, _ in page.clients], page.has_more) == (["a"], True)


def test_a_proxy_at_several_brokers_is_asked_once() -> None:
    shared = proxy("p0", state("c"))
    brokers = FakeBrokers(FakeBroker(shared), FakeBroker(shared))
    listed(brokers)
    assert sum(len(broker.asked) for broker in brokers.brokers.values()) == 1


def test_a_client_of_several_proxies_is_one_and_what_is_known_best_is_shown() -> None:
    mute = proxy("p0", state("c", silent_ms=10))
    told = proxy("p1", state("c", silent_ms=900, settings=b"\x12\x00", stream=True))
    brokers = FakeBrokers(FakeBroker(mute, told))
    [(client_id, client)] = listed(brokers).clients
    assert client_id == "c"
    assert [each.name for each, _ in client.states] == ["p0", "p1"]
    assert client.newest.settings
    assert client.stream_route is not None
    assert client.stream_route.name == "p1"
    command = pb.ClientCommand(client_id="c", timeout_ms=1_000)
    answer = asyncio.run(command_client(cast("Brokers", brokers), command))
    assert answer.stack == "p1"


def test_who_could_not_be_asked_is_named() -> None:
    gone = proxy("p1", refusal=ProxyUnreachable("gone"))
    brokers = FakeBrokers(FakeBroker(proxy("p0", state("c")), gone), away=["broker-9"])
    page = listed(brokers)
    assert [client_id for client_id, _ in page.clients] == ["c"]
    assert page.unreachable == ["broker-9", "p1"]


def test_what_one_proxy_refuses_does_not_hide_the_clients_of_others() -> None:
    busy = proxy("p1", refusal=Overloaded("64 questions wait"))
    page = listed(FakeBrokers(FakeBroker(proxy("p0", state("c")), busy)))
    assert [client_id for client_id, _ in page.clients] == ["c"]
    assert page.unreachable == ["p1: 64 questions wait"]


def test_a_client_that_nobody_knows_may_be_one_of_a_proxy_that_is_away() -> None:
    async def find(brokers: FakeBrokers, client_id: str) -> None:
        await find_client(cast("Brokers", brokers), client_id)

    with pytest.raises(ClientNotFound):
        asyncio.run(find(FakeBrokers(FakeBroker(proxy("p0"))), "c"))
    gone = FakeBrokers(FakeBroker(proxy("p0", refusal=ProxyUnreachable("gone"))))
    with pytest.raises(ProxyUnreachable, match="p0 cannot be reached"):
        asyncio.run(find(gone, "c"))


def test_a_client_without_a_stream_anywhere_is_not_asked() -> None:
    brokers = FakeBrokers(FakeBroker(proxy("p0", state("c"))))
    command = pb.ClientCommand(client_id="c", timeout_ms=1_000)
    with pytest.raises(ClientMute):
        asyncio.run(command_client(cast("Brokers", brokers), command))
