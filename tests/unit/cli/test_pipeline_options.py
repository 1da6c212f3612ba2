"""Options of the pipeline's commands, as they stand on the command line and in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from tidemill_pipeline.cli import app


def read(command: str, *arguments: str) -> dict[str, Any]:
    """Return what a command has read of its command line."""
    group: Any = typer.main.get_command(app)
    params: dict[str, Any] = group.commands[command].make_context(command, list(arguments)).params
    return params


@pytest.mark.parametrize(
    ("given", "every_s"), [("60", 60), ("90s", 90), ("1h30m", 5_400), ("1000ms", 1), ("1.5", 1.5)]
)
def test_archive_every_accepts_a_duration_or_seconds(
    tmp_path: Path, given: str, every_s: float
) -> None:
    config = tmp_path / "job.yaml"
    config.write_text(f"to: ./archive\nevery: {given}\n")
    assert read("archive", "--to", "a", "--every", given)["every"] == every_s
    assert read("archive", "--config", str(config))["every"] == every_s


@pytest.mark.parametrize("given", ["0.5", "0", "999ms"])
def test_archive_every_rejects_less_than_a_second(tmp_path: Path, given: str) -> None:
    config = tmp_path / "job.yaml"
    config.write_text(f"to: ./archive\nevery: {given}\n")
    for arguments in (("--to", "a", "--every", given), ("--config", str(config))):
        with pytest.raises(typer.BadParameter, match=f"{given} is shorter than 1 s"):
            read("archive", *arguments)


@pytest.mark.parametrize(("given", "grace_s"), [("0", 0), ("0.5", 0.5), ("10m", 600)])
def test_the_grace_of_an_audit_is_a_duration_or_seconds(given: str, grace_s: float) -> None:
    assert read("audit", "--to", "a", "--grace", given)["grace"] == grace_s


def test_without_a_word_an_archive_ends_and_an_audit_has_a_grace_of_ten_minutes() -> None:
    assert read("archive", "--to", "a")["every"] is None
    assert read("audit", "--to", "a")["grace"] == 600


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("topics", "this command has no option topics; did you mean topic?"),
        ("batch_row", "this command has no option batch_row; did you mean batch-rows?"),
        ("zzz", "this command has no option zzz"),
    ],
)
def test_an_unknown_option_in_a_file_suggests_the_nearest_one(
    tmp_path: Path, name: str, sentence: str
) -> None:
    config = tmp_path / "job.yaml"
    config.write_text(f"{name}: 1\n")
    with pytest.raises(typer.BadParameter) as refused:
        read("archive", "--config", str(config))
    assert str(refused.value) == f"{config}: {sentence}"
