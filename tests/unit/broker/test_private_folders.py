"""The permissions of the folders that processes make for their data."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from os import umask
from pathlib import Path

import pytest

from tidemill.broker.data_dir import locked_data_dir
from tidemill.broker.posix_disk import PosixDisk
from tidemill.cli.store import _unfinished
from tidemill.standalone.key_file import ensure_key_file
from tidemill.standalone.settings import StandaloneSettings


@pytest.fixture(autouse=True)
def _open_umask() -> Iterator[None]:
    """Let new folders be open to all, unless their maker says otherwise."""
    before = umask(0)
    yield
    umask(before)


def mode_of(folder: Path) -> int:
    return stat.S_IMODE(folder.stat().st_mode)


def test_a_new_data_directory_is_for_its_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "volume" / "store"
    with locked_data_dir(folder):
        assert mode_of(folder) == 0o700


def test_an_existing_data_directory_keeps_its_permissions(tmp_path: Path) -> None:
    """An fsGroup of a pod gives the volume to a group."""
    tmp_path.chmod(0o2770)
    with locked_data_dir(tmp_path):
        PosixDisk(tmp_path)
    assert mode_of(tmp_path) == 0o2770


def test_a_new_data_directory_keeps_the_group_of_the_volume(tmp_path: Path) -> None:
    """kubelet sets the group of the fsGroup and the setgid bit on the root of a volume."""
    tmp_path.chmod(0o2770)
    folder = tmp_path / "store"
    with locked_data_dir(folder):
        assert folder.stat().st_gid == tmp_path.stat().st_gid
        assert mode_of(folder) == 0o2700


def test_the_folder_of_a_standalone_is_for_its_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    ensure_key_file(StandaloneSettings(data_dir=folder))
    assert mode_of(folder) == 0o700


def test_the_target_of_a_copy_is_for_its_owner_alone(tmp_path: Path) -> None:
    one, several = tmp_path / "one", tmp_path / "several"
    PosixDisk(one)
    assert mode_of(one) == 0o700
    with _unfinished(several):
        assert mode_of(several) == 0o700
