"""The key file of the users' secrets on one machine."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from tidemill.common.lifecycle import StartError
from tidemill.common.private_files import make_private_folder
from tidemill.security.secret_keys import KEY_FILE, new_key_id, new_key_line

if TYPE_CHECKING:
    from pathlib import Path

    from tidemill.standalone.settings import StandaloneSettings


def key_file_of(settings: StandaloneSettings) -> str:
    """Return the path of the key file for proxies and the admin process."""
    return settings.security_key_file or str(settings.data_dir / KEY_FILE)


def ensure_key_file(settings: StandaloneSettings) -> None:
    """Make the key file in `data_dir` if there is none. Raises StartError.

    A key file of the settings is not made: a missing one may hold the keys of existing secrets.
    """
    if settings.security_key_file:
        return
    file = settings.data_dir / KEY_FILE
    try:
        make_private_folder(settings.data_dir)
        if not file.exists():
            _make(file)
    except OSError as error:
        raise StartError(f"the key file {file} cannot be made: {error}") from error


def _make(file: Path) -> None:
    """Make the file in one step, so that a killed process leaves none or a whole one."""
    draft = file.with_name(f"{KEY_FILE}.draft")
    draft.unlink(missing_ok=True)  # of a process that was killed here
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, new_key_line(new_key_id()).encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    with contextlib.suppress(FileExistsError):
        os.link(draft, file)
    draft.unlink()
