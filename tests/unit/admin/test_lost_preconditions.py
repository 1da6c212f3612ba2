"""If-Match and If-None-Match of security items, when another change comes first."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.support.clocks import ManualClock
from tests.support.security_home import SecurityHome
from tests.unit.admin.test_rights import KEYS
from tidemill.admin.app import create_app
from tidemill.admin.routes import brokers_of
from tidemill.admin.routes.security import clock_of

ENTRIES = [{"resource": "Topic:orders", "actions": ["Get"]}]
OTHER_ENTRIES = [{"resource": "Topic:news", "actions": ["Get"]}]
# The first document of each resource, and another one.
RESOURCES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/users/ann": ({"entries": []}, {"entries": ENTRIES}),
    "/roles/readers": ({"entries": []}, {"entries": ENTRIES}),
    "/quotas/topic/orders": ({"publishMessagesPerS": 1}, {"publishMessagesPerS": 2}),
}


class SecurityWorld:
    """A home with security items, and the REST API before it."""

    def __init__(self) -> None:
        self.home = SecurityHome()
        clock = ManualClock()
        self.app = create_app(
            None,  # type: ignore[arg-type]  # no brokers
            None,  # type: ignore[arg-type]  # no queries
            secret_keys=lambda: KEYS,
        )
        self.app.dependency_overrides = {brokers_of: lambda: self.home, clock_of: lambda: clock}

    async def request(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> httpx.Response:
        """Send a request; `_` in the name of a header is a `-`."""
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return await http.request(method, f"/api/v1{path}", json=body, headers=named)

    def let_come_first(self, method: str, path: str, body: Any = None) -> None:
        """Let another request come between the comparison and the next change."""

        async def other() -> None:
            async def nothing() -> None:
                pass

            self.home.before_change = nothing
            (await self.request(method, path, body)).raise_for_status()

        self.home.before_change = other


def test_changes_between_the_comparison_and_the_change_are_412() -> None:
    asyncio.run(_check_lost_races())


async def _check_lost_races() -> None:
    for path, (first, second) in RESOURCES.items():
        third = {"publishMessagesPerS": 3} if "quotas" in path else {"entries": OTHER_ENTRIES}
        for method, action, body in (
            ("PUT", "", third),
            ("DELETE", "", None),
            ("POST", ":rotate", {}),
        ):
            if action and "users" not in path:
                continue
            world = SecurityWorld()
            made = await world.request("PUT", path, first)
            world.let_come_first("PUT", path, second)
            lost = await world.request(method, path + action, body, If_Match=made.headers["ETag"])
            assert (path, method, lost.status_code) == (path, method, 412), lost.text
            assert lost.json()["title"] == "PreconditionFailed"
            shown = await world.request("GET", path)
            [field] = second
            assert lost.json()["current"][field] == shown.json()[field] != first[field]


def test_a_resource_that_is_deleted_first_is_412() -> None:
    async def main() -> None:
        for path, (first, second) in RESOURCES.items():
            for tag in ("*", None):
                world = SecurityWorld()
                made = await world.request("PUT", path, first)
                world.let_come_first("DELETE", path)
                lost = await world.request(
                    "PUT", path, second, If_Match=tag or made.headers["ETag"]
                )
                assert (path, lost.status_code) == (path, 412), lost.text
                assert "current" not in lost.json()
                assert (await world.request("GET", path)).status_code == 404

    asyncio.run(main())


def test_a_resource_that_is_created_first_is_412() -> None:
    async def main() -> None:
        for path, (first, second) in RESOURCES.items():
            world = SecurityWorld()
            world.let_come_first("PUT", path, first)
            lost = await world.request("PUT", path, second, If_None_Match="*")
            assert (path, lost.status_code) == (path, 412), lost.text
            [field] = first
            assert lost.json()["current"][field] == first[field]

    asyncio.run(main())


def test_a_version_in_the_body_stays_409() -> None:
    async def main() -> None:
        for path, (first, second) in RESOURCES.items():
            world = SecurityWorld()
            version = (await world.request("PUT", path, first)).json()["version"]
            await world.request("PUT", path, second)
            lost = await world.request("PUT", path, {**first, "ifVersion": version})
            assert (path, lost.status_code) == (path, 409), lost.text

    asyncio.run(main())


@pytest.mark.parametrize("path", RESOURCES)
def test_an_unreachable_broker_is_not_a_bad_request(path: str) -> None:
    async def main() -> None:
        world = SecurityWorld()
        first, second = RESOURCES[path]
        made = await world.request("PUT", path, first)
        world.home.is_up = False
        refused = await world.request("PUT", path, second, If_Match=made.headers["ETag"])
        assert (refused.status_code, refused.json()["title"]) == (502, "BrokerUnreachable")

    asyncio.run(main())
