"""Files that other users of the machine may not read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.common.private_files import write_private


@pytest.mark.parametrize("former_mode", [None, 0o644])
def test_a_written_file_is_private(tmp_path: Path, former_mode: int | None) -> None:
    file = tmp_path / "bundle.tar.gz"
    if former_mode is not None:
        file.write_bytes(b"a longer content than the new one")
        file.chmod(former_mode)
    write_private(file, b"new")
    assert file.read_bytes() == b"new"
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_device_keeps_its_permissions() -> None:
    before = Path("/dev/null").stat().st_mode
    write_private(Path("/dev/null"), b"x")
    assert Path("/dev/null").stat().st_mode == before
