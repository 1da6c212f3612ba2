"""`tidemill group reset` in several topics, against an API of the test."""

from __future__ import annotations

import io

import pytest
from typer.testing import CliRunner

from tests.support.scripted_api import ApiAnswer, ApiRequest, scripted_api
from tidemill.cli.app import app

QUEUES = ("--queue=broker-0/3=17", "--queue=4=0")
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


def test_single_queues_are_one_call_with_exact_offsets() -> None:
    asked: list[ApiRequest] = []

    def answer(request: ApiRequest) -> ApiAnswer:
        asked.append(request)
        return ApiAnswer({"dryRun": True, "queues": []})

    line = ["group", "reset", "billing", "--topic=orders", *QUEUES, "--dry-run"]
    with scripted_api(answer) as address:
        ended = CliRunner().invoke(app, ["--admin", address, *line])
    assert ended.exit_code == 0, ended.output
    queues = [{"broker": "broker-0", "queue": 3, "offset": 17}, {"queue": 4, "offset": 0}]
    assert [each.body for each in asked] == [{"topic": "orders", "queues": queues, "dryRun": True}]


@pytest.mark.parametrize(
    "wrong",
    [
        ("--queue=broker-0/3",),
        ("--queue=3:17",),
        ("--queue=/3=17",),
        ("--queue=3=-1",),
        ("--queue=3=17", "--to=latest"),
        ("--queue=3=17", "--offset=0"),
        ("--queue=3=17", "--topic=refunds"),
        (),
    ],
)
def test_a_queue_without_an_offset_or_with_another_target_is_a_usage_error(
    wrong: tuple[str, ...],
) -> None:
    line = ["group", "reset", "billing", "--topic=orders", *wrong, "--yes"]
    ended = CliRunner().invoke(app, ["--admin", "127.0.0.1:1", *line])
    assert ended.exit_code == 2, ended.output
