"""Variables of the command line, which stand in the environment that processes are started from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer

from tidemill.cli.app import app
from tidemill.standalone.settings import StandaloneSettings


def variables(command: Any) -> Iterator[str]:
    """Yield the variables that a command and those below it read."""
    for parameter in command.params:
        found = parameter.envvar
        yield from [found] if isinstance(found, str) else found or ()
    for below in getattr(command, "commands", {}).values():
        yield from variables(below)


VARIABLES = sorted(set(variables(typer.main.get_command(app))))


def test_there_are_variables() -> None:
    assert "TIDEMILL_ADMIN" in VARIABLES
    assert "TIDEMILL_ENDPOINTS" in VARIABLES


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_variable_of_the_command_line_keeps_no_process_from_starting(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "127.0.0.1:8081")
    StandaloneSettings.load([])
