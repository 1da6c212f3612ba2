"""Release jobs end with one sentence if an option, a file or an answer has a wrong form."""

from __future__ import annotations

import json
from http import HTTPStatus
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.support.worlds.memory_kubernetes import Answer, Json, KubernetesServer
from tidemill.cli.app import app
from tidemill.common.exit_codes import EXIT_UNREACHABLE, EXIT_USAGE

VALUES = {"brokerGroups": [{"name": "broker-0", "address": "h:1"}]}
PLAN = [{"group": "broker-0", "statefulSet": "mill-broker-0", "size": "20Gi"}]


class OneAnswer(KubernetesServer):
    """A server that gives the same answer to each call."""

    def __init__(self, body: object) -> None:
        super().__init__()
        self._body = body

    def answer(self, method: str, path: str, body: Json) -> Answer:
        del method, path, body
        return Answer(HTTPStatus.OK, self._body)  # type: ignore[arg-type]  # wrong on purpose


def run(*arguments: str, admin: str = "http://127.0.0.1:1") -> Result:
    """Run a job, and return its result without a traceback."""
    done = CliRunner().invoke(app, ["--admin", admin, "release", *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


@pytest.mark.parametrize("body", [{}, [], "a page", None, {"items": [{}]}, {"items": {}}])
def test_an_answer_of_another_server_is_named(tmp_path: Path, body: object) -> None:
    file = tmp_path / "values.json"
    file.write_text(json.dumps(VALUES), "utf-8")
    server = OneAnswer(body)
    with server.serving():
        done = run("provision", f"--file={file}", "--patience-s=1", admin=server.url)
        assert done.exit_code == EXIT_UNREACHABLE
        assert "does not answer as the REST API of Tidemill does" in done.output
        done = run("check", "--kept=a", "--gone=b", "--patience-s=1", admin=server.url)
        assert done.exit_code == EXIT_UNREACHABLE
        assert "b: the backlog is unknown: http" in done.output
        done = run("check", "--kept=a", "--patience-s=1", admin=server.url)
        assert done.exit_code == 0, "no broker group is removed"
        assert "does not answer as the REST API of Tidemill does" in done.output


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"a": 1}, "'brokerGroups' is missing"),
        ({"brokerGroups": [{"name": "a"}]}, "'address' is missing"),
        ({"brokerGroups": [], "topics": [{}]}, "'name' is missing"),
        ([], "is not an object"),
        ({"brokerGroups": None}, "is not an object"),
        ("text", "is not an object"),
    ],
)
def test_values_of_another_form_are_named(tmp_path: Path, values: object, reason: str) -> None:
    file = tmp_path / "values.json"
    file.write_text(json.dumps(values), "utf-8")
    done = run("provision", f"--file={file}")
    assert done.exit_code == EXIT_USAGE
    assert str(file) in done.output
    assert reason in done.output


@pytest.mark.parametrize("volumes", ["broker-0", "broker-0=", "=1Gi/a/b", "broker-0=1Gx/a/b"])
def test_check_rejects_volumes_of_another_form(volumes: str) -> None:
    done = run("check", "--kept=broker-0", f"--volumes={volumes}", "--without-rest-api")
    assert done.exit_code == EXIT_USAGE
    assert f"--volumes: {volumes} has not the form GROUP=SIZE/CLASS/MODES" in done.output


def test_check_rejects_a_recorded_format_that_is_no_number(tmp_path: Path) -> None:
    (tmp_path / "store-format").write_text("abc")
    done = run("check", "--kept=broker-0", f"--installed={tmp_path}", "--without-rest-api")
    assert done.exit_code == EXIT_USAGE
    assert "store-format abc is not a number" in done.output


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ("no JSON", "is not a list of broker groups as JSON"),
        ("{}1", "is not a list of broker groups as JSON"),
        ("1", "is not a list of broker groups as JSON"),
        ('{"a": 1}', "is not a list of broker groups as JSON"),
        ('[{"group": "a"}]', "lacks 'statefulSet'"),
        (json.dumps([PLAN[0] | {"size": "20Gx"}]), "is not a list of broker groups as JSON"),
        (json.dumps([PLAN[0] | {"size": "-1Gi"}]), "the size -1Gi is not above 0"),
        (json.dumps([PLAN[0] | {"size": None}]), "is not a list of broker groups as JSON"),
    ],
)
def test_a_plan_of_another_form_is_named(plan: str, reason: str) -> None:
    for job in (("grow", "--installed=x"), ("replace-volumes",)):
        done = run(*job, f"--plan={plan}", "--patience-s=0")
        assert done.exit_code == EXIT_USAGE
        assert f"--plan {reason}" in done.output or f": {reason}" in done.output


@pytest.mark.parametrize("plan", ["no JSON", "[]", "{}", '{"labels": {}, "authority": 1}'])
def test_a_plan_of_certificates_of_another_form_is_named(plan: str) -> None:
    done = run("certificates", f"--plan={plan}")
    assert done.exit_code == EXIT_USAGE
    assert "--plan " in done.output


@pytest.mark.parametrize("names", ["", ",", "mill-a,", "mill-a, ,mill-b"])
def test_roll_rejects_an_empty_name(names: str) -> None:
    done = run("roll", f"--stateful-sets={names}")
    assert done.exit_code == EXIT_USAGE
    assert "--stateful-sets: a name is empty" in done.output
