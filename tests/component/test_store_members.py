"""`tidemill store` on a folder with several stores. One of them has lost its log."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.worlds.engine_world import SMALL, World
from tidemill.broker.posix_disk import PosixDisk
from tidemill.cli.app import run
from tidemill.common.exit_codes import EXIT_PROBLEM


def tidemill(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        run(["store", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def opened(store: Path) -> World:
    return World(PosixDisk(store), config=SMALL)  # type: ignore[arg-type]  # No fault is made.


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return the folder of a home and a member, with a backup beside it."""
    folder = tmp_path / "data"
    for store in (folder, folder / "broker-2"):
        world = opened(store)
        world.send(*[f"m{n}" for n in range(20)])
        world.checkpoint()
    assert tidemill("copy", folder, tmp_path / "backup") == 0
    return folder


def test_a_member_without_a_log_is_damaged_and_mended(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(data / "broker-2" / "log")
    assert tidemill("check", data) == EXIT_PROBLEM
    assert tidemill("copy", data, data.parent / "second") == 2
    mend = ("mend", data, "--from", data.parent / "backup")
    assert tidemill(*mend) == 1
    assert "accept the loss" in capsys.readouterr().out
    assert tidemill(*mend, "--accept-loss", "--dry-run") == 0
    assert tidemill(*mend, "--accept-loss") == 0
    assert "log/00000000000000000000.log taken from the backup" in capsys.readouterr().out
    assert opened(data / "broker-2").drain() == [f"m{n}" for n in range(20)]


def test_a_mend_reports_a_missing_member_of_the_backup(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(data / "broker-2")
    assert tidemill("mend", data, "--from", data.parent / "backup") == 1
    assert "the directory does not" in capsys.readouterr().out
