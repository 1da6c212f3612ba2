"""Files with secrets, and folders with data: other users of the machine may not read them."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

OTHERS: Final = stat.S_IRWXO  # permissions of users that are not the owner and not of its group


def read_private(file: str, *, bytes_max: int) -> str:
    """Return the ASCII text of a file. Raises OSError; ValueError if it is too open or too long."""
    with Path(file).open("rb") as opened:
        mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
        content = opened.read(bytes_max + 1)
    if mode & OTHERS:
        raise ValueError(f"every user of this machine can open it: run `chmod o= {file}`")
    if len(content) > bytes_max:
        raise ValueError(f"it is longer than {bytes_max} bytes")
    return content.decode("ascii", errors="replace")


def make_private_folder(folder: Path) -> None:
    """Make a folder for its owner alone, and missing folders above it. Raises OSError.

    An existing folder keeps its permissions: an operator, or the fsGroup of a pod, may have set
    them for others.
    """
    folder.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)


def create_private(file: Path, text: str) -> None:
    """Write a new file of this account alone, and sync it. Raises OSError, and leaves no file."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, stat.S_IRUSR | stat.S_IWUSR)
    try:
        os.write(descriptor, text.encode())
        os.fsync(descriptor)
    except OSError:
        file.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_private(file: Path, content: bytes) -> None:
    """Write a file for this account alone; an existing file loses its content. Raises OSError."""
    mode = stat.S_IRUSR | stat.S_IWUSR
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as opened:
        # A device such as /dev/null keeps its permissions.
        if stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            os.fchmod(opened.fileno(), mode)
        opened.write(content)


def replace_private(file: Path, text: str) -> None:
    """Replace a file of this account alone in one step. Raises OSError; the old one stays then."""
    draft = file.with_name(f"{file.name}.{os.getpid()}.draft")
    try:
        create_private(draft, text)
        draft.replace(file)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
