"""Bans and quotas of deleted users are marked, also beside a later user of the name."""

from __future__ import annotations

import pytest

from tests.unit.admin.test_token_routes import TokenWorld
from tidemill.admin.cluster import former_users


@pytest.mark.parametrize("single_reads_max", [0, former_users.SINGLE_READS_MAX])
@pytest.mark.parametrize(
    ("make", "single", "listed"),
    [
        ("POST /bans", "/bans/user:ops", "/bans"),
        ("PUT /quotas/user/ops", "/quotas/user/ops", "/quotas"),
    ],
)
def test_an_item_of_a_deleted_user_is_marked(
    monkeypatch: pytest.MonkeyPatch, single_reads_max: int, make: str, single: str, listed: str
) -> None:
    monkeypatch.setattr(former_users, "SINGLE_READS_MAX", single_reads_max)
    world = TokenWorld()
    body = {"user": "ops"} if make.startswith("POST") else {"publishMessagesPerS": 1}
    key = listed.removeprefix("/")

    def marks() -> list[bool]:
        [item] = world.ask(f"GET {listed}", "root").json()[key]
        return [world.ask(f"GET {single}", "root").json()["ofDeletedUser"], item["ofDeletedUser"]]

    made = world.ask(make, "root", **body)
    assert made.json()["ofDeletedUser"] is False, made.text
    assert marks() == [False, False]
    assert world.ask("DELETE /users/ops", "root").status_code == 200
    assert marks() == [True, True]
    world.put_user("ops")
    assert marks() == [True, True], "a later user of the name"
    gone = world.ask(f"DELETE {single}", "root").json()[key.removesuffix("s")]
    assert gone["ofDeletedUser"] is True


def test_items_that_are_not_about_users_are_not_marked() -> None:
    world = TokenWorld()
    world.ask("POST /bans", "root", clientId="c")
    world.ask("PUT /quotas/topic/orders", "root", publishMessagesPerS=1)
    assert world.ask("GET /bans", "root").json()["bans"][0]["ofDeletedUser"] is False
    assert world.ask("GET /quotas", "root").json()["quotas"][0]["ofDeletedUser"] is False
