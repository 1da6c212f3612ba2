"""Formats of the output: each has only data on standard output."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

import tidemill.cli
from tests.support.scripted_api import ApiAnswer, ApiRequest, refusal, scripted_api
from tidemill.cli.app import app
from tidemill.cli.output import OutputFormat

LONG = "a.very.long.name.of.a.consumer.group.that.no.terminal.has.room.for." + "x" * 60
GROUPS: list[dict[str, Any]] = [
    {
        "name": name,
        "deliveryOrder": "FIFO",
        "maxAttempts": 17,
        "state": "ACTIVE",
        "lag": lag,
        "oldestUnackedAtMs": 1_700_000_000_000,
        "inPerSecond": 0.5,
        "outPerSecond": 2.0,
        "consumers": 3,
        "deadLetters": {"open": 0, "lastHour": 0},
    }
    for name, lag in (("billing", 12), (LONG, 0))
]
BROKER_GROUPS = {
    "items": [
        {
            "name": "broker-0",
            "state": "active",
            "isHome": True,
            "address": "10.0.0.2:10911",
            "reachable": True,
            "reason": 'says "no", twice',
            "master": "broker-0",
            "replicas": [],
        }
    ]
}
FORMATS = list(OutputFormat)


def answer(request: ApiRequest) -> ApiAnswer:
    """Answer as an API with two consumer groups and one broker group."""
    path = request.path.partition("?")[0]
    if path == "/groups":
        return ApiAnswer({"groups": GROUPS})
    if path == "/broker-groups":
        return ApiAnswer(BROKER_GROUPS)
    if request.method == "POST":
        return ApiAnswer(GROUPS[0])
    return refusal("there is nothing", 404)


def run(*arguments: str) -> Result:
    with scripted_api(answer) as address:
        return CliRunner().invoke(app, [*arguments, "--admin", address], env={"COLUMNS": "60"})


def test_json_is_the_answer_of_the_api() -> None:
    assert json.loads(run("broker-group", "list", "-o", "json").stdout) == BROKER_GROUPS


def test_jsonl_has_a_row_per_line() -> None:
    lines = run("group", "list", "-o", "jsonl").stdout.splitlines()
    assert [json.loads(line) for line in lines] == GROUPS
    lines = run("broker-group", "list", "-o", "jsonl").stdout.splitlines()
    assert [json.loads(line) for line in lines] == BROKER_GROUPS["items"]


def test_yaml_is_the_answer_of_the_api() -> None:
    text = run("broker-group", "list", "-o", "yaml").stdout
    assert yaml.safe_load(text) == BROKER_GROUPS
    assert text.startswith("---\n"), "documents of a watch follow each other"


def test_csv_has_a_header_and_quotes() -> None:
    rows = list(csv.DictReader(io.StringIO(run("broker-group", "list", "-o", "csv").stdout)))
    [row] = rows
    assert (row["ADDRESS"], row["REASON"]) == ("10.0.0.2:10911", 'says "no", twice')
    groups = list(csv.DictReader(io.StringIO(run("group", "list", "-o", "csv").stdout)))
    assert [row["GROUP"] for row in groups] == [each["name"] for each in GROUPS]


def test_name_has_only_ids_that_other_commands_take() -> None:
    assert run("group", "list", "-o", "name").stdout == f"billing\n{LONG}\n"
    # The table marks the home, and the name does not.
    assert run("broker-group", "list", "-o", "name").stdout == "broker-0\n"


def test_wide_prints_a_line_per_row() -> None:
    lines = run("group", "list", "-o", "wide").stdout.splitlines()
    assert len(lines) == 1 + len(GROUPS)
    assert LONG in lines[2]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_missing_name_prints_nothing_on_standard_output(kind: OutputFormat) -> None:
    ended = run("group", "show", "missing", "-o", kind.value)
    assert (ended.exit_code, ended.stdout) == (1, "")
    assert "there is nothing" in ended.stderr


@pytest.mark.parametrize("kind", FORMATS)
def test_a_change_prints_its_result(kind: OutputFormat) -> None:
    ended = run("group", "resume", "billing", "-o", kind.value)
    sentence = "group billing receives messages\n"
    printed = {
        OutputFormat.TABLE: sentence,
        OutputFormat.WIDE: sentence,
        OutputFormat.CSV: "",
        OutputFormat.NAME: "",
    }
    if kind in printed:
        assert ended.stdout == printed[kind]
        assert (ended.stderr == sentence) is (printed[kind] == "")
    else:
        assert yaml.safe_load(ended.stdout) == GROUPS[0], "YAML reads JSON too"


@pytest.mark.parametrize("kind", ["table", "name"])
def test_quiet_prints_no_sentence_about_a_change(kind: str) -> None:
    assert run("group", "resume", "billing", "--quiet", "-o", kind).output == ""


def test_quiet_prints_what_a_command_shows() -> None:
    assert "billing" in run("group", "list", "--quiet").stdout


def test_one_module_prints_all_documents() -> None:
    """A command that prints JSON by itself would have no other format."""
    folder = Path(tidemill.cli.__file__).parent
    printing = {file.name for file in folder.glob("*.py") if "echo(json.dumps" in file.read_text()}
    assert printing == {"output.py"}
