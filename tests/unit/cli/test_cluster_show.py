"""`tidemill cluster show`: the status of a cluster of which the user sees a part."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner, Result

from tests.support.scripted_api import ApiAnswer, ApiRequest, scripted_api
from tidemill.cli.app import app
from tidemill.common.exit_codes import EXIT_PARTIAL


def show(status: str, hidden: list[str]) -> Result:
    """Show a cluster without problems."""

    def answer(request: ApiRequest) -> ApiAnswer:
        if request.path == "/session":
            return ApiAnswer({"isSuper": not hidden} | ({"hidden": hidden} if hidden else {}))
        return ApiAnswer({"status": status, "problems": []})

    with scripted_api(answer) as address:
        return CliRunner().invoke(app, ["--admin", address, "cluster", "show"])


def test_the_status_is_that_of_the_whole_cluster() -> None:
    result = show("OK", [])
    assert (result.exit_code, "Status: OK" in result.stdout) == (0, True)


@pytest.mark.parametrize(("status", "shown"), [("OK", "unknown"), ("DEGRADED", "DEGRADED")])
def test_hidden_objects_make_a_good_status_unknown(status: str, shown: str) -> None:
    result = show(status, ["broker groups", "topics"])
    assert result.exit_code == EXIT_PARTIAL
    assert f"Status: {shown}" in result.stdout
    assert "may not see all broker groups, topics" in result.stderr
