"""`tools/check_commits.py` checks commit subjects, and passes without a history."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tools import check_commits
from tools.check_commits import faults_of, subjects

IDENTITY = {
    f"GIT_{role}_{key}": value
    for role in ("AUTHOR", "COMMITTER")
    for key, value in (("NAME", "a"), ("EMAIL", "a@example.org"))
}


def git(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, **IDENTITY, "GIT_CONFIG_GLOBAL": os.devnull}
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment
    ).stdout.strip()


def commit(folder: Path, subject: str) -> str:
    git(folder, "commit", "--quiet", "--allow-empty", "--message", subject)
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    return tmp_path


@pytest.mark.parametrize(
    "subject",
    [
        "archive: do not fail when a whole batch is lost",
        "proxy: share listing work fairly between addresses",
        "cli, admin: process requests in `order`",
        "broker/server: bring the streams into one folder",
        "CHANGELOG: describe 0.1.0",
    ],
)
def test_a_good_subject_has_no_faults(subject: str) -> None:
    assert faults_of(subject) == []


@pytest.mark.parametrize(
    ("subject", "fault"),
    [
        ("Fix the proxy", "form"),
        ("proxy: Fix the reply", "form"),
        ("proxy: fix the reply.", "form"),
        ("proxy: a reply that is lost", "`a`"),
        ("proxy: fixed the reply", "`fixed`"),
        ("proxy: fixing the reply", "`fixing`"),
        ("proxy: sends the reply again", "`sends`"),
        ("proxy: fix the reply; add a test", "semicolon"),
        ("proxy: fix " + "x" * 60, "71 characters"),
    ],
)
def test_a_fault_is_named(subject: str, fault: str) -> None:
    (text,) = faults_of(subject)
    assert fault in text


def test_commits_after_the_first_are_checked_without_merges(repository: Path) -> None:
    first = commit(repository, "first")
    git(repository, "checkout", "--quiet", "-b", "side")
    commit(repository, "side")
    git(repository, "checkout", "--quiet", "main")
    commit(repository, "second")
    git(repository, "merge", "--quiet", "--no-ff", "--message", "merge", "side")
    assert set(subjects(repository, first).values()) == {"side", "second"}


def test_a_shallow_clone_is_not_checked(repository: Path, tmp_path: Path) -> None:
    first = commit(repository, "first")
    commit(repository, "second")
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{repository}", str(clone))
    with pytest.raises(LookupError, match="does not reach back"):
        subjects(clone, first)


def test_a_folder_inside_another_repository_is_not_checked(repository: Path) -> None:
    first = commit(repository, "first")
    (repository / "inner").mkdir()
    with pytest.raises(LookupError, match="not the top folder"):
        subjects(repository / "inner", first)


def test_without_history_the_check_passes_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setattr(check_commits, "ROOT", tmp_path)
    assert check_commits.main() == 0
    assert "not checked: git or the repository is missing" in capsys.readouterr().err


def test_a_wrong_subject_fails(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_commits, "ROOT", repository)
    monkeypatch.setattr(check_commits, "FIRST", commit(repository, "first"))
    commit(repository, "Fix the proxy")
    assert check_commits.main() == 1
    assert "Fix the proxy" in capsys.readouterr().err
