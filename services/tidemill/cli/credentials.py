"""The credentials of the command line: a token, or a user and its secret.

    ~/.config/tidemill/credentials    two lines: the user and its secret; or one line: a named token
                                      then perhaps a line: the address of the admin API for them

`tidemill security enable` writes this file, and `tidemill user rotate` of its user changes it.
Other users of the machine may not read it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import typer

from tidemill.common.addresses import is_loopback
from tidemill.common.exit_codes import EXIT_USAGE
from tidemill.common.private_files import create_private, read_private, replace_private
from tidemill.common.prompts import fail, warn
from tidemill.security.tokens import PREFIX

FILE_BYTES_MAX: Final = 16 << 10  # a token of a service account has at most 8 KiB


class UserCredentials(NamedTuple):
    """A user and its secret, or a saved named token."""

    user: str  # "": of the token
    secret: str  # or the token
    is_named: bool  # by an option, not only in the file of `security enable`
    address: str = ""  # of the admin API that they are for; "": of any

    @property
    def is_token(self) -> bool:
        """Whether the secret is a named token."""
        return not self.user

    @property
    def pair(self) -> tuple[str, str]:
        """The user and the secret."""
        return self.user, self.secret

    def is_for(self, address: str) -> bool:
        """Whether they may go to the admin API at an address."""
        return not self.address or api_of(self.address) == api_of(address)


def api_of(address: str) -> tuple[str, int | None]:
    """Return the host and port of an address; all names of this machine are one host."""
    parts = urlsplit(address)
    host = parts.hostname or ""
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        port = None  # The call reports that it is not an address.
    return "" if is_loopback(host) else host, port


def credentials_file() -> Path:
    """Return the path of the file that `security enable` writes."""
    return config_folder() / "credentials"


def config_folder() -> Path:
    """Return the folder of our files. Raises RuntimeError without a home folder."""
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "tidemill"


def find_credentials(user: str, secret_file: Path | None) -> UserCredentials | None:
    """Return the credentials of the options, or those of the saved file; None without any.

    A file of the options has a secret alone, or a user and its secret, as a
    `security_bootstrap_file` has. Ends the command if a file cannot be used.
    """
    if secret_file is None:
        if user:
            raise typer.BadParameter("--user needs the file of its secret; add --secret-file")
        return find_saved()
    lines = read_credential(secret_file, "the secret").split()
    if lines and "://" in lines[-1]:
        lines.pop()  # It has the form of the saved file. An option goes to each admin API.
    if len(lines) not in {1, 2}:
        raise typer.BadParameter(
            f"{secret_file} has neither a secret alone nor two lines, a user and its secret"
        )
    named = lines[0] if len(lines) == 2 else user
    if not named:
        raise typer.BadParameter(f"{secret_file} names no user; add --user")
    if user and named != user:
        raise typer.BadParameter(f"{secret_file} has the secret of another user than {user}")
    return UserCredentials(named, lines[-1], is_named=True)


def find_saved() -> UserCredentials | None:
    """Return the credentials of the file; None without any. Ends the command if it is malformed."""
    try:
        file = credentials_file()
        if not file.exists():
            return None
    except (OSError, RuntimeError):
        return None  # A container need not have a home folder.
    return read_saved(file, is_named=False)  # None: `security enable` has not written it yet.


def read_saved(file: Path, *, is_named: bool) -> UserCredentials | None:
    """Return the credentials of a file; None if it is empty. Ends the command if malformed."""
    lines = read_credential(file, "the credentials").split()
    if not lines:
        return None
    address = lines.pop() if "://" in lines[-1] else ""
    if len(lines) == 1 and lines[0].startswith(PREFIX):
        return UserCredentials("", lines[0], is_named=is_named, address=address)
    if len(lines) != 2:
        raise typer.BadParameter(
            f"{file} has neither two lines, a user and its secret, nor one line with a named token,"
            " before the address of the admin API"
        )
    user, secret = lines
    return UserCredentials(user, secret, is_named=is_named, address=address)


def create_credentials(user: str, secret: str, address: str) -> Path:
    """Save credentials in a new file, for this account alone. Ends the command if it cannot.

    The file is durable afterwards, because it may be the only copy of the secret.
    """
    file = credentials_file()
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        create_private(file, _text_of(user, secret, address))
    except FileExistsError:
        fail(
            f"{file} is empty or has other credentials: move it away first, or name a super user"
            " with --user and --secret-file",
            EXIT_USAGE,
        )
    except OSError as error:
        fail(f"cannot save the credentials in {file}: {error}", EXIT_USAGE)
    return file


def replace_saved(user: str, secret: str, address: str) -> Path:
    """Replace the saved credentials in one step. Warn if it fails: the new secret is printed."""
    file = credentials_file()
    try:
        replace_private(file, _text_of(user, secret, address))
    except OSError as error:
        warn(f"cannot save the new secret in {file}: {error}; write it there by hand")
    return file


def _text_of(user: str, secret: str, address: str) -> str:
    return "".join(f"{line}\n" for line in (user, secret, address) if line)


def read_credential(file: Path, what: str) -> str:
    """Return the content of a file. Ends the command if it is unreadable, or if others read it."""
    try:
        text = read_private(str(file), bytes_max=FILE_BYTES_MAX)
        if not text.isascii():
            raise ValueError("it has characters outside of ASCII")
    except OSError as error:
        raise typer.BadParameter(f"cannot read {what}: {error}") from error
    except ValueError as error:
        raise typer.BadParameter(f"cannot read {what} in {file}: {error}") from error
    return text
