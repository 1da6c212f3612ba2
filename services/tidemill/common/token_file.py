"""A bearer token in a file: that of the REST API or that of `/metrics`."""

from __future__ import annotations

import hmac
from typing import Final, final

import structlog

from tidemill.common.file_changes import FileChanges
from tidemill.common.lifecycle import StartError
from tidemill.common.private_files import read_private

log = structlog.get_logger()

TOKEN_BYTES_MAX: Final = 4_096  # a larger file is not a token file


@final
class TokenFile:
    """A bearer token that is read again when its file changes."""

    def __init__(self, file: str, *, setting: str) -> None:
        """Read the file of a setting. Raises StartError if it has no valid token."""
        self._file = file
        self._changes = FileChanges([file])
        try:
            self._token = _read_token(file)
        except (OSError, ValueError) as error:
            raise StartError(
                f"{setting} {file!r} has no valid token: {error}; write one line into it,"
                " such as the output of `openssl rand -hex 32`"
            ) from error

    def admits(self, authorization: str) -> bool:
        """Whether the header contains the token. The comparison takes constant time."""
        if self._changes.detect():
            self._read_again()
        scheme, _, shown = authorization.partition(" ")
        is_token = hmac.compare_digest(shown.strip().encode(), self._token)
        return is_token and scheme.lower() == "bearer"

    def _read_again(self) -> None:
        try:
            self._token = _read_token(self._file)
        except (OSError, ValueError) as error:
            log.error(  # noqa: TRY400  # A traceback adds nothing to the reason.
                "token not reloaded, previous token stays valid", file=self._file, reason=str(error)
            )
        else:
            log.info("token reloaded", file=self._file)


def _read_token(file: str) -> bytes:
    token = read_private(file, bytes_max=TOKEN_BYTES_MAX).strip()
    if not token:
        raise ValueError("the file is empty")
    if not all("!" <= char <= "~" for char in token):  # The characters of RFC 6750.
        raise ValueError("a token is one word of printable ASCII characters")
    return token.encode()
