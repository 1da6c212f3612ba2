"""The import of users: the limit of standard input."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from tidemill.cli import security_import
from tidemill.cli.app import app
from tidemill.common.exit_codes import EXIT_USAGE

CONTENT = "accounts: 5"


@pytest.mark.parametrize(
    ("bytes_max", "reason"),
    [
        (len(CONTENT), "neither a table"),
        (len(CONTENT) - 1, "cannot import -: it is longer than 10 bytes"),
    ],
)
def test_standard_input_that_is_too_long_is_not_cut(
    monkeypatch: pytest.MonkeyPatch, bytes_max: int, reason: str
) -> None:
    monkeypatch.setattr(security_import, "FILE_BYTES_MAX", bytes_max)
    result = CliRunner().invoke(app, ["security", "import", "-"], input=CONTENT)
    assert result.exit_code == EXIT_USAGE
    assert reason in " ".join(result.output.split())
