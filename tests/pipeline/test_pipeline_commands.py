"""What the commands say to wrong input: a sentence and a status, before Spark is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tidemill.cli.pipeline import app
from tidemill.cli.rest import EXIT_REFUSED

RIGHT = '{"message_id": "a", "topic": "t"}\n'


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("archive-verify --to nosuch", "there is no archive at nosuch"),
        ("archive-compact --to nosuch", "there is no archive at nosuch"),
        ("archive-expire --to nosuch --days 1", "there is no archive at nosuch"),
        ("archive-vacuum --to nosuch", "there is no archive at nosuch"),
        ("replay --from nosuch --into t --state s", "there is no archive at nosuch"),
        ("replay --from nosuch --into t --state s --option bogus", "bogus is not name=value"),
        ("archive --to file", "file is no folder"),
        ("audit --to a --sends nofile", "--sends nofile: there is no such file"),
        ("audit --to a --sends text", "--sends text, line 2: it is no JSON with a message_id: not"),
        ("audit --to a --sends ids", "--sends ids, line 3: it is no JSON with a message_id"),
        ("audit --to a --sends times", "--sends times, line 1: it is no JSON with a message_id"),
        ("delay-accuracy --to a --baseline nobase", "there is no earlier run at nobase"),
    ],
)
def test_wrong_input_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("text").write_text(f"{RIGHT}not json\n")
    Path("times").write_text('{"message_id": "a", "topic": "t", "at_ms": "noon"}\n')
    Path("ids").write_text(f'{RIGHT}\n{{"id": "x"}}\n')
    done = CliRunner().invoke(app, line.split())
    assert sentence in done.output
    assert "Traceback" not in done.output
    assert done.exit_code == EXIT_REFUSED
    assert not Path("nosuch").exists()


def test_a_window_is_a_duration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["audit", "--to", "a", "--window", "5 bananas"])
    assert "--window 5 bananas: it is a duration" in done.output
    assert done.exit_code == EXIT_REFUSED
