"""`tidemill group reset` in several topics, against an API of the test."""

from __future__ import annotations

from typer.testing import CliRunner

from tests.support.scripted_api import ApiAnswer, ApiRequest, scripted_api
from tidemill.cli.app import app

RESET = ("group", "reset", "billing", "--topic=orders", "--topic=refunds", "--to=latest")


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
