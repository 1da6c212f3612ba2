"""`tidemill group reset` in several topics, against an API of the test."""

from __future__ import annotations

import io

import pytest
from typer.testing import CliRunner

from tests.support.scripted_api import ApiAnswer, ApiRequest, scripted_api
from tidemill.cli.app import app

RESET = ("group", "reset", "billing", "--topic=orders", "--topic=refunds", "--to=latest")


class Confirmation(io.StringIO):
    """An answer that is typed on a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_topic_is_known_without_the_answer_of_an_older_admin_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Confirmation("y\n"))
    older = {"queues": [{"broker": "broker-0", "queueId": 3, "toOffset": 7}]}
    line = ["group", "reset", "billing", "--topic=orders", "--to=latest"]
    api = scripted_api(lambda _request: ApiAnswer(older))
    with api as address, pytest.raises(SystemExit) as end:
        app(["--admin", address, *line])
    assert end.value.code == 0
    printed = capsys.readouterr()
    assert "orders, queue 3: from" in printed.err
    assert printed.out.splitlines()[1].split() == ["3", "7"]


def test_several_topics_are_one_call_with_a_row_per_queue() -> None:
    asked: list[ApiRequest] = []

    def answer(request: ApiRequest) -> ApiAnswer:
        asked.append(request)
        queues = [
            {"topic": topic, "broker": "broker-0", "queueId": 0, "toOffset": 7}
            for topic in request.body["topics"]
        ]
        return ApiAnswer({"dryRun": False, "queues": queues})

    with scripted_api(answer) as address:
        ended = CliRunner().invoke(app, ["--admin", address, "--namespace=shop", *RESET, "--yes"])
    assert ended.exit_code == 0, ended.output
    [request] = asked
    assert (request.method, request.path) == ("POST", "/groups/shop%25billing:resetOffset")
    topics = ["shop%orders", "shop%refunds"]
    assert request.body == {"topics": topics, "to": "latest", "dryRun": False}
    head, *rows = ended.output.splitlines()
    assert head.split()[:3] == ["TOPIC", "QUEUE", "FROM"]
    assert [row.split()[:2] for row in rows] == [[topic, "0"] for topic in topics]
