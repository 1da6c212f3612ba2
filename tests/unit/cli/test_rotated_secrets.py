"""`tidemill user rotate` of the own user: the saved credentials stay valid."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.scripted_api import ApiAnswer, ApiRequest, scripted_api
from tidemill.cli.app import app

OLD, NEW = "a-secret-of-sixteen", "the-secret-after-it"


@pytest.mark.parametrize(
    ("arguments", "saved"),
    [
        (["user", "rotate", "admin", "--retire-after", "0s"], NEW),
        (["user", "rotate", "orders"], OLD),
        (["user", "rotate", "admin", "--dry-run"], OLD),
    ],
)
def test_a_rotation_of_the_saved_user_saves_its_new_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], saved: str
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file = tmp_path / "tidemill" / "credentials"
    file.parent.mkdir()
    file.touch(0o600)

    def answer(request: ApiRequest) -> ApiAnswer:
        return ApiAnswer({} if "dryRun" in request.path else {"secret": NEW})

    with scripted_api(answer) as address:
        file.write_text(f"admin\n{OLD}\n{address}\n")
        ended = CliRunner().invoke(app, ["--admin", address, *arguments])
    assert ended.exit_code == 0, ended.output
    assert file.read_text().split() == ["admin", saved, address]
    assert file.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in file.parent.iterdir()] == [file.name]
    assert (f"saved in {file}" in ended.output) is (saved == NEW)


@pytest.mark.parametrize(
    ("not_after_ms", "sentence"),
    [
        (4_000_000_000_000, "the former one is valid until 2096-10-02 07:06:40.000Z"),
        (1_000, "the former ones have ended"),
    ],
)
def test_a_rotation_reports_how_long_the_former_secret_is_valid(
    not_after_ms: int, sentence: str
) -> None:
    secrets = [{"id": 1, "notAfterMs": not_after_ms}, {"id": 2, "notAfterMs": 0}]
    after = ["--retire-after", "0s"] if not_after_ms == 1_000 else []
    with scripted_api(lambda _: ApiAnswer({"secret": NEW, "secrets": secrets})) as address:
        line = ["--admin", address, "user", "rotate", "orders", *after]
        ended = CliRunner().invoke(app, line)
    assert ended.exit_code == 0, ended.output
    assert sentence in ended.output
