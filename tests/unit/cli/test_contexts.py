"""Contexts of the command line: their file, their order among other options, and protection."""

from __future__ import annotations

import io
import json
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.support.scripted_api import ApiAnswer, ApiRequest, scripted_api
from tidemill.cli.app import app
from tidemill.cli.app import run as run_commands
from tidemill.cli.contexts import FILE_BYTES_MAX, ClusterContext, Contexts, read_contexts
from tidemill.security.tokens import make_token


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the file of contexts, which is missing, without variables of ours."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("ADMIN", "CONTEXT", "ADMIN_TOKEN", "ADMIN_TOKEN_FILE", "ADMIN_CA_FILE"):
        monkeypatch.delenv(f"TIDEMILL_{name}", raising=False)
    return tmp_path / "tidemill" / "contexts.yaml"


class Api:
    """An admin API that records its requests."""

    def __init__(self, address: str, requests: list[ApiRequest]) -> None:
        self.address, self.requests = address, requests

    @property
    def methods(self) -> list[str]:
        return [each.method for each in self.requests]


@pytest.fixture
def api() -> Iterator[Api]:
    requests: list[ApiRequest] = []

    def answer(request: ApiRequest) -> ApiAnswer:
        requests.append(request)
        return ApiAnswer({"topics": [], "messages": 0, "delayedMessages": 0} | {"groups": []})

    with scripted_api(answer) as address:
        yield Api(address, requests)


def run(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(app, list(arguments), **options)


def test_a_created_context_is_private_and_the_first_one_is_in_use(file: Path) -> None:
    assert run("context", "create", "prod", "https://prod:8080", "--protected").exit_code == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert run("context", "create", "local", "127.0.0.1:8080").exit_code == 0
    prod = ClusterContext(name="prod", address="https://prod:8080", is_protected=True)
    local = ClusterContext(name="local", address="http://127.0.0.1:8080")
    assert read_contexts() == Contexts({"prod": prod, "local": local}, "prod")
    listed = json.loads(run("-o", "json", "context", "list").stdout)
    assert [(each["name"], each["inUse"]) for each in listed] == [("local", False), ("prod", True)]


def test_files_of_a_context_are_stored_with_their_whole_path(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = file.parent.parent / "größe"
    folder.mkdir()
    (folder / "ca.pem").touch()
    monkeypatch.chdir(folder)
    assert run("context", "create", "prod", "https://prod", "--ca-file", "ca.pem").exit_code == 0
    assert read_contexts().by_name["prod"].ca_file == folder / "ca.pem"
    missing = run("context", "create", "other", "https://o", "--ca-file", "none.pem")
    assert (missing.exit_code, "other" in read_contexts().by_name) == (2, False)


def test_an_equal_context_may_be_created_again_and_a_different_one_not(file: Path) -> None:
    assert not file.exists()
    create = "context", "create", "prod"
    assert [run(*create, "https://a").exit_code for _ in range(2)] == [0, 0]
    assert run(*create, "https://b").exit_code == 1
    assert read_contexts().by_name["prod"].address == "https://a"


def test_use_and_delete_change_the_context_in_use(file: Path) -> None:
    run("context", "create", "a", "https://a")
    run("context", "create", "b", "https://b")
    assert run("context", "use", "b").exit_code == 0
    assert read_contexts().current == "b"
    assert run("context", "use", "c").exit_code == 1
    assert run("context", "use").exit_code == 2
    assert run("context", "delete", "b").exit_code == 2, "it asks, without a terminal"
    assert "commands use no context" in run("context", "delete", "b", "--yes").stdout
    assert read_contexts() == Contexts({"a": ClusterContext(name="a", address="https://a")})
    assert run("context", "show").exit_code == 1
    assert "https://a" in run("--context", "a", "context", "show").stdout
    run("context", "use", "a")
    run("context", "use", "--none")
    assert read_contexts().current == ""
    assert file.exists()


@pytest.mark.parametrize("name", ["", "a b", "../a", "-a", "a" * 64])
def test_an_illegal_name_is_refused(file: Path, name: str) -> None:
    assert run("context", "create", "--", name, "https://a").exit_code == 2
    assert not file.exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[a", "cannot read the contexts"),
        ("- a", "the file is not a mapping"),
        ("contexts: [a]", "contexts is not a mapping"),
        ("others: {}", "unknown key 'others'"),
        ("current: a", "current is 'a'"),
        ("contexts: {a: {}}", "has no address"),
        ("contexts: {a: {address: 3}}", "address is not a text"),
        ("contexts: {a: {address: b, protected: 'no'}}", "neither true nor false"),
        ("contexts: {a: {address: b, secret: c}}", "unknown key 'secret'"),
        ("contexts: {'a b': {address: b}}", "is not a name"),
        ("# " + "x" * FILE_BYTES_MAX, "longer than"),
    ],
)
def test_a_malformed_file_ends_each_command(file: Path, text: str, reason: str) -> None:
    file.parent.mkdir()
    file.touch(0o600)
    file.write_text(text)
    refused = run("topic", "list", env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert refused.exit_code == 2
    assert reason in refused.output


def test_an_open_file_is_refused(file: Path) -> None:
    file.parent.mkdir()
    file.touch()
    file.chmod(0o604)
    assert run("topic", "list").exit_code == 2


def test_the_order_is_flag_environment_context_default(
    file: Path, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not file.exists()
    run("context", "create", "ours", api.address)
    run("context", "create", "dead", "http://127.0.0.1:1")
    assert run("topic", "list").exit_code == 0, "the context in use precedes the default"
    monkeypatch.setenv("TIDEMILL_ADMIN", "http://127.0.0.1:1")
    assert run("topic", "list").exit_code == 3, "the environment precedes the context in use"
    assert run("topic", "list", "--context", "ours").exit_code == 0
    assert run("--context", "ours", "topic", "list").exit_code == 0
    assert run("--admin", api.address, "topic", "list").exit_code == 0
    contradiction = run("--admin", api.address, "--context", "dead", "topic", "list")
    assert contradiction.exit_code == 2
    monkeypatch.setenv("TIDEMILL_CONTEXT", "ours")
    assert run("topic", "list").exit_code == 2, "two variables with different addresses"
    monkeypatch.delenv("TIDEMILL_ADMIN")
    assert run("topic", "list").exit_code == 0
    assert run("--context", "missing", "topic", "list").exit_code == 1


def test_a_context_brings_its_credentials_to_its_address_alone(
    file: Path, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = file.parent.parent / "secret"
    secret.touch(0o600)
    text = make_token().text
    secret.write_text(text)
    run("context", "create", "ours", api.address, "--credentials-file", str(secret))
    assert run("topic", "list").exit_code == 0
    assert api.requests[-1].authorization == f"Bearer {text}"
    # Another name of the same API, and another API.
    assert run("--admin", api.address.replace("127.0.0.1", "localhost"), "topic", "list")
    assert api.requests[-1].authorization == f"Bearer {text}"
    run("context", "create", "other", "http://127.0.0.1:1")
    run("context", "use", "other")
    assert run("--admin", api.address, "topic", "list").exit_code == 0
    assert api.requests[-1].authorization == ""
    # A variable for another cluster does not reach the context that a flag names.
    monkeypatch.setenv("TIDEMILL_ADMIN_TOKEN", "of-another-cluster")
    assert run("--context", "ours", "topic", "list").exit_code == 0
    assert api.requests[-1].authorization == f"Bearer {text}"
    monkeypatch.setenv("TIDEMILL_CONTEXT", "ours")
    assert run("topic", "list").exit_code == 0
    assert api.requests[-1].authorization == "Bearer of-another-cluster"


DELETE = "topic", "delete", "orders", "--yes"
DELETED = {"topics": [], "clients": [], "groups": [], "messages": 0, "delayedMessages": 0}


class Terminal(io.StringIO):
    """A standard input that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def protected(file: Path) -> Iterator[list[str]]:
    """Create and use a protected context; return the methods of the requests to its API."""
    methods: list[str] = []

    def answer(request: ApiRequest) -> ApiAnswer:
        methods.append(request.method)
        return ApiAnswer(DELETED)

    with scripted_api(answer) as address:
        assert run("context", "create", "prod", address, "--protected").exit_code == 0
        assert file.exists()
        yield methods


def test_a_change_in_a_protected_context_needs_its_name(protected: list[str]) -> None:
    refused = run(*DELETE)
    assert (refused.exit_code, "--confirm prod" in refused.stderr) == (2, True)
    assert run("--confirm", "staging", *DELETE).exit_code == 2
    assert protected == []
    assert run("topic", "list").exit_code == 0, "reading is free"
    assert run("topic", "delete", "orders", "--dry-run").exit_code == 0
    assert run("--confirm", "prod", *DELETE).exit_code == 0
    assert protected == ["GET", "DELETE", "DELETE"]


@pytest.mark.parametrize(
    ("typed", "status", "methods"), [("prod", 0, ["DELETE"]), ("production", 2, []), ("", 2, [])]
)
def test_a_terminal_is_asked_for_the_name_also_with_yes(
    protected: list[str],
    typed: str,
    status: int,
    methods: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(f"{typed}\n"))
    with pytest.raises(SystemExit) as ended:
        run_commands(DELETE)
    assert (ended.value.code, protected) == (status, methods)


def test_each_dry_run_is_free(protected: list[str]) -> None:
    release = "delivery", "release", "g", "--all", "--dry-run"
    run(*release)
    assert protected, "its dry run is a field of the body"


def test_confirm_without_a_context_is_refused(file: Path) -> None:
    assert not file.exists()
    assert run("--confirm", "prod", "topic", "list").exit_code == 2
