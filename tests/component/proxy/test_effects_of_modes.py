"""A refused call has no effect, and without users the checks have none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.component.proxy.test_rights import ROWS, Client, Row, entries
from tests.support.worlds.access_world import AccessWorld, signed
from tests.support.worlds.proxy_world import ProxyWorld, eventually, message, run
from tidemill.broker.server.link.commands import COMMANDS
from tidemill.message.client_key import ClientKey
from tidemill.proxy.metrics import request_code
from tidemill.proxy.server import access
from tidemill.proxy.server.access_reports import CallReports
from tidemill.security.access_log import AccessLog
from tidemill.security.bans import BanKind
from tidemill.security.table import Mode
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service

# Headers that say nothing about a user, or that the checks would refuse.
HEADERS_OF_MODE_OFF = [
    {},
    signed("nobody"),
    {"authorization": "no signature"},
    {"authorization": "Bearer tmk_1_none", "x-mq-session-token": "no token"},
]
FIRST_USES = [
    Row("SendMessage", service.SendMessageRequest(messages=[message(topic="new")]), []),
    Row("QueryRoute", service.QueryRouteRequest(topic=v2.Resource(name="new")), []),
]


@pytest.fixture(autouse=True)
def _short_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "REFUSAL_DELAY_S", 0)


def in_world(scenario: Callable[[ProxyWorld], Awaitable[None]]) -> None:
    async def with_topic(world: ProxyWorld) -> None:
        await world.put_topic()
        await world.put_group()
        await scenario(world)

    run(with_topic)


async def requests_to_broker(world: ProxyWorld) -> dict[str, int]:
    """Return the number of requests by kind, apart from a last send that follows all others."""
    broker, last = world.broker, message(b"last")
    assert (await world.send(last)).status.code == v2.OK
    await eventually(lambda: b"last" in broker.frames[-1].SerializeToString())
    counts = {command.name: broker.count_of(command.request_field) for command in COMMANDS}
    counts["append"] -= 1
    return {name: count for name, count in counts.items() if count}


# ---------------------------------------------------------------- refused calls


def refused_headers(users: AccessWorld) -> dict[str, dict[str, str]]:
    """Return the headers of calls that are refused, by the reason."""
    users.put_user("rightless", *entries([("Topic:other", "All")]))
    users.put_user("disabled", *entries([("*", "All")]), is_enabled=False)
    banned = users.put_user("banned", *entries([("*", "All")]))
    users.put_ban(BanKind.USER, "banned", user_id=banned.id)
    return {
        "may not": signed("rightless"),
        "disabled": signed("disabled"),
        "is banned": signed("banned"),
        "wrong": signed("disabled", "another secret ..."),
        "no credentials": {},
    }


@pytest.mark.parametrize("row", [*ROWS, *FIRST_USES], ids=lambda row: row.method)
def test_a_refused_call_changes_counters_and_the_access_log_alone(row: Row) -> None:
    async def scenario(world: ProxyWorld) -> None:
        users = AccessWorld()
        reasons = refused_headers(users)
        if not row.needs and row not in FIRST_USES:
            del reasons["may not"]  # Each user may make this call.
        lines: list[dict[str, Any]] = []
        users.gate.reports = CallReports(AccessLog("proxy-0", lambda: 1, lambda: 1, lines.append))
        for headers in reasons.values():
            assert (await Client(world, users).code(row, headers))[0] == v2.UNAUTHORIZED
        assert await requests_to_broker(world) == {}
        assert len(world.clients) == 0
        assert users.gate.accesses[request_code(row.method), "refused"] == len(reasons)
        for line, reason in zip(lines, reasons, strict=True):
            assert reason in line["reason"]

    in_world(scenario)


# ---------------------------------------------------------------- the mode off


def effects_of(row: Row, users: AccessWorld | None, headers: dict[str, str]) -> tuple[Any, ...]:
    """Return the answer to a call, its requests to the broker, and the known clients."""
    found: list[Any] = []

    async def scenario(world: ProxyWorld) -> None:
        found.append(await Client(world, users).code(row, headers))
        clients = world.clients.find_all("client-1")
        found.append([(each.key, each.client.user) for each in clients])
        found.append(await requests_to_broker(world))

    in_world(scenario)
    return tuple(found)


@pytest.mark.parametrize("row", [*ROWS, *FIRST_USES], ids=lambda row: row.method)
def test_the_mode_off_without_bans_behaves_as_a_proxy_without_users(row: Row) -> None:
    expected = effects_of(row, None, {})
    users = AccessWorld(Mode.OFF)
    users.put_user("rightless")
    users.keys = None
    lines: list[dict[str, Any]] = []
    users.gate.reports = CallReports(AccessLog("proxy-0", lambda: 1, lambda: 1, lines.append))
    for headers in [*HEADERS_OF_MODE_OFF, signed("rightless")]:
        assert effects_of(row, users, headers) == expected
    assert lines == []
    assert not any(users.gate.accesses.values())
    assert not any(users.gate.credentials.authentications.values())


def test_the_mode_off_keeps_clients_without_an_owner() -> None:
    async def scenario(world: ProxyWorld) -> None:
        users = AccessWorld(Mode.OFF)
        users.put_user("orders")
        heartbeat = Row("Heartbeat", service.HeartbeatRequest(client_type=v2.PRODUCER), [])
        assert (await Client(world, users).code(heartbeat, signed("orders")))[0] == v2.OK
        [client] = world.clients.find_all("client-1")
        assert client.key == ClientKey("client-1", 0)

    in_world(scenario)
