"""The key file on the disk: its permissions, and its changes."""

from __future__ import annotations

import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tidemill.security.key_file import CHECK_PERIOD_MS, KeyFile, add_first_key, read_keys
from tidemill.security.secret_keys import FILE_BYTES_MAX, KEYS_MAX, new_key_line


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


def test_a_key_is_added_as_the_first_one(tmp_path: Path) -> None:
    file = tmp_path / "key"
    write(file, new_key_line("k1"), 0o640)
    before = read_keys(str(file))
    assert add_first_key(str(file), "k2", after="k1") == "k2"
    after = read_keys(str(file))
    assert after.ids == ["k2", "k1"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    sealed = before.seal(b"secret", user_id=7, secret_id=1, created_at_ms=5)
    again = after.seal_again(sealed, user_id=7)
    assert (again.key_id, again.id, again.created_at_ms) == ("k2", 1, 5)
    assert after.open(again, user_id=7) == b"secret"
    assert after.seal_again(again, user_id=7) is again
    assert [one.name for one in tmp_path.iterdir()] == ["key"]


def test_a_link_to_a_key_file_stays_a_link(tmp_path: Path) -> None:
    write(tmp_path / "real", new_key_line("k1"))
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real.draft").write_text("of a killed process")
    add_first_key(str(tmp_path / "link"), "k2", after="k1")
    assert (tmp_path / "link").is_symlink()
    assert read_keys(str(tmp_path / "real")).ids == ["k2", "k1"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no key"),
        ("nonsense", "line"),
        (f"k2 {64 * '0'}\n", "repeats"),
        ("".join(f"o{n} {64 * '0'}\n" for n in range(KEYS_MAX)), "at most"),
    ],
    ids=["empty", "malformed", "known", "full"],
)
def test_a_file_that_gets_no_key_is_unchanged(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "key"
    write(file, text)
    with pytest.raises(ValueError, match=reason):
        add_first_key(str(file), "k2", after=text.split(" ", maxsplit=1)[0])
    assert file.read_text() == text
    assert [one.name for one in tmp_path.iterdir()] == ["key"]


def test_a_key_of_another_process_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "key"
    write(file, new_key_line("k2") + new_key_line("k1"))
    assert add_first_key(str(file), "k3", after="k1") == "k2"
    assert read_keys(str(file)).ids == ["k2", "k1"]


def test_keys_that_are_added_at_once_lose_none(tmp_path: Path) -> None:
    """The file is readable at each moment, and the first of the calls wins."""
    file = tmp_path / "key"
    write(file, new_key_line("k0"))
    for number in range(KEYS_MAX - 1):
        first, is_over = read_keys(str(file)).first, threading.Event()

        def read_always(is_over: threading.Event = is_over) -> int:
            count = 0
            while not is_over.is_set():
                assert read_keys(str(file)).ids
                count += 1
            return count

        def add(name: str, first: str = first) -> str:
            return add_first_key(str(file), name, after=first)

        with ThreadPoolExecutor() as threads:
            reading = threads.submit(read_always)
            added = list(threads.map(add, (f"k{number + 1}-{caller}" for caller in range(4))))
            is_over.set()
            reading.result()
        assert len(set(added)) == 1, "all calls return the key that was added"
        assert read_keys(str(file)).ids[:2] == [added[0], first]
