"""An unknown query parameter is rejected before the call has an effect."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import pytest

from tests.support.worlds.fake_calls import CallsByRequest
from tidemill.admin.app import create_app
from tidemill.admin.cluster.brokers import BrokerAnswer
from tidemill.admin.routes import brokers_of
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

APP = create_app(None, None)  # type: ignore[arg-type]  # Each test has its own broker.


class UnusedBroker:
    """A broker that must not be called."""

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"the broker was called: {name}")


class ResetBroker(CallsByRequest, UnusedBroker):
    """A broker that accepts resets."""

    def __init__(self) -> None:
        self.resets: list[pb.ResetOffsetRequest] = []

    async def reset_offset(self, request: pb.ResetOffsetRequest) -> pb.ResetOffsetReply:
        """Record the request."""
        self.resets.append(request)
        return pb.ResetOffsetReply()

    async def change_all(
        self,
        call: object,
        *,
        dry_run: object,
        request: pb.ResetOffsetRequest,
        home_first: bool,  # There is one broker group.
    ) -> list[BrokerAnswer[pb.ResetOffsetReply]]:
        """Answer as the only broker group."""
        return [BrokerAnswer("broker-0", await self.call(call, request))]


def ask(broker: object, method: str, path: str, body: object = None) -> httpx.Response:
    APP.dependency_overrides[brokers_of] = lambda: broker

    async def request() -> httpx.Response:
        transport = httpx.ASGITransport(APP)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, json=body)

    return asyncio.run(request())


def calls() -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (method.upper(), path, operation)
        for path, operations in APP.openapi()["paths"].items()
        for method, operation in operations.items()
    ]


@pytest.mark.parametrize("call", calls(), ids=lambda call: f"{call[0]} {call[1]}")
def test_every_call_rejects_an_unknown_parameter(call: tuple[str, str, dict[str, Any]]) -> None:
    method, path, operation = call
    filled = re.sub("{.*?}", "0", path)
    # The check precedes calls to the broker and checks of the body.
    refused = ask(UnusedBroker(), method, f"{filled}?zebra=1", {})
    assert refused.status_code == 400
    assert refused.headers["content-type"] == "application/problem+json"
    assert "'zebra'" in refused.json()["detail"]
    for each in operation.get("parameters", []):
        if each["in"] == "query":
            refused = ask(UnusedBroker(), method, f"{filled}?{each['name'].upper()}_=1", {})
            assert refused.status_code == 400
            assert f"did you mean '{each['name']}'" in refused.json()["detail"]


@pytest.mark.parametrize(
    ("method", "path", "hint"),
    [
        ("DELETE", "/topics/o?dry_run=true", "did you mean 'dryRun'?"),
        ("DELETE", "/groups/o?dry-run=true", "did you mean 'dryRun'?"),
        ("POST", "/timers/0:cancel?dryrun=true", "did you mean 'dryRun'?"),
        ("DELETE", "/topics/o?dryRun=true&dryRun=false", "'dryRun' is given more than once"),
        ("POST", "/timers/0:fire?zebra=1", "known are broker, dryRun"),
        ("POST", "/topics/o/messages?dryRun=true", "known are create"),
        ("GET", "/security?dryRun=true", "this call has no query parameters"),
        ("PUT", "/topics/o?force=true", "'force' belongs in the body"),
        ("POST", "/groups/g:resetOffset?offset=7", "'offset' belongs in the body"),
        ("GET", "/timers?limit=7", "known are topic, dueFrom, dueTo, key, pageSize, pageToken"),
    ],
)
def test_the_error_names_the_known_parameters(method: str, path: str, hint: str) -> None:
    refused = ask(UnusedBroker(), method, f"/api/v1{path}", {})
    assert (refused.status_code, refused.json()["code"]) == (400, 40000)
    assert hint in refused.json()["detail"]


@pytest.mark.parametrize(
    "query",
    [
        *(
            f"timers?pageToken={token}"
            for token in ("", "5", "5:x", ":1", "-1:1", "²:1:b-0", "5:1:" + "b" * 300)
        ),
        *(
            f"groups/g/deliveries?pageToken={token}"
            for token in ("", "1", "1:a:2", "1:a:2:x", "1:a:2:3:4", "-1:a:2:3", "²:a:2:3")
        ),
        *(
            f"messages/m/trace?cursor={cursor}"
            for cursor in ("x", "é", "a:-1:0:10:x", "a:0:0:x", "a:1.5:0:10:x", "a:0:0:10:x,")
        ),
    ],
)
def test_an_invalid_position_in_a_list_is_refused(query: str) -> None:
    refused = ask(UnusedBroker(), "GET", f"/api/v1/{query}")
    assert (refused.status_code, refused.json()["code"]) == (400, 40000)


@pytest.mark.parametrize("path", ["timers/7:cancel", "clients/c:stack", "groups/g:resetOffset"])
def test_an_action_refuses_other_methods_before_it_reads_anything(path: str) -> None:
    refused = ask(UnusedBroker(), "GET", f"/api/v1/{path}?zebra=1")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize(("query", "in_body"), [(True, False), (False, True), (False, False)])
def test_the_query_or_the_body_can_request_a_dry_run(*, query: bool, in_body: bool) -> None:
    broker = ResetBroker()
    path = "/api/v1/groups/g:resetOffset" + ("?dryRun=true" if query else "")
    body = {"topic": "o", "to": "latest", "dryRun": in_body}
    answer = ask(broker, "POST", path, body)
    assert answer.json()["dryRun"] == (query or in_body)
    assert [each.dry_run for each in broker.resets] == [query or in_body]
