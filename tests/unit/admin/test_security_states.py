"""The answers of proxies about the security items that they have applied."""

from __future__ import annotations

import pytest

from tests.support.security_home import SecurityHome
from tests.unit.admin.test_token_routes import TokenWorld
from tidemill.admin.cluster import security_states
from tidemill.admin.routes import HEADER_CHARS_MAX, header_text
from tidemill.common.errors import BrokerUnreachable
from tidemill.common.rest_client import UNCONFIRMED_HEADER
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb


def with_proxies(home: SecurityHome, *names: str) -> None:
    for name in names:
        home.proxies[name] = pb.SecurityState(mode="on", key_ids=["k1"], key_checks=["c"])


def test_a_change_is_confirmed_by_all_proxies() -> None:
    world = TokenWorld()
    with_proxies(world.home, "proxy-0", "proxy-1")
    answer = world.ask("PUT /users/orders", "root")
    assert answer.is_success
    assert UNCONFIRMED_HEADER not in answer.headers
    shown = world.ask("GET /security", "root").json()
    assert [proxy["name"] for proxy in shown["proxies"]] == ["proxy-0", "proxy-1"]
    assert {proxy["version"] for proxy in shown["proxies"]} == {shown["version"]}
    assert "unreachable" not in shown


def test_proxies_without_a_change_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security_states, "CONFIRM_S", 0.2)
    world = TokenWorld()
    with_proxies(world.home, "proxy-0")
    world.home.proxies["proxy-1"] = None
    world.home.are_proxies_current = False
    answer = world.ask("PUT /users/orders", "root")
    assert answer.is_success, "the change is stored"
    assert answer.headers[UNCONFIRMED_HEADER] == "proxy-0, proxy-1"
    planned = world.ask("PUT /users/other?dryRun=true", "root")
    assert UNCONFIRMED_HEADER not in planned.headers, "nothing has changed"
    shown = world.ask("GET /security", "root").json()
    assert shown["unreachable"] == ["proxy-1"]


def test_an_unknown_list_of_proxies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise BrokerUnreachable("no broker")

    world = TokenWorld()
    monkeypatch.setattr(world.home, "call_all", fail)
    answer = world.ask("PUT /users/orders", "root")
    assert answer.is_success
    assert answer.headers[UNCONFIRMED_HEADER] == "proxies are unknown: no broker"
    changed = world.ask("PUT /security", "root", mode="permissive")
    assert changed.is_success, "the change is stored"
    assert changed.json()["unreachable"] == ["proxies are unknown: no broker"]


@pytest.mark.parametrize("mode", ["permissive", "on"])
def test_a_mode_that_proxies_cannot_check_is_refused(mode: str) -> None:
    world = TokenWorld()
    with_proxies(world.home, "proxy-0")
    world.home.proxies["proxy-1"] = pb.SecurityState(mode="off")
    before = world.ask("GET /security", "root").json()["version"]
    answer = world.ask("PUT /security", "root", mode=mode)
    assert answer.status_code == 409
    assert "security_key_file is not set at proxy-1, " in answer.json()["detail"]
    assert world.ask("PUT /security?dryRun=true", "root", mode=mode).status_code == 409
    assert world.ask("GET /security", "root").json()["version"] == before, "nothing has changed"

    world.app.state.secret_keys = lambda: None
    detail = world.ask("PUT /security", "root", mode=mode).json()["detail"]
    assert "security_key_file is not set at this admin process, proxy-1, " in detail
    assert world.ask("PUT /security", "root", mode="off").is_success, "off needs no keys"


def test_names_are_one_line_of_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security_states, "CONFIRM_S", 0.2)
    world = TokenWorld()
    with_proxies(world.home, "proxy\n\u00e9")
    world.home.are_proxies_current = False
    answer = world.ask("PUT /users/orders", "root")
    assert answer.headers[UNCONFIRMED_HEADER] == "proxy ?"


def test_a_header_names_as_many_proxies_as_fit() -> None:
    names = [f"tidemill-proxy-{n:03}" for n in range(1_000)]  # 18 characters, with a comma 20
    text = header_text(names)
    assert text == ", ".join(names[:50]) + ", and 950 more"
    assert len(", ".join(names[:50])) == HEADER_CHARS_MAX - 2
    assert header_text(names[:50]) == ", ".join(names[:50])


def test_a_name_at_the_limit_of_a_header_is_whole() -> None:
    longest = "p" * HEADER_CHARS_MAX
    assert header_text([longest]) == longest
    assert header_text([longest + "p"]) == longest
    assert header_text([longest, "q"]) == longest + ", and 1 more"
    assert header_text([longest[1:], "q"]) == longest[1:] + ", and 1 more"
    assert header_text([]) == ""
