"""Release jobs create broker groups, topics and consumer groups through the REST API."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tidemill.common.rest_client import BASE_PATH, PROBLEM, RestClient, RestRejection
from tidemill.release.patient_rest import PatientRestClient, WaitTimeout
from tidemill.release.provisioning import ReleaseValues, find_members_to_remove, provide

HOME = {"name": "broker-0", "address": "h0:1", "isHome": True, "state": "active", "reachable": True}
OTHER = {**HOME, "name": "broker-1", "address": "h1:1", "isHome": False}
VALUES = ReleaseValues.parse(
    {
        "brokerGroups": [
            {"name": "broker-0", "address": "h0:1"},
            {"name": "broker-1", "address": "h1:1"},
        ],
        "topics": [{"name": "a|b", "queues": 4}],
        "groups": [{"name": "g"}],
    }
)


class Api:
    """An admin process with some broker groups that accepts each request, except some rejected."""

    def __init__(self, *items: dict[str, Any], rejected: dict[str, int] | None = None) -> None:
        self.items = {item["name"]: dict(item) for item in items}
        self.requests: list[tuple[str, str, Any]] = []
        self._rejected = rejected or {}  # status by path, for the first request

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.raw_path.decode().removeprefix(BASE_PATH)
        if request.method == "GET":
            return httpx.Response(200, json={"items": list(self.items.values())})
        body = json.loads(request.content)
        self.requests.append((request.method, path, body))
        if status := self._rejected.pop(path, 0):
            problem = {"title": "no", "detail": "not now"}
            return httpx.Response(status, json=problem, headers={"Content-Type": PROBLEM})
        if path.startswith("/broker-groups/"):
            name = path.rpartition("/")[2]
            self.items[name] = {**OTHER, "name": name, **body}
        return httpx.Response(200, json={})

    def rest(
        self,
        patience_s: float = 10.0,
        *,
        token: str = "",
        credentials: tuple[str, str] | None = None,
    ) -> PatientRestClient:
        client = RestClient(
            url="http://admin",
            user="helm",
            token=token,
            credentials=credentials,
            timeout_s=10.0,
            transport=httpx.MockTransport(self),
        )
        return PatientRestClient(client, patience_s=patience_s)


def requests_to(api: Api) -> list[tuple[str, str, Any]]:
    provide(api.rest(), VALUES, lambda _: None)
    return api.requests


def test_provide_adds_the_home_before_other_broker_groups() -> None:
    assert requests_to(Api(HOME)) == [
        ("PUT", "/broker-groups/broker-0", {"address": "h0:1"}),
        ("PUT", "/broker-groups/broker-1", {"address": "h1:1"}),
        ("PUT", "/topics/a%7Cb", {"queues": 4}),
        ("PUT", "/groups/g", {}),
    ]


def test_provide_waits_for_a_broker_group_whose_broker_does_not_answer_yet() -> None:
    api = Api(HOME, rejected={"/broker-groups/broker-1": 409})
    assert [path for _, path, _ in requests_to(api)].count("/broker-groups/broker-1") == 2


def test_provide_puts_topics_and_skips_broker_groups_that_are_members() -> None:
    paths = [path for _, path, _ in requests_to(Api(HOME, OTHER))]
    assert paths == ["/topics/a%7Cb", "/groups/g"]


def test_provide_skips_a_draining_broker_group() -> None:
    draining = {**OTHER, "state": "draining", "address": "before:1"}
    paths = [path for _, path, _ in requests_to(Api(HOME, draining))]
    assert paths == ["/topics/a%7Cb", "/groups/g"]


def test_a_call_is_repeated_while_the_api_is_unavailable() -> None:
    api = Api(HOME, rejected={"/broker-groups/broker-0": 503})
    assert [path for _, path, _ in requests_to(api)][:2] == ["/broker-groups/broker-0"] * 2


def test_a_rejection_ends_the_job_at_once() -> None:
    api = Api(HOME, OTHER, rejected={"/topics/a%7Cb": 409})
    with pytest.raises(RestRejection, match="PUT /topics/a%7Cb: 409 no: not now"):
        requests_to(api)


def test_a_call_is_repeated_until_the_api_reads_the_new_token() -> None:
    api = Api(HOME, OTHER, rejected={"/topics/a%7Cb": 401})
    provide(api.rest(token="new"), VALUES, lambda _: None)
    paths = [path for _, path, _ in api.requests]
    assert paths == ["/topics/a%7Cb", "/topics/a%7Cb", "/groups/g"]


@pytest.mark.parametrize("status", [401, 429])
def test_a_call_is_repeated_until_the_api_knows_the_user(status: int) -> None:
    api = Api(HOME, OTHER, rejected={"/topics/a%7Cb": status})
    provide(api.rest(credentials=("tidemill-job-provision", "new")), VALUES, lambda _: None)
    paths = [path for _, path, _ in api.requests]
    assert paths == ["/topics/a%7Cb", "/topics/a%7Cb", "/groups/g"]
    with pytest.raises(RestRejection, match=str(status)):
        provide(Api(HOME, OTHER, rejected={"/topics/a%7Cb": status}).rest(), VALUES, lambda _: None)


def test_a_missing_or_wrong_token_ends_the_job() -> None:
    for rest in (
        Api(HOME, OTHER, rejected={"/topics/a%7Cb": 401}).rest(),
        Api(HOME, OTHER, rejected={"/topics/a%7Cb": 401}).rest(0.0, token="wrong"),
    ):
        with pytest.raises(RestRejection, match="401"):
            provide(rest, VALUES, lambda _: None)


def test_a_timeout_names_the_unreachable_broker_group() -> None:
    unreachable = {**OTHER, "reachable": False, "reason": "unreachable from the admin process"}
    with pytest.raises(WaitTimeout, match="waiting for broker-1 "):
        provide(Api(HOME, unreachable).rest(patience_s=0), VALUES, lambda _: None)


def test_members_that_values_do_not_name_have_a_remedy() -> None:
    backlog = {"messages": 3, "inFlight": 0, "delayed": 1}
    items = [HOME, {**OTHER, "state": "draining", "left": backlog}, {**OTHER, "name": "broker-2"}]
    assert list(find_members_to_remove(items, ["broker-0", "broker-1", "broker-2"])) == []
    [one, two] = find_members_to_remove(items, ["broker-0"])
    assert "broker-1 is still a member (backlog: 3 messages, 0 in flight, 1 delayed)" in one
    assert "broker-2 is still a member (it is not draining)" in two
    more = {**OTHER, "left": backlog | {"halfMessages": 2, "dedupKeys": 5}}
    [three] = find_members_to_remove([more], ["broker-0"])
    assert "3 messages, 0 in flight, 1 delayed, 2 half messages, 5 dedup keys" in three
    [home] = find_members_to_remove([HOME], ["broker-9"])
    assert "cannot be removed" in home
