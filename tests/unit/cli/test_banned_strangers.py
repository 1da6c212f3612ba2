"""`tidemill ban create --client`: a warning for an id that no client has."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from tests.support.scripted_api import ApiAnswer, ApiRequest, refusal, scripted_api
from tidemill.cli.app import app

BAN = ApiAnswer({"kind": "CLIENT", "value": "worker-7", "untilMs": 0, "ended": False})


@pytest.mark.parametrize(
    ("found", "is_warned"),
    [
        (ApiAnswer({"clientId": "worker-7"}), False),
        (refusal("it is unknown", 404), True),
        (refusal("it needs a right", 403), False),
    ],
)
def test_a_ban_of_an_unknown_client_is_a_warning(found: ApiAnswer, *, is_warned: bool) -> None:
    asked: list[str] = []

    def answer(request: ApiRequest) -> ApiAnswer:
        asked.append(request.method)
        return BAN if request.method == "POST" else found

    with scripted_api(answer) as address:
        line = ["--admin", address, "ban", "create", "--client", "worker-7"]
        done = CliRunner().invoke(app, line)
    assert done.exit_code == 0, done.output
    assert ("client worker-7 is not connected" in done.stderr) is is_warned
    assert asked == ["GET", "POST"], "the ban disconnects the client"
