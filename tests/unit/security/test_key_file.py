"""The key file on the disk: its permissions, and its changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.security.key_file import CHECK_PERIOD_MS, KeyFile, read_keys
from tidemill.security.secret_keys import FILE_BYTES_MAX, new_key_line


def write(file: Path, text: str, mode: int = 0o600) -> None:
    replacement = file.with_suffix(".new")
    replacement.write_text(text)
    replacement.chmod(mode)
    replacement.rename(file)


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o601, 0o644])
def test_a_file_that_others_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    write(tmp_path / "key", new_key_line("k1"), mode)
    with pytest.raises(ValueError, match="chmod"):
        read_keys(str(tmp_path / "key"))


def test_a_file_of_a_group_is_read(tmp_path: Path) -> None:
    """Kubernetes mounts a Secret with the group of the pod."""
    write(tmp_path / "key", new_key_line("k1"), 0o440)
    assert read_keys(str(tmp_path / "key")).ids == ["k1"]


def test_a_long_or_missing_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "key", new_key_line("k1") + " " * FILE_BYTES_MAX)
    with pytest.raises(ValueError, match="longer"):
        read_keys(str(tmp_path / "key"))
    with pytest.raises(FileNotFoundError):
        read_keys(str(tmp_path / "none"))


def test_a_change_is_read_after_the_period_and_a_malformed_one_changes_nothing(
    tmp_path: Path,
) -> None:
    now_ms, reports = [0], list[str]()
    file = tmp_path / "key"
    write(file, new_key_line("k1"))
    keys = KeyFile(str(file), lambda: now_ms[0], reports.append)
    write(file, new_key_line("k2") + new_key_line("k1"))
    assert keys.keys().ids == ["k1"]
    now_ms[0] += CHECK_PERIOD_MS
    assert keys.keys().ids == ["k2", "k1"]
    write(file, "no key")
    now_ms[0] += CHECK_PERIOD_MS
    assert keys.keys().ids == ["k2", "k1"]
    assert reports[0] == ""
    assert reports[1].startswith("line 1")
