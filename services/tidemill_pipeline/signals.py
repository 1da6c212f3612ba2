"""Ctrl-C and SIGTERM for programs on Spark: a short message and no remaining processes.

This module does not import Spark, so that a command handles signals before it loads Spark.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from tidemill_pipeline.errors import Termination


@contextlib.contextmanager
def raise_on_sigterm(first: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Raise Termination in the block on SIGTERM, after calling `first`."""
    is_terminated = False

    def terminate(_signal: int, _frame: object) -> NoReturn:
        nonlocal is_terminated
        is_terminated = True
        silence_threads()
        first()
        raise Termination

    if threading.current_thread() is not threading.main_thread():
        yield  # Only the main thread receives signals.
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except Exception as error:
        if is_terminated:  # Hide errors that the termination caused.
            raise Termination from error
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def guarded_start() -> Iterator[None]:
    """Guard the start of Spark in the block.

    SIGTERM ends the process and its Java process at once. Ctrl-C takes effect at the end of the
    block. Afterwards Python's handler is active again: PySpark's handler would call the JVM during
    another call, and both calls would fail with traces.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with raise_on_sigterm(_end_children):
            yield
        _hush_py4j()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.default_int_handler)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_children() -> None:
    """Kill all child processes. Without /proc, Java ends after this process."""
    tree = [os.getpid()]
    for parent in tree:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                tree += map(int, children.read_text("ascii").split())
    for child in tree[1:]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)  # On SIGTERM, Java would print a trace.


def silence_threads() -> None:
    """Prevent traces of threads that lose their connection to the JVM at the end."""
    import socketserver

    _hush_py4j()
    # Spark's own servers have no other hook.
    socketserver.BaseServer.handle_error = _ignore_error  # type: ignore[method-assign, assignment]


def _hush_py4j() -> None:
    """Silence py4j's log of failed calls, since py4j also raises an error.

    The JVM receives Ctrl-C, too, and may end before this process handles it.
    """
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    # Py4j writes some lines with the root logger.
    logging.getLogger().addFilter(_is_not_of_py4j)


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    return "py4j" not in Path(record.pathname).parts


def _ignore_error(_server: object, _request: object, _client: object) -> None:
    """Ignore an error in a server of this process."""
