"""A runner for scenarios that may end their process without an exception."""

from __future__ import annotations

import faulthandler
import os
import signal
import traceback
from collections.abc import Callable
from tempfile import TemporaryFile

import pytest

_FAILED = 1  # exit status of a scenario that raised


def in_own_process(scenario: Callable[[], None]) -> None:
    """Run `scenario` in a fork of this process. Fail if it raises or a signal ends it."""
    with TemporaryFile() as said:
        pid = os.fork()
        if not pid:
            _run(scenario, said.fileno())
        _, status = os.waitpid(pid, 0)
        said.seek(0)
        text = said.read().decode()
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        pytest.fail(f"{name} ended the process\n{text}", pytrace=False)
    if os.WEXITSTATUS(status):
        pytest.fail(text, pytrace=False)


def _run(scenario: Callable[[], None], said: int) -> None:
    """Run `scenario` in the child and exit, without a return to the parent's code."""
    faulthandler.disable()  # The parent reports a crash.
    status = _FAILED
    try:
        scenario()
        status = 0
    except BaseException:  # noqa: BLE001  # pytest's outcomes are not an Exception.
        os.write(said, traceback.format_exc().encode())
    finally:
        os._exit(status)
