"""The option --namespace: every name of a topic or consumer group on a command line gets it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner, Result

from tidemill.cli.app import app
from tidemill.cli.rest import NAMESPACED, in_namespace, without_namespace

# Parameters with the name of a topic or a consumer group, by noun. `message send --group` is a
# message group.
NAMES = {"name", "topic", "group"}
OTHERS = {("message", "send", "group")}
# Commands that show only what is in the namespace.
FILTERED = {
    ("message", "trace"),
    ("dead-letter", "summary"),
    *((noun, "ls") for noun in ("topic", "group", "client", "timer")),
}


def parameters() -> Iterator[tuple[str, str, Any]]:
    """Yield noun, verb and parameter of each command that has such names."""
    root: Any = get_command(app)
    for noun in sorted(NAMESPACED):
        for verb, command in root.commands[noun].commands.items():
            for parameter in command.params:
                yield noun, verb, parameter


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, dict[str, str]]]:
    """Record the requests to the REST API, and answer each with an empty list."""
    recorded: list[tuple[str, str, dict[str, str]]] = []

    def request(
        _: httpx.Client, method: str, url: str, params: dict[str, str] | None = None, **__: Any
    ) -> httpx.Response:
        recorded.append((method, url, params or {}))
        answer: dict[str, list[object]] = {
            "topics": [],
            "groups": [],
            "clients": [],
            "timers": [],
            "transactions": [],
            "deadLetters": [],
            "messages": [],
        }
        return httpx.Response(200, json=answer, request=httpx.Request(method, url))

    monkeypatch.setattr(httpx.Client, "request", request)
    return recorded


def test_every_name_of_a_topic_or_group_gets_the_namespace() -> None:
    """The name of a callback is compared, because typer wraps each callback."""
    found = {
        (noun, verb, parameter.name): parameter.callback
        for noun, verb, parameter in parameters()
        if parameter.name in NAMES and (noun, verb, parameter.name) not in OTHERS
    }
    without = [
        " ".join(key)
        for key, callback in found.items()
        if getattr(callback, "__name__", "") != in_namespace.__name__
    ]
    assert not without
    assert len(found) > 20


def test_every_command_of_these_nouns_uses_the_namespace_or_rejects_it() -> None:
    callbacks: dict[tuple[str, str], set[str]] = {}
    for noun, verb, parameter in parameters():
        name = getattr(parameter.callback, "__name__", "")
        callbacks.setdefault((noun, verb.replace("list", "ls")), set()).add(name)
    wanted = {in_namespace.__name__, without_namespace.__name__}
    unaware = [key for key, names in callbacks.items() if not names & wanted]
    assert set(unaware) <= FILTERED


@pytest.mark.parametrize(
    "arguments",
    [
        ("timer", "show", "1"),
        ("timer", "cancel", "1", "--yes"),
        ("timer", "fire", "1", "--yes"),
        ("timer", "reschedule", "1", "--delay=1h", "--yes"),
        ("transaction", "show", "id"),
        ("transaction", "commit", "id", "--yes"),
        ("transaction", "rollback", "id", "--yes"),
        ("transaction", "check", "id", "--yes"),
        ("transaction", "recover", "id", "--yes"),
        ("client", "show", "id"),
        ("client", "stack", "id"),
    ],
)
def test_a_command_on_an_id_rejects_a_namespace(
    requests: list[tuple[str, str, dict[str, str]]], arguments: tuple[str, ...]
) -> None:
    done = run("--namespace", "shop", *arguments)
    assert done.exit_code == 2
    assert "has no effect" in done.output
    assert requests == []


@pytest.mark.parametrize(
    ("arguments", "url"),
    [
        (("topic", "show", "orders"), "/topics/shop%25orders"),
        (("topic", "show", "%DLQ%billing"), "/topics/%25DLQ%25shop%25billing"),
        (("topic", "show", "shop%orders"), "/topics/shop%25orders"),
        (("group", "show", "billing"), "/groups/shop%25billing"),
        (("message", "find", "orders", "--key", "k"), "/topics/shop%25orders/messages"),
        (("delivery", "list", "billing"), "/groups/shop%25billing/deliveries"),
        (
            ("dead-letter", "discard", "billing", "b:1", "--dry-run"),
            "/groups/shop%25billing/dead-letters:discard",
        ),
    ],
)
def test_a_path_has_the_full_name(
    requests: list[tuple[str, str, dict[str, str]]], arguments: tuple[str, ...], url: str
) -> None:
    run("--namespace", "shop", *arguments)
    assert requests[0][1].endswith(f"/api/v1{url}")


@pytest.mark.parametrize("noun", ["topic", "group", "client"])
def test_a_list_is_of_the_namespace(
    requests: list[tuple[str, str, dict[str, str]]], noun: str
) -> None:
    assert run("--namespace", "shop", noun, "ls").exit_code == 0
    assert run(noun, "ls").exit_code == 0
    assert [query.get("namespace") for _, _, query in requests] == ["shop", None]


def test_a_filter_has_the_full_name(requests: list[tuple[str, str, dict[str, str]]]) -> None:
    run("--namespace", "shop", "client", "list", "--group", "billing", "--topic", "orders")
    assert requests[0][2]["group"] == "shop%billing"
    assert requests[0][2]["topic"] == "shop%orders"
    run("--namespace", "shop", "timer", "list", "--topic", "orders")
    assert requests[1][2]["topic"] == "shop%orders"
    run("--namespace", "shop", "transaction", "list", "--topic", "orders")
    assert requests[2][2]["topic"] == "shop%orders"
    run("--namespace", "shop", "dead-letter", "list", "--group", "billing", "--topic", "orders")
    assert requests[3][2]["group"] == "shop%billing"
    assert requests[3][2]["topic"] == "shop%orders"


def test_an_illegal_namespace_is_wrong_usage() -> None:
    done = run("--namespace", "a%b", "topic", "list")
    assert done.exit_code == 2
    assert "may only contain" in done.output


@pytest.mark.parametrize("noun", ["broker-group", "cluster", "store", "release", "standalone"])
def test_a_namespace_without_effect_is_wrong_usage(noun: str) -> None:
    done = run("--namespace", "shop", noun, "ls")
    assert done.exit_code == 2
    assert "has no effect" in done.output


def test_the_pipeline_names_its_own_option() -> None:
    done = run("--namespace", "shop", "pipeline", "archive")
    assert "--option namespace=NAME" in " ".join(done.output.replace("│", "").split())


def test_a_missing_name_stays_missing() -> None:
    context = typer.Context(get_command(app))
    assert in_namespace(context, None) is None
