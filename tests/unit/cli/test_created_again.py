"""`create` of a user or a role that exists: an equal one is a success, another one is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.support.scripted_api import ApiAnswer, ApiRequest, refusal, scripted_api
from tidemill.cli.app import app
from tidemill.common.exit_codes import EXIT_REFUSED

PUB = {"resource": "Topic:a", "actions": ["Pub"], "sources": [], "decision": "ALLOW"}
SUBS = [
    {"resource": name, "actions": ["Sub"], "sources": [], "decision": "ALLOW"}
    for name in ("Topic:a", "Group:g")
]
USER = {
    "type": "NORMAL",
    "enabled": True,
    "entries": [PUB, *SUBS],
    "roles": ["viewer"],
    "serviceAccounts": [],
    "certificates": [],
    "version": 23,
}
SAME = ["user", "create", "shop", "--producer=a", "--consumer=g:a", "--role=viewer"]


def run(found: dict[str, Any], *arguments: str) -> Result:
    """Run a command with an API that has the found object, and refuses all changes."""

    def answer(request: ApiRequest) -> ApiAnswer:
        return ApiAnswer(found) if request.method == "GET" else refusal("no change is expected")

    with scripted_api(answer) as address:
        return CliRunner().invoke(app, ["--admin", address, *arguments])


@pytest.mark.parametrize(
    ("found", "arguments"),
    [(USER, SAME), ({"entries": [PUB], "version": 23}, ["role", "create", "shop", "--producer=a"])],
)
def test_an_equal_object_is_a_success(found: dict[str, Any], arguments: list[str]) -> None:
    ended = run(found, *arguments)
    assert (ended.exit_code, "exists already, unchanged" in ended.output) == (0, True)


@pytest.mark.parametrize(
    "change",
    [
        {"enabled": False},
        {"type": "SUPER"},
        {"roles": []},
        {"serviceAccounts": ["n/a"]},
        {"certificates": ["c"]},
        {"entries": [PUB]},
        {"entries": [{**PUB, "decision": "DENY"}, *SUBS]},
    ],
)
def test_a_different_user_names_the_command_that_changes_it(change: dict[str, Any]) -> None:
    ended = run({**USER, **change}, *SAME)
    assert ended.exit_code == EXIT_REFUSED
    assert "tidemill user set shop" in ended.output


def test_a_different_role_names_the_command_that_changes_it() -> None:
    ended = run({"entries": [PUB], "version": 23}, "role", "create", "shop", "--producer=b")
    assert ended.exit_code == EXIT_REFUSED
    assert "tidemill role set shop" in ended.output


@pytest.mark.parametrize(
    ("detail", "remedy"),
    [
        ("user op may not do this, because it needs a super user", "name a super user with --user"),
        ("user op may not Get on Topic:a", "let a super user allow it: tidemill acl allow"),
    ],
)
def test_a_missing_right_has_a_remedy_that_helps(tmp_path: Path, detail: str, remedy: str) -> None:
    file = tmp_path / "secret"
    file.touch(0o600)
    file.write_text("op\na-secret-of-sixteen")
    with scripted_api(lambda _request: refusal(detail, 403)) as address:
        line = ["--admin", address, "--secret-file", str(file), "user", "list"]
        ended = CliRunner().invoke(app, line)
    assert remedy in ended.output
    assert ("acl allow" in ended.output) is ("acl allow" in remedy)
