"""Commands on broker groups, replicas and the cluster, against an API of the test."""

from __future__ import annotations

import io
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.support.scripted_api import ApiAnswer, ApiRequest, refusal, scripted_api
from tidemill.cli.app import app
from tidemill.common.errors import OLDER_CONTROLLER
from tidemill.common.exit_codes import EXIT_PARTIAL, EXIT_PROBLEM, EXIT_REFUSED, EXIT_USAGE

REPLICA: dict[str, Any] = {
    "replica": 1,
    "role": "in-sync",
    "address": "10.0.0.2:10911",
    "lagBytes": 0,
    "silentMs": 20,
    "unclean": False,
    "diverged": False,
    "full": False,
    "unheard": [],
}
REPLICAS = {"name": "b", "epoch": 3, "master": 0, "minInSync": 2, "replicas": [REPLICA]}
MEMBER = {
    "name": "b",
    "state": "draining",
    "isHome": False,
    "address": "10.0.0.2:10911",
    "reachable": True,
    "master": "b",
    "replicas": [],
}
OVERVIEW: dict[str, Any] = {"status": "OK", "problems": [], "brokerGroups": [MEMBER]}
PROBLEM = {
    "code": "LagGrowing",
    "object": "billing",
    "text": "9 messages and no consumer",
    "command": "tidemill group show billing",
    "runbook": "runbooks/LagGrowing.md",
}


class Terminal(io.StringIO):
    """A standard input that is a terminal."""

    def isatty(self) -> bool:
        return True


class RecordingApi:
    """An API with one answer to all requests."""

    def __init__(self, answer: Any) -> None:
        self.calls: list[tuple[str, str, Any]] = []
        self._answer = answer

    def answer(self, request: ApiRequest) -> ApiAnswer:
        self.calls.append((request.method, request.path, request.body))
        return ApiAnswer(self._answer)

    def run(self, *arguments: str) -> Result:
        with scripted_api(self.answer) as address:
            return CliRunner().invoke(app, ["--admin", address, *arguments])


@pytest.mark.parametrize(
    ("arguments", "method", "path", "body"),
    [
        (
            ("broker-group", "set", "b", "--min-in-sync", "2"),
            "POST",
            "/replicas/b:setMinInSync",
            {"minInSync": 2},
        ),
        (
            ("broker-group", "transfer", "b", "--unclean", "--to=1", "--reason=r", "--yes"),
            "POST",
            "/replicas/b:replace",
            {"target": 1, "reason": "r"},
        ),
        (("broker-group", "remove", "b", "--record-only", "--yes"), "DELETE", "/replicas/b", None),
        (
            ("replica", "drain", "b-1", "--yes"),
            "POST",
            "/replicas/b:drain",
            {"replica": 1, "undo": False},
        ),
        (("replica", "undrain", "b-1"), "POST", "/replicas/b:drain", {"replica": 1, "undo": True}),
    ],
)
def test_a_command_changes_the_replicas_of_a_broker_group(
    arguments: tuple[str, ...], method: str, path: str, body: Any
) -> None:
    api = RecordingApi(REPLICAS)
    ended = api.run(*arguments)
    assert ended.exit_code == 0, ended.output
    [(called, url, sent)] = api.calls
    assert (called, url, sent) == (method, path, body)


@pytest.mark.parametrize(
    "arguments",
    [
        ("broker-group", "set", "b", "--min-in-sync", "1"),
        ("broker-group", "transfer", "b"),
        ("broker-group", "transfer", "b", "--unclean", "--to=1", "--reason=r"),
        ("broker-group", "remove", "b", "--record-only"),
        ("replica", "drain", "b-1"),
        ("replica", "undrain", "b-1"),
    ],
)
def test_a_dry_run_asks_the_api_for_the_effect(arguments: tuple[str, ...]) -> None:
    api = RecordingApi(REPLICAS | {"lostBytes": 0})
    ended = api.run(*arguments, "--dry-run")
    assert ended.exit_code == 0, ended.output
    [(_, path, _)] = api.calls
    assert path.endswith("?dryRun=true")
    assert "would" in ended.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("broker-group", "transfer", "b"),
        ("broker-group", "transfer", "b", "--unclean", "--to=1", "--reason=r"),
        ("replica", "drain", "b-1"),
    ],
)
def test_a_question_without_a_dry_run_of_older_controllers_names_yes(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal())
    older = refusal(f"the controller at c:1 {OLDER_CONTROLLER}; nothing was changed")
    with scripted_api(lambda _request: older) as address:
        line = ["--admin", address, *arguments]
        for options, is_named in (((), True), (("--dry-run",), False)):
            with pytest.raises(SystemExit) as end:
                app([*line, *options])
            assert end.value.code == EXIT_REFUSED
            assert ("or add --yes" in capsys.readouterr().err) is is_named


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ({"lostBytes": 0}, "misses no acknowledged message"),
        ({"lostBytes": 512}, "512 B of acknowledged messages would be lost"),
        ({"unknown": "no heartbeat"}, "their size is unknown: no heartbeat"),
    ],
)
def test_the_dry_run_of_an_unclean_transfer_names_the_loss(loss: Any, words: str) -> None:
    api = RecordingApi(REPLICAS | {"master": 1} | loss)
    unclean = ("broker-group", "transfer", "b", "--unclean", "--to=1", "--reason=r")
    assert words in api.run(*unclean, "--dry-run").output


@pytest.mark.parametrize(
    "arguments",
    [
        ("broker-group", "set", "b"),
        ("broker-group", "transfer", "b", "--unclean", "--to=1", "--yes"),
        ("broker-group", "transfer", "b", "--unclean", "--reason=r", "--yes"),
        ("broker-group", "transfer", "b", "--reason=r"),
        ("broker-group", "remove", "b", "--record-only", "--force", "--yes"),
        ("broker-group", "remove", "b", "--record-only"),
        ("broker-group", "set", "b", "--min-in-sync", "1"),
        ("broker-group", "transfer", "b", "--unclean", "--to=1", "--reason=r"),
        ("replica", "drain", "b"),
    ],
)
def test_an_incomplete_command_changes_nothing(arguments: tuple[str, ...]) -> None:
    api = RecordingApi(REPLICAS)
    assert api.run(*arguments).exit_code == EXIT_USAGE
    assert api.calls == []


def test_undrain_keeps_the_address() -> None:
    api = RecordingApi(MEMBER | {"group": MEMBER | {"state": "active"}})
    ended = api.run("broker-group", "undrain", "b")
    assert ended.output == "broker group b stores new messages again\n"
    assert [method for method, _, _ in api.calls] == ["GET", "PUT"]
    assert api.calls[1][2] == {"address": "10.0.0.2:10911"}


def test_undrain_of_an_active_broker_group_changes_nothing() -> None:
    api = RecordingApi(MEMBER | {"state": "active"})
    assert "is not draining, unchanged" in api.run("broker-group", "undrain", "b").output
    assert [method for method, _, _ in api.calls] == ["GET"]


def test_a_replica_is_shown_by_the_name_that_the_list_prints() -> None:
    api = RecordingApi(REPLICAS)
    listed = api.run("replica", "list", "b").output
    name = listed.splitlines()[1].split()[0]
    assert name == "b-1"
    shown = api.run("replica", "show", name)
    assert "in-sync" in shown.output


@pytest.mark.parametrize(
    ("overview", "status"),
    [
        (OVERVIEW, 0),
        (OVERVIEW | {"problems": [PROBLEM | {"severity": "NOTICE"}]}, 0),
        (OVERVIEW | {"status": "DEGRADED", "problems": [PROBLEM]}, EXIT_PROBLEM),
        (OVERVIEW | {"unanswered": ["disks"]}, EXIT_PARTIAL),
        (OVERVIEW | {"unreachable": ["b"]}, EXIT_PARTIAL),
    ],
)
def test_the_check_of_a_cluster_has_a_status(overview: dict[str, Any], status: int) -> None:
    ended = RecordingApi(overview).run("cluster", "show", "--check")
    assert ended.exit_code == status
    for problem in overview["problems"]:
        assert problem["command"] in ended.output


def test_without_check_a_problem_is_only_shown() -> None:
    overview = OVERVIEW | {"status": "DEGRADED", "problems": [PROBLEM]}
    ended = RecordingApi(overview).run("cluster", "show")
    assert (ended.exit_code, "Status: DEGRADED" in ended.output) == (0, True)
