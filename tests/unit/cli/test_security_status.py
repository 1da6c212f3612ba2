"""`tidemill security status` shows the refused calls of the last day."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from tests.support.scripted_api import ApiAnswer, ApiRequest, refusal, scripted_api
from tidemill.cli.app import app

SECURITY = {
    "inForce": "permissive",
    "mode": "permissive",
    "floor": "off",
    "version": 2,
    "keyIds": ["k1"],
    "proxies": [],
}
SEND = {
    "call": "SendMessage",
    "resource": "Topic:orders",
    "from": "10.0.0.1",
    "result": "would_refuse",
}


def status(pages: dict[str, ApiAnswer], *options: str) -> str:
    """Return the output with these pages of the audit log, by their token."""

    def answer(request: ApiRequest) -> ApiAnswer:
        path, _, query = request.path.partition("?")
        if path == "/security":
            return ApiAnswer(SECURITY)
        assert "kind=refusal" in query
        return pages[query.partition("pageToken=")[2]]

    with scripted_api(answer) as address:
        ended = CliRunner().invoke(app, ["--admin", address, *options, "security", "status"])
    assert ended.exit_code == 0, ended.output
    return ended.output


def page(*records: dict[str, Any], token: str = "") -> ApiAnswer:
    return ApiAnswer({"records": records, **({"nextPageToken": token} if token else {})})


def test_equal_refusals_are_one_row() -> None:
    user = {**SEND, "user": "shop", "count": 49}
    pages = {"": page(SEND, user, token="t"), "t": page(user)}
    lines = status(pages).splitlines()
    assert "refusals in the last day: 99" in lines
    rows = [line.split() for line in lines[-2:]]
    assert rows == [
        ["shop", "SendMessage", "Topic:orders", "would_refuse", "98"],
        ["10.0.0.1", "SendMessage", "Topic:orders", "would_refuse", "1"],
    ]
    found = json.loads(status(pages, "-o", "json"))
    assert [each["calls"] for each in found["refusals"]] == [98, 1]


def test_no_refusal_and_no_right_are_told_apart() -> None:
    assert "refusals in the last day: none" in status({"": page()})
    forbidden = {"": refusal("no right", 403)}
    assert "refusals in the last day: unknown" in status(forbidden)
    assert json.loads(status(forbidden, "-o", "json"))["refusals"] is None
