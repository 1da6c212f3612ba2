"""`tools/check_protos.py` lints .proto files and compares them with the last release."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.tools.test_check_commits import commit, git
from tools import check_protos, releases
from tools.releases import Release

RELEASE = '[[release]]\nversion = "{}"\ncommit = "{}"\n'
UNKNOWN = "0" * 40


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "changes").mkdir()
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    return tmp_path


def write(root: Path, *lines: str) -> None:
    (root / "changes" / "releases.toml").write_text("".join(lines))


def test_the_repository_names_its_releases() -> None:
    releases.read(check_protos.ROOT / "changes" / "releases.toml")


def test_before_the_first_release_changes_are_free(root: Path) -> None:
    write(root, "# None.\n")
    assert check_protos.commands(root, Path("buf")) == [["buf", "lint"]]


def test_changes_are_compared_with_the_last_release(root: Path) -> None:
    last = commit(root, "release")
    write(root, RELEASE.format("0.1.0", UNKNOWN), RELEASE.format("0.2.0", last))
    [_, breaking] = check_protos.commands(root, Path("buf"))
    assert breaking == ["buf", "breaking", "--against", f".git#ref={last}"]


def test_a_clone_without_the_release_is_reported(root: Path) -> None:
    commit(root, "another")
    write(root, RELEASE.format("0.1.0", UNKNOWN))
    with pytest.raises(LookupError, match=r"lacks commit 0{12}, release 0\.1\.0"):
        check_protos.commands(root, Path("buf"))


def test_releases_are_read_in_their_order(root: Path) -> None:
    write(root, RELEASE.format("0.1.0", "1" * 40), RELEASE.format("0.2.0", "2" * 40))
    assert releases.read(root / "changes" / "releases.toml") == [
        Release("0.1.0", "1" * 40),
        Release("0.2.0", "2" * 40),
    ]


@pytest.mark.parametrize("commit_id", ["1234567", "main", "0" * 41])
def test_a_release_without_a_whole_commit_id_is_rejected(root: Path, commit_id: str) -> None:
    write(root, RELEASE.format("0.1.0", commit_id))
    with pytest.raises(ValueError, match="40 hexadecimal digits"):
        releases.read(root / "changes" / "releases.toml")


@pytest.mark.parametrize(("ci", "status"), [("true", 1), ("", 0)])
def test_only_ci_fails_without_buf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ci: str, status: int
) -> None:
    monkeypatch.setattr(check_protos, "BUF", tmp_path / "buf")
    monkeypatch.setenv("CI", ci)
    assert check_protos.main() == status
