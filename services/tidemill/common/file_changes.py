"""Detection of changes of files that were read: keys, certificates and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, final


class _Stamp(NamedTuple):
    """The identity and version of a file, after following links."""

    device: int
    inode: int
    size_bytes: int
    modified_at_ns: int


@final
class FileChanges:
    """The state of some files at the last check; a missing file is also a state.

    Kubernetes renews a mounted secret by swapping a link. The inode behind the link shows the
    change.
    """

    def __init__(self, files: Sequence[str]) -> None:
        self._files = files
        self._stamps = self._look()

    def detect(self) -> bool:
        """Check the files again; return True if any file has changed since the last check."""
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
