"""Whether files are still the ones that were read: of keys, certificates and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, final


class _Stamp(NamedTuple):
    """What tells a file from the one that was there before, links followed."""

    device: int
    inode: int
    size_bytes: int
    modified_at_ns: int


@final
class FileChanges:
    """The state of some files at the last look. A file that is missing is a state too.

    A renewal that swaps a link, as Kubernetes mounts secrets, is noticed by the inode behind it.
    """

    def __init__(self, files: Sequence[str]) -> None:
        self._files = files
        self._stamps = self._look()

    def detect(self) -> bool:
        """Look again, and say whether anything has changed since the last look."""
        before, self._stamps = self._stamps, self._look()
        return self._stamps != before

    def _look(self) -> list[_Stamp | None]:
        return [_stamp_of(file) for file in self._files]


def _stamp_of(file: str) -> _Stamp | None:
    try:
        status = Path(file).stat()
    except OSError:
        return None
    return _Stamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
