"""What the jobs of a release ask of the REST API."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tidemill.release.provisioning import Wanted, leaving, provide
from tidemill.release.rest import Refused, Rest, Unreachable

HOME = {"name": "broker-0", "address": "h0:1", "isHome": True, "state": "active", "reachable": True}
OTHER = {**HOME, "name": "broker-1", "address": "h1:1", "isHome": False}
WANTED = Wanted.of(
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
    """An admin process with these broker groups, that takes whatever it is asked."""

    def __init__(self, *items: dict[str, Any], refuses: dict[str, int] | None = None) -> None:
        self.items = {item["name"]: dict(item) for item in items}
        self.asked: list[tuple[str, str, Any]] = []
        self._refuses = refuses or {}

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.raw_path.decode().removeprefix("/api/v1")
        if request.method == "GET":
            return httpx.Response(200, json={"items": list(self.items.values())})
        body = json.loads(request.content)
        self.asked.append((request.method, path, body))
        if status := self._refuses.pop(path, 0):
            return httpx.Response(status, json={"title": "no", "detail": "not now"})
        if path.startswith("/broker-groups/"):
            name = path.rpartition("/")[2]
            self.items[name] = {**OTHER, "name": name, **body}
        return httpx.Response(200, json={})

    def rest(self, patience_s: float = 10.0, *, token: str = "") -> Rest:
        client = httpx.Client(
            base_url="http://admin/api/v1",
            transport=httpx.MockTransport(self),
            trust_env=False,
            headers={"Authorization": f"Bearer {token}"} if token else {},
        )
        return Rest(client, patience_s=patience_s)


def provided(api: Api, wanted: Wanted = WANTED) -> list[tuple[str, str, Any]]:
    provide(api.rest(), wanted, lambda _: None)
    return api.asked


def test_one_that_is_alone_founds_its_cluster_before_others_join() -> None:
    assert provided(Api(HOME)) == [
        ("PUT", "/broker-groups/broker-0", {"address": "h0:1"}),
        ("PUT", "/broker-groups/broker-1", {"address": "h1:1"}),
        ("PUT", "/topics/a%7Cb", {"queues": 4}),
        ("PUT", "/groups/g", {}),
    ]


def test_members_are_left_alone_and_topics_said_again() -> None:
    paths = [path for _, path, _ in provided(Api(HOME, OTHER))]
    assert paths == ["/topics/a%7Cb", "/groups/g"]


def test_one_that_drains_is_not_taken_back() -> None:
    draining = {**OTHER, "state": "draining", "address": "before:1"}
    assert [path for _, path, _ in provided(Api(HOME, draining))] == ["/topics/a%7Cb", "/groups/g"]


def test_who_starts_is_waited_for() -> None:
    api = Api(HOME, refuses={"/broker-groups/broker-0": 503})
    assert [path for _, path, _ in provided(api)][:2] == ["/broker-groups/broker-0"] * 2


def test_a_refusal_is_told_and_not_tried_again() -> None:
    api = Api(HOME, OTHER, refuses={"/topics/a%7Cb": 409})
    with pytest.raises(Refused, match="PUT /topics/a%7Cb: 409 no: not now"):
        provided(api)


def test_who_has_not_read_the_new_token_yet_is_waited_for() -> None:
    api = Api(HOME, OTHER, refuses={"/topics/a%7Cb": 401})
    provide(api.rest(token="new"), WANTED, lambda _: None)
    assert [path for _, path, _ in api.asked] == ["/topics/a%7Cb", "/topics/a%7Cb", "/groups/g"]


def test_a_token_that_is_missing_or_stays_wrong_is_told() -> None:
    for rest in (
        Api(HOME, OTHER, refuses={"/topics/a%7Cb": 401}).rest(),
        Api(HOME, OTHER, refuses={"/topics/a%7Cb": 401}).rest(0.0, token="wrong"),
    ):
        with pytest.raises(Refused, match="401"):
            provide(rest, WANTED, lambda _: None)


def test_patience_ends_with_what_is_missing() -> None:
    away = {**OTHER, "reachable": False, "reason": "the admin process cannot reach it"}
    with pytest.raises(Unreachable, match="waiting for broker-1 "):
        provide(Api(HOME, away).rest(patience_s=0), WANTED, lambda _: None)


def test_who_is_a_member_still_may_not_go() -> None:
    left = {"messages": 3, "inFlight": 0, "delayed": 1}
    items = [HOME, {**OTHER, "state": "draining", "left": left}, {**OTHER, "name": "broker-2"}]
    assert list(leaving(items, ["broker-0", "broker-1", "broker-2"])) == []
    [one, two] = leaving(items, ["broker-0"])
    assert "broker-1 is a member still (left there: 3 messages, 0 in flight, 1 delayed)" in one
    assert "broker-2 is a member still (it is not draining)" in two
    [home] = leaving([HOME], ["broker-9"])
    assert "it stays" in home
