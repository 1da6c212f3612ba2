"""Options of bans, tokens, users and the audit log that no call of the API can have."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from tests.support.scripted_api import ApiAnswer, ApiRequest, scripted_api
from tidemill.cli.app import app
from tidemill.common.exit_codes import EXIT_USAGE


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["ban", "create", "--address", "10.1.2.3/16"], "neither an address nor a range"),
        (["ban", "delete", "--address", "host"], "neither an address nor a range"),
        (["ban", "create", "--client", "c", "--for", "0s"], "--for is from 1ms to 3650d, not 0s"),
        (["ban", "create", "--client", "c", "--for", "3651d"], "--for is from 1ms to 3650d"),
        (["ban", "create", "--client", "c", "--for", ""], "is not a duration"),
        (["ban", "delete", "--ended", "--user", "x"], "name no subject with it"),
        (["token", "create", "ci", "--expires-after", "500d"], "from 1ms to 400d, not 500d"),
        (["user", "rotate", "orders", "--retire-after", "401d"], "from 0s to 400d, not 401d"),
        (["user", "create", "a/b"], "is not a name: names"),
        (["audit", "list", "--result", "foo"], "'would_refuse'"),
        (["audit", "list", "--action", "foo"], "'update', 'delete'"),
    ],
)
def test_a_wrong_option_reaches_no_api(arguments: list[str], reason: str) -> None:
    requests: list[ApiRequest] = []

    def answer(request: ApiRequest) -> ApiAnswer:
        requests.append(request)
        return ApiAnswer({})

    with scripted_api(answer) as address:
        ended = CliRunner().invoke(app, ["--admin", address, *arguments])
    assert (ended.exit_code, requests) == (EXIT_USAGE, []), repr(ended.exception)
    assert reason in " ".join(ended.output.replace("│", " ").split())


def test_a_ban_has_the_given_duration_or_no_end() -> None:
    bodies: list[object] = []

    def answer(request: ApiRequest) -> ApiAnswer:
        if request.method == "POST":  # The other call looks up the client.
            bodies.append(request.body)
        return ApiAnswer({"kind": "client", "value": "c", "untilMs": 0, "ended": False})

    with scripted_api(answer) as address:
        for duration in (["--for", "1ms"], []):
            line = ["--admin", address, "ban", "create", "--client", "c", *duration]
            assert CliRunner().invoke(app, line).exit_code == 0
    assert bodies == [{"clientId": "c", "forMs": 1}, {"clientId": "c"}]
