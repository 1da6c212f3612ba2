"""The token of the admin API never leaves this machine unencrypted, unless a user allows it."""

from __future__ import annotations

import socket

import pytest
from typer.testing import CliRunner

from tidemill.cli.app import app
from tidemill.common.exit_codes import EXIT_UNREACHABLE, EXIT_USAGE

TOKEN = ["--token", "secret"]


def status_and_error(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*arguments, "topic", "list"])
    return result.exit_code, result.output


def test_a_token_is_not_sent_over_http_to_another_machine() -> None:
    status, error = status_and_error("--admin", "http://admin.example:8080", *TOKEN)
    assert status == EXIT_USAGE
    assert "the token would go to admin.example unencrypted" in error
    assert "--plain-token" in error


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_a_token_is_sent_over_http_to_this_machine(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    status, _ = status_and_error("--admin", f"http://{host}:{port}", *TOKEN)
    assert status == EXIT_UNREACHABLE


@pytest.mark.parametrize("given", [["--plain-token", *TOKEN], []])
def test_http_to_another_machine_needs_no_token_or_a_permission(given: list[str]) -> None:
    status, _ = status_and_error("--admin", "http://admin.invalid:8080", *given)
    assert status == EXIT_UNREACHABLE
