"""Changes of users that would lock administrators out need `force` in the mode `on`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.admin.test_token_routes import TokenWorld
from tidemill.security.identities import UserType
from tidemill.security.table import Mode

CHANGES: list[Any] = [
    pytest.param("DELETE /users/root", {}, id="deletion"),
    pytest.param("PUT /users/root", {"type": "NORMAL"}, id="type"),
    pytest.param("PUT /users/root", {"enabled": False}, id="disabled"),
    pytest.param("PUT /users/root", {"certificates": ["ops.example"]}, id="certificate"),
]


def status(world: TokenWorld, operation: str, by: str, body: dict[str, Any]) -> int:
    answer = world.ask(operation, by, **body)
    assert answer.status_code in {200, 409}, answer.text
    if answer.status_code == 409:
        assert "force" in answer.json()["detail"]
    return answer.status_code


def forced(operation: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if operation.startswith("DELETE"):
        return f"{operation}?force=true", {}
    return operation, {**body, "force": True}


@pytest.mark.parametrize(("operation", "body"), CHANGES)
def test_the_last_super_user_keeps_its_rights_without_force(
    operation: str, body: dict[str, Any]
) -> None:
    world = TokenWorld()
    dry_run = f"{operation}?dryRun=true"
    assert status(world, dry_run, "root", body) == 409
    assert status(world, operation, "root", body) == 409
    world.put_user("second", kind=UserType.SUPER)
    assert status(world, operation, "root", body) == 409, "root is the caller"
    assert status(world, operation, "second", body) == 200


@pytest.mark.parametrize(("operation", "body"), CHANGES)
def test_force_changes_the_caller(operation: str, body: dict[str, Any]) -> None:
    operation, body = forced(operation, body)
    assert status(TokenWorld(), operation, "root", body) == 200


@pytest.mark.parametrize(
    "second", [{"enabled": False}, {"type": "NORMAL"}, {"certificates": ["c.example"]}]
)
def test_a_super_user_that_cannot_log_in_is_not_another_one(second: dict[str, Any]) -> None:
    world = TokenWorld()
    world.put_user("second", kind=UserType.SUPER)
    assert status(world, "PUT /users/second", "root", second) == 200
    answer = world.ask("DELETE /users/root", "root")
    assert "the last enabled super user" in answer.json()["detail"]


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.PERMISSIVE])
def test_other_modes_lock_nobody_out(mode: Mode) -> None:
    assert status(TokenWorld(mode=mode), "DELETE /users/root", "root", {}) == 200


def test_other_changes_of_the_caller_need_no_force() -> None:
    world = TokenWorld()
    assert status(world, "PUT /users/root", "root", {"roles": ["viewer"]}) == 200
    assert status(world, "PUT /users/ops", "root", {"enabled": False}) == 200
    assert status(world, "DELETE /users/ops", "root", {}) == 200
