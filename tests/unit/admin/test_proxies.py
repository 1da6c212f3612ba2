"""The clients of several proxies in one list."""

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
    kick_client,
    list_clients,
)
from tidemill.common.errors import (
    BadRequest,
    ClientMute,
    ClientNotFound,
    Overloaded,
    ProxyUnreachable,
)
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb


class FakeProxy(NamedTuple):
    """A proxy with its clients, the error that it raises, and the limit of its pages."""

    name: str
    clients: dict[str, pb.ClientState]
    refusal: Exception | None = None
    page_max: int = 1_000


class FakeBroker(CallsByRequest):
    """A broker with the links of some proxies."""

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
        if request.question.HasField("kick"):
            is_known = request.question.kick.client_id in proxy.clients
            return pb.ProxyAnswer(kicked=pb.KickedClient(is_known=is_known, polls=1))
        asked = request.question.list_clients
        if asked.client_id:
            found = proxy.clients.get(asked.client_id)
            return pb.ProxyAnswer(clients=pb.ClientList(clients=[found] if found else []))
        remaining = sorted(each for each in proxy.clients if each > asked.after)
        size = min(asked.clients_max, proxy.page_max)
        page = [proxy.clients[each] for each in remaining[:size]]
        return pb.ProxyAnswer(clients=pb.ClientList(clients=page, has_more=len(remaining) > size))


class FakeBrokers:
    """All brokers, and the names of the unreachable ones."""

    def __init__(self, *brokers: FakeBroker, unreachable: list[str] | None = None) -> None:
        self.brokers = {f"broker-{n}": broker for n, broker in enumerate(brokers)}
        self.unreachable = unreachable or []

    async def call_all(self, call: object, request: object) -> BrokerAnswers[Any]:
        answers = [
            BrokerAnswer(name, await broker.call(call, request))
            for name, broker in self.brokers.items()
        ]
        return BrokerAnswers(answers, self.unreachable)

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


def of_user(client_id: str, user: str, *, silent_ms: int = 0) -> pb.ClientState:
    return pb.ClientState(client_id=client_id, user=user, silent_ms=silent_ms)


def proxy(name: str, *clients: pb.ClientState, refusal: Exception | None = None) -> FakeProxy:
    return FakeProxy(name, {each.client_id: each for each in clients}, refusal)


def listed(brokers: FakeBrokers, *, after: str = "", page_size: int = 100) -> ConnectedClientPage:
    asked = pb.ListClientsRequest(after=after, clients_max=page_size)
    return asyncio.run(list_clients(cast("Brokers", brokers), asked))


def test_the_pages_of_several_proxies_form_one_list_without_gaps() -> None:
    first = proxy("p0", *(state(f"c{n:03}") for n in range(0, 90, 3)))
    second = proxy("p1", *(state(f"c{n:03}") for n in range(1, 10, 3)))
    third = proxy("p2", *(state(f"c{n:03}") for n in range(0, 90, 2)))
    brokers = FakeBrokers(FakeBroker(first, second), FakeBroker(third, first))
    expected = sorted({*first.clients, *second.clients, *third.clients})
    found: list[str] = []
    while True:
        page = listed(brokers, after=found[-1] if found else "", page_size=7)
        found += [client_id for client_id, _ in page.clients]
        if not page.has_more:
            break
    assert found == expected


def test_a_page_ends_where_one_proxy_cuts_its_list() -> None:
    """The clients behind this position are unknown."""
    short = proxy("p0", *(state(f"c{n}") for n in range(4)))._replace(page_max=1)
    long = proxy("p1", state("c5"), state("c6"))
    page = listed(FakeBrokers(FakeBroker(short, long)))
    assert [client_id for client_id, _ in page.clients] == ["c0"]
    assert page.has_more


def test_clients_beyond_the_page_size_are_on_the_next_page() -> None:
    brokers = FakeBrokers(FakeBroker(proxy("p0", state("a")), proxy("p1", state("b"))))
    page = listed(brokers, page_size=1)
    assert ([client_id for client_id, _ in page.clients], page.has_more) == (["a"], True)


def test_a_proxy_at_several_brokers_is_asked_once() -> None:
    shared = proxy("p0", state("c"))
    brokers = FakeBrokers(FakeBroker(shared), FakeBroker(shared))
    listed(brokers)
    assert sum(len(broker.asked) for broker in brokers.brokers.values()) == 1


def test_a_client_of_several_proxies_is_listed_once_with_its_settings() -> None:
    without_settings = proxy("p0", state("c", silent_ms=10))
    with_settings = proxy("p1", state("c", silent_ms=900, settings=b"\x12\x00", stream=True))
    brokers = FakeBrokers(FakeBroker(without_settings, with_settings))
    [(client_id, client)] = listed(brokers).clients
    assert client_id == "c"
    assert [each.name for each, _ in client.states] == ["p0", "p1"]
    assert client.newest.settings
    assert client.stream_route is not None
    assert client.stream_route.name == "p1"
    command = pb.ClientCommand(client_id="c", timeout_ms=1_000)
    answer = asyncio.run(command_client(cast("Brokers", brokers), command))
    assert answer.stack == "p1"


def test_unreachable_brokers_and_proxies_are_named() -> None:
    down = proxy("p1", refusal=ProxyUnreachable("down"))
    brokers = FakeBrokers(FakeBroker(proxy("p0", state("c")), down), unreachable=["broker-9"])
    page = listed(brokers)
    assert [client_id for client_id, _ in page.clients] == ["c"]
    assert page.unreachable == ["broker-9", "p1"]


def test_the_error_of_one_proxy_does_not_hide_the_clients_of_others() -> None:
    busy = proxy("p1", refusal=Overloaded("64 questions are pending"))
    page = listed(FakeBrokers(FakeBroker(proxy("p0", state("c")), busy)))
    assert [client_id for client_id, _ in page.clients] == ["c"]
    assert page.unreachable == ["p1: 64 questions are pending"]


def test_an_unknown_client_is_not_found_only_if_all_proxies_answer() -> None:
    async def find(brokers: FakeBrokers, client_id: str) -> None:
        await find_client(cast("Brokers", brokers), client_id)

    with pytest.raises(ClientNotFound):
        asyncio.run(find(FakeBrokers(FakeBroker(proxy("p0"))), "c"))
    down = FakeBrokers(FakeBroker(proxy("p0", refusal=ProxyUnreachable("down"))))
    with pytest.raises(ProxyUnreachable, match="p0 cannot be reached"):
        asyncio.run(find(down, "c"))


def test_without_a_proxy_no_client_is_called_unknown() -> None:
    """After the start of a broker, the proxies connect a little later."""
    brokers = FakeBrokers(FakeBroker())
    with pytest.raises(ProxyUnreachable, match="no broker is connected to a proxy; try again"):
        asyncio.run(find_client(cast("Brokers", brokers), "c"))
    with pytest.raises(ProxyUnreachable, match="no broker is connected to a proxy; try again"):
        kick(brokers, "c")
    page = listed(brokers)
    assert (page.clients, page.unreachable) == ([], ["all proxies"])


def test_a_command_to_a_client_without_a_stream_fails() -> None:
    brokers = FakeBrokers(FakeBroker(proxy("p0", state("c"))))
    command = pb.ClientCommand(client_id="c", timeout_ms=1_000)
    with pytest.raises(ClientMute):
        asyncio.run(command_client(cast("Brokers", brokers), command))


def kick(brokers: FakeBrokers, client_id: str, user: str = "") -> tuple[list[str], list[str]]:
    """Return the proxies that knew the client, and the unreachable processes."""
    asked = pb.KickClient(client_id=client_id, user=user)
    answers = asyncio.run(kick_client(cast("Brokers", brokers), asked))
    return [name for name, _ in answers.kicked], answers.unreachable


def test_a_client_is_kicked_at_all_proxies() -> None:
    old = proxy("p3", refusal=BadRequest("this proxy is older than the question; upgrade it"))
    lost = proxy("p4", refusal=ProxyUnreachable("it is down"))
    proxies = proxy("p1", state("c")), proxy("p2", state("c")), proxy("other", state("d"))
    brokers = FakeBrokers(FakeBroker(*proxies, old, lost), unreachable=["broker-9"])
    known, unreachable = kick(brokers, "c")
    assert known == ["p1", "p2"]
    assert unreachable == [
        "broker-9",
        "p3: this proxy is older than the question; upgrade it",
        "p4",
    ]


def test_a_kick_of_an_unknown_client_is_an_error() -> None:
    with pytest.raises(ClientNotFound, match="client 'c' of user orders is unknown"):
        kick(FakeBrokers(FakeBroker(proxy("p"))), "c", "orders")
    lost = proxy("p", refusal=ProxyUnreachable("it is down"))
    with pytest.raises(ProxyUnreachable, match="p cannot be reached"):
        kick(FakeBrokers(FakeBroker(lost)), "c")


def test_two_users_with_one_client_id_are_two_clients() -> None:
    first = proxy("p0", of_user("c", "one", silent_ms=3), of_user("d", "one"))
    second = proxy("p1", of_user("c", "two", silent_ms=2))
    third = proxy("p2", of_user("c", "one", silent_ms=1))
    page = listed(FakeBrokers(FakeBroker(first, second, third)), page_size=1)
    shown = [
        (client_id, {one.user for _, one in found.states}) for client_id, found in page.clients
    ]
    assert shown == [("c", {"one"}), ("c", {"two"})], "a page ends behind an id"
    assert [route.name for route, _ in page.clients[0][1].states] == ["p2", "p0"]
    assert page.has_more
    last = listed(FakeBrokers(FakeBroker(first, second, third)), after="c")
    assert [client_id for client_id, _ in last.clients] == ["d"]


def test_a_client_that_is_found_by_its_id_has_all_users() -> None:
    brokers = FakeBrokers(
        FakeBroker(proxy("p0", of_user("c", "one")), proxy("p1", of_user("c", "two")))
    )
    found, _ = asyncio.run(find_client(cast("Brokers", brokers), "c"))
    assert {state.user for _, state in found.states} == {"one", "two"}
