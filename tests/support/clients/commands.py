"""Commands of the command line, run in this process, because a new process starts slowly."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from subprocess import CompletedProcess
from unittest import mock

from tests.support.processes.processes import Standalone, environment
from tidemill.cli.app import run


def tidemill(running: Standalone, *arguments: str, stdin: bytes = b"") -> CompletedProcess[str]:
    """Run a command against the admin API of a standalone, with `stdin` as its standard input."""
    variables = environment() | {"TIDEMILL_ADMIN": running.admin}
    status = 0
    with (
        contextlib.redirect_stdout(io.StringIO()) as stdout,
        contextlib.redirect_stderr(io.StringIO()) as stderr,
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin))),
        mock.patch.dict(os.environ, variables, clear=True),
    ):
        try:
            run(arguments)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
    return CompletedProcess(arguments, status, stdout.getvalue(), stderr.getvalue())
