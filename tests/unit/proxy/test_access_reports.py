"""Refused calls and accesses of super users reach the access log of the proxy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.worlds.access_world import AccessWorld, signed
from tidemill.common.errors import ServiceError, Unauthorized
from tidemill.message.client_key import ClientKey
from tidemill.proxy.server.access_reports import CallReports
from tidemill.proxy.server.gated_call import Caller, StreamWatch
from tidemill.security.access_log import AccessLog
from tidemill.security.acl import (
    Action,
    Resource,
    ResourceType,
    SourceAddress,
    parse_address,
    parse_entry,
)
from tidemill.security.bans import BanKind
from tidemill.security.table import Mode

ORDERS = Resource(ResourceType.TOPIC, "orders")


class OneCall:
    """A call as the gate sees it."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.method = "send_message"
        self.started_at = 0.0
        self.caller: Caller | None = None
        self.failure: tuple[int, ServiceError] | None = None
        self.watch: StreamWatch | None = None
        self.client_id = "client"
        self.client = ClientKey(self.client_id)
        self.metadata = headers
        self.certificate_names = ()

    def find_address(self) -> SourceAddress | None:
        return parse_address("10.1.2.3")


def lines_after(world: AccessWorld, headers: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the lines of one call that sends to the topic `orders`."""
    lines: list[dict[str, Any]] = []
    log = AccessLog("proxy-0", lambda: 1, lambda: 1, lines.append)
    world.gate.reports = CallReports(log)
    if world.gate.is_checking and world.table.mode is Mode.ON and "super" not in str(headers):
        with pytest.raises(Unauthorized):
            world.gate.require(OneCall(headers), (Action.PUB,), ORDERS)
    else:
        world.gate.require(OneCall(headers), (Action.PUB,), ORDERS)
    return lines


def test_a_call_without_its_right_is_reported() -> None:
    world = AccessWorld()
    world.put_user("ops")
    [line] = lines_after(world, signed("ops"))
    assert (line["kind"], line["result"]) == ("refusal", "refused")
    assert (line["user"], line["via"], line["from"]) == ("ops", "signature", "10.1.2.3")
    assert (line["call"], line["resource"], line["action"]) == (
        "SendMessage",
        "Topic:orders",
        "Pub",
    )
    assert line["code"] == 40100
    assert "may not Pub" in line["reason"]


def test_the_mode_permissive_reports_calls_that_on_would_refuse() -> None:
    world = AccessWorld(Mode.PERMISSIVE)
    world.put_user("ops")
    [line] = lines_after(world, signed("ops"))
    assert line["result"] == "would_refuse"


def test_wrong_credentials_are_reported_without_a_user() -> None:
    world = AccessWorld()
    [line] = lines_after(world, signed("nobody"))
    assert "user" not in line
    assert line["from"] == "10.1.2.3"


@pytest.mark.parametrize("reason", ["disabled", "banned"])
def test_a_refusal_after_a_correct_signature_names_the_user(reason: str) -> None:
    world = AccessWorld()
    world.put_user("ops", is_enabled=reason != "disabled")
    if reason == "banned":
        world.put_ban(BanKind.USER, "ops", user_id=1)
    [line] = lines_after(world, signed("ops"))
    assert reason in line["reason"]
    assert (line["user"], line["via"]) == ("ops", "signature")


def test_a_refusal_of_a_wrong_signature_has_the_access_key_as_claimed() -> None:
    world = AccessWorld()
    world.put_user("ops")
    for name in ("ops", "nobody"):
        [line] = lines_after(world, signed(name, "another secret"))
        assert "user" not in line
        assert line["claimedUser"] == name
        assert line["reason"] == "the access key or the signature is wrong"


def test_refusals_of_two_callers_behind_one_address_have_two_lines() -> None:
    world = AccessWorld()
    world.put_user("ops", is_enabled=False)
    lines: list[dict[str, Any]] = []
    world.gate.reports = CallReports(AccessLog("proxy-0", lambda: 1, lambda: 1, lines.append))
    for headers in (signed("one"), signed("two"), signed("ops"), {}):
        for _ in range(2):
            with pytest.raises(Unauthorized):
                world.gate.require(OneCall(headers), (Action.PUB,), ORDERS)
    assert [line.get("user", line.get("claimedUser")) for line in lines] == [
        "one",
        "two",
        "ops",
        None,
    ]


def test_a_report_has_the_client_id() -> None:
    world = AccessWorld()
    world.put_user("super", is_super=True)
    for headers in (signed("super"), signed("nobody")):
        [line] = lines_after(world, headers)
        assert line["clientId"] == "client"


def test_an_access_of_a_super_user_is_reported() -> None:
    world = AccessWorld()
    world.put_user("super", is_super=True)
    [line] = lines_after(world, signed("super"))
    assert (line["kind"], line["user"], line["result"]) == ("access", "super", "ok")


def test_the_mode_off_reports_nothing() -> None:
    assert lines_after(AccessWorld(Mode.OFF), {}) == []


@pytest.mark.parametrize("mode", [Mode.PERMISSIVE, Mode.ON])
def test_a_first_use_without_the_right_to_create_is_reported(mode: Mode) -> None:
    """In the mode permissive, an operator counts the calls that `on` would refuse."""
    world = AccessWorld(mode)
    world.put_user("ops", parse_entry("Topic:orders", ["Pub"]))
    lines: list[dict[str, Any]] = []
    world.gate.reports = CallReports(AccessLog("proxy-0", lambda: 1, lambda: 1, lines.append))
    call = OneCall(signed("ops"))
    assert world.gate.allows(call, Action.CREATE, ORDERS) is (mode is Mode.PERMISSIVE)
    result = "would_refuse" if mode is Mode.PERMISSIVE else "refused"
    assert world.gate.accesses[call.method, result] == 1
    [line] = lines
    assert (line["user"], line["action"], line["result"]) == ("ops", "Create", result)
