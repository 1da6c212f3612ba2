"""The exit codes of the command line, as docs/operations/cli.md lists them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.scripted_api import ApiAnswer, ApiRequest, refusal, scripted_api
from tidemill.cli.app import app
from tidemill.common import exit_codes

PAGE = Path(__file__).parents[3] / "docs" / "operations" / "cli.md"
DENIED = {"allowed": False, "reason": "no entry allows it"}
PROBLEM = {"code": "DiskFull", "object": "b", "text": "full", "command": "tidemill storage show"}
DOWN = {"status": "DOWN", "problems": [PROBLEM]}
# Arguments, the answer of the API (None: no API), and the exit code.
CASES: list[tuple[str, ApiAnswer | None, int]] = [
    ("topic list", ApiAnswer({"topics": []}), 0),
    ("topic show a", refusal("there is no topic 'a'", 404), exit_codes.EXIT_REFUSED),
    ("topic delete a --yes", refusal("an operation uses it"), exit_codes.EXIT_REFUSED),
    ("topic paint", ApiAnswer({}), exit_codes.EXIT_USAGE),
    ("topic delete a", ApiAnswer({}), exit_codes.EXIT_USAGE),
    ("topic list --output xml", ApiAnswer({}), exit_codes.EXIT_USAGE),
    ("topic list", None, exit_codes.EXIT_UNREACHABLE),
    ("cluster show --check", ApiAnswer(DOWN), exit_codes.EXIT_PROBLEM),
    ("acl check --user u --action Pub --topic t", ApiAnswer(DENIED), exit_codes.EXIT_PROBLEM),
    ("filter check (", None, exit_codes.EXIT_PROBLEM),
    ("topic list", ApiAnswer({"topics": [], "unreachable": ["b"]}), exit_codes.EXIT_PARTIAL),
]


def run(arguments: str, answer: ApiAnswer | None) -> int:
    def reply(_request: ApiRequest) -> ApiAnswer:
        assert answer is not None
        return answer

    with scripted_api(reply) as address:
        place = "http://127.0.0.1:1" if answer is None else address
        return CliRunner().invoke(app, [*arguments.split(), "--admin", place]).exit_code


@pytest.mark.parametrize(("arguments", "answer", "code"), CASES)
def test_a_command_ends_with_its_code(arguments: str, answer: ApiAnswer | None, code: int) -> None:
    assert run(arguments, answer) == code


def test_ctrl_c_ends_a_command_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_arguments: Any, **_options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("httpx.Client.request", interrupt)
    assert run("topic list", ApiAnswer({})) == exit_codes.EXIT_INTERRUPTED


def test_the_page_lists_all_codes() -> None:
    section = PAGE.read_text("utf-8").partition("## Exit status")[2].partition("\n## ")[0]
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", section, flags=re.MULTILINE)}
    known = {value for name, value in vars(exit_codes).items() if name.startswith("EXIT_")}
    assert listed == known | {0}
    tested = {code for _, _, code in CASES} | {exit_codes.EXIT_INTERRUPTED}
    assert tested == listed
