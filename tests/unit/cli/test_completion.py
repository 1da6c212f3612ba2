"""Completion in a shell: words, names, their cache, and no output after an error."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from tests.support.scripted_api import ApiAnswer, ApiRequest, refusal, scripted_api
from tidemill.cli import completion_names
from tidemill.cli.app import app, run
from tidemill.cli.completion import COMPLETE, WORD, WORDS
from tidemill.cli.completion_names import CACHE_S, NAMES_TIMEOUT_S
from tidemill.cli.rest import in_namespace

LISTS: dict[str, Any] = {
    "/topics": {"topics": [{"name": name} for name in ("orders", "orders-2", "payments", "a|b")]},
    "/groups": {"groups": [{"name": "billing"}]},
    "/processes": {"items": [{"name": "proxy-0"}]},
    "/broker-groups": {"items": [{"name": "broker-0"}]},
}


@pytest.fixture(autouse=True)
def _own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    # A busy machine may import the HTTP client for longer than a shell waits.
    monkeypatch.setattr(completion_names, "NAMES_TIMEOUT_S", 60.0)


class Api:
    """An admin API with lists of names."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.failure: ApiAnswer | None = None

    def answer(self, request: ApiRequest) -> ApiAnswer:
        self.paths.append(request.path)
        return self.failure or ApiAnswer(LISTS[request.path.partition("?")[0]])


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    found = Api()
    with scripted_api(found.answer) as address:
        monkeypatch.setenv("TIDEMILL_ADMIN", address)
        yield found


Completer = Callable[..., list[str]]


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Completer:
    def complete_words(*words: str) -> list[str]:
        monkeypatch.setenv(COMPLETE, "complete_bash")
        monkeypatch.setenv(WORDS, "\n".join(("tidemill", *words)))
        monkeypatch.setenv(WORD, str(len(words)))
        with pytest.raises(SystemExit):
            run([])
        output = capfd.readouterr()
        assert output.err == ""
        return output.out.split()

    return complete_words


def test_commands_options_and_values_are_completed(complete: Completer) -> None:
    assert complete("comp") == ["completion"]
    assert complete("topic", "cre") == ["create"]
    assert complete("topic", "create", "--ty") == ["--type"]
    assert "FIFO" in complete("topic", "create", "--type", "F")
    assert complete("--cont") == ["--context"]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("topic", "show", "or"), ["orders", "orders-2"]),
        (("topic", "show", '"pay'), ["payments"]),
        (("message", "peek", ""), ["orders", "orders-2", "payments"]),
        (("dead-letter", "list", "--topic=p"), ["payments"]),
        (("dead-letter", "list", "--group", ""), ["billing"]),
        (("group", "show", ""), ["billing"]),
        (("process", "settings", ""), ["proxy-0"]),
        (("broker-group", "drain", "b"), ["broker-0"]),
        (("broker-group", "history", ""), ["broker-0"]),
    ],
)
def test_names_are_completed(
    words: tuple[str, ...], names: list[str], complete: Completer, api: Api
) -> None:
    assert complete(*words) == names
    assert len(api.paths) == 1


def test_each_parameter_with_such_a_name_is_completed() -> None:
    root: Any = get_command(app)
    missing = [
        f"{noun} {verb} {parameter.name}"
        for noun, group in root.commands.items()
        for verb, command in getattr(group, "commands", {}).items()
        for parameter in command.params
        # Typer wraps each callback.
        if getattr(parameter.callback, "__name__", "") == in_namespace.__name__
        and parameter._custom_shell_complete is None
    ]
    assert not missing


def test_an_address_behind_the_command_counts(complete: Completer, api: Api) -> None:
    address = os.environ.pop("TIDEMILL_ADMIN")
    assert complete("topic", "show", "--admin", address, "pay") == ["payments"]
    assert api.paths
    assert complete("topic", "show", "--admin", "http://127.0.0.1:1", "") == []


def test_names_are_kept_for_some_seconds(complete: Completer, api: Api, tmp_path: Path) -> None:
    for _ in range(2):
        assert complete("group", "show", "") == ["billing"]
    assert len(api.paths) == 1
    [file] = (tmp_path / "cache" / "tidemill").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    old_s = time.time() - CACHE_S
    os.utime(file, (old_s, old_s))
    assert complete("group", "show", "") == ["billing"]
    assert len(api.paths) == 2
    file.write_text("damaged")
    assert complete("group", "show", "") == ["billing"]


def test_another_user_gets_no_kept_names(
    complete: Completer, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete("group", "show", "")
    monkeypatch.setenv("TIDEMILL_ADMIN_TOKEN", "of-another-user")
    complete("group", "show", "")
    assert len(api.paths) == 2


def test_an_error_gives_no_names_and_no_output(complete: Completer, api: Api) -> None:
    api.failure = refusal("no right", 403)
    assert complete("topic", "show", "") == []
    assert complete("--namespace", "not legal!", "topic", "show", "") == []
    assert complete("--context", "missing", "topic", "show", "") == []
    assert complete("--token-file", "/proc/none", "topic", "show", "") == []


def test_a_namespace_limits_the_names(complete: Completer, api: Api) -> None:
    complete("--namespace", "shop", "topic", "show", "")
    assert "namespace=shop" in api.paths[0]


def test_contexts_are_completed(complete: Completer) -> None:
    runner = CliRunner()
    for name in ("prod", "staging"):
        assert runner.invoke(app, ["context", "create", name, "https://a"]).exit_code == 0
    assert complete("context", "use", "") == ["prod", "staging"]
    assert complete("topic", "list", "--context", "st") == ["staging"]


def test_a_silent_api_gives_no_names_after_a_bounded_wait(
    complete: Completer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion_names, "NAMES_TIMEOUT_S", NAMES_TIMEOUT_S)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # It accepts and does not answer.
        monkeypatch.setenv("TIDEMILL_ADMIN", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert complete("topic", "show", "") == []
    assert NAMES_TIMEOUT_S <= 0.5


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(shell: str) -> None:
    shown = CliRunner().invoke(app, ["completion", shell])
    assert shown.exit_code == 0
    assert all(name in shown.stdout for name in (COMPLETE, WORDS, WORD, "2>/dev/null"))
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=shown.stdout, text=True, check=True)


def test_an_unknown_shell_is_refused() -> None:
    assert CliRunner().invoke(app, ["completion", "tcsh"]).exit_code == 2
