"""How Ctrl-C and SIGTERM end what runs on Spark: with one word, and nothing left behind.

Needs no Spark: a command is ready to be ended before it has loaded any.
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
    """Raise Termination within the block for SIGTERM, which would end it without a word.

    `first` is called before.
    """
    is_terminated = False

    def terminate(_signal: int, _frame: object) -> NoReturn:
        nonlocal is_terminated
        is_terminated = True
        silence_threads()
        first()
        raise Termination

    if threading.current_thread() is not threading.main_thread():
        yield  # Only the main thread is told of signals.
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except Exception as error:
        if is_terminated:  # What goes wrong on the way out is not why.
            raise Termination from error
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def guarded_start() -> Iterator[None]:
    """Let Spark start in the block. SIGTERM ends it at once, with what it has started of Java.

    Ctrl-C waits for the end of the block, and is from then on what it is elsewhere. PySpark's own
    handler calls the JVM amid another call, and that fails with a trace; and py4j, whose call is
    ended by it, tells another one.
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
    """End the processes below this one; where there is no /proc, Java ends when this one has."""
    found = [os.getpid()]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, children.read_text("ascii").split())
    for child in found[1:]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)  # Java would tell a trace of what it was at.


def silence_threads() -> None:
    """Keep threads that lose the JVM, which may have been ended with this process, from traces."""
    import socketserver

    _hush_py4j()
    # Of servers of Spark's own, which take no other way.
    socketserver.BaseServer.handle_error = _ignore_error  # type: ignore[method-assign, assignment]


def _hush_py4j() -> None:
    """Have py4j say nothing of a call that fails: it raises what it says, and with a better word.

    The JVM gets Ctrl-C, too, and may be gone before this process has heard of it.
    """
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    # Some of it py4j says by no name of its own.
    logging.getLogger().addFilter(_is_not_of_py4j)


def _is_not_of_py4j(told: logging.LogRecord) -> bool:
    return "py4j" not in Path(told.pathname).parts


def _ignore_error(_server: object, _request: object, _client: object) -> None:
    """Say nothing of an error in a server of this process."""
