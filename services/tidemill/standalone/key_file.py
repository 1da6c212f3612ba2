"""The key file of the users' secrets on one machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from tidemill.common.lifecycle import StartError
from tidemill.security.secret_keys import new_key_line

if TYPE_CHECKING:
    from pathlib import Path

    from tidemill.standalone.settings import StandaloneSettings

NAME: Final = "security.key"
FIRST_KEY: Final = "k1"


def key_file_of(settings: StandaloneSettings) -> str:
    """Return the path of the key file for proxies and the admin process."""
    return settings.security_key_file or str(settings.data_dir / NAME)


def ensure_key_file(settings: StandaloneSettings) -> None:
    """Make the key file in `data_dir` if there is none. Raises StartError.

    A key file of the settings is not made: a missing one may hold the keys of existing secrets.
    """
    if settings.security_key_file:
        return
    file = settings.data_dir / NAME
    try:
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        _make(file)
    except FileExistsError:
        return
    except OSError as error:
        raise StartError(f"the key file {file} cannot be made: {error}") from error


def _make(file: Path) -> None:
    """Make the file in one step, so that a killed process leaves none or a whole one."""
    draft = file.with_name(f"{NAME}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, new_key_line(FIRST_KEY).encode())
        os.fsync(descriptor)
        os.link(draft, file)
    finally:
        os.close(descriptor)
        draft.unlink()
