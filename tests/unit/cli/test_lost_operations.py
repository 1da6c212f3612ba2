"""`tidemill operation` with an operation whose admin process has ended."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from tests.support.scripted_api import ApiAnswer, scripted_api
from tidemill.cli.app import app

ID = "admin:1796000000000101"
REASON = "its admin process has ended, or another admin process runs it"
LOST = {
    "id": ID,
    "kind": "APPLY_DEFINITIONS",
    "state": "FAILED",
    "error": REASON,
    "createdAtMs": 1_796_000_000_000,
    "brokers": [],
}


@pytest.mark.parametrize(("verb", "status"), [("show", 0), ("wait", 1)])
def test_an_operation_without_numbers_shows_its_reason(verb: str, status: int) -> None:
    with scripted_api(lambda _: ApiAnswer(LOST)) as address:
        done = CliRunner().invoke(app, ["--admin", address, "operation", verb, ID])
    assert done.exit_code == status
    assert REASON in done.stdout
    assert "? of ?" in done.stdout
