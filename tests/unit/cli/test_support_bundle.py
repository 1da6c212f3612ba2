"""`tidemill support-bundle`: the file that it writes."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from tests.support.scripted_api import ApiAnswer, ApiRequest, scripted_api
from tidemill.cli.app import app


def test_other_users_may_not_read_the_bundle(tmp_path: Path) -> None:
    operation = {"id": "admin:1", "state": "DONE", "kind": "support-bundle"}

    def answer(request: ApiRequest) -> ApiAnswer:
        if request.method == "POST":
            return ApiAnswer({"operation": operation})
        return ApiAnswer(operation)

    file = tmp_path / "bundle.tar.gz"
    with scripted_api(answer) as address:
        line = ["--admin", address, "support-bundle", "--file", str(file)]
        done = CliRunner().invoke(app, line)
    assert done.exit_code == 0, done.output
    assert file.stat().st_mode & 0o777 == 0o600
