"""`tidemill top` and --watch on a terminal, against real processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.clients.commands import tidemill
from tests.support.eventually import eventually
from tests.support.processes.processes import STOP_S, Standalone, command, environment, standalone
from tidemill.cli.root_group import CLEAR
from tidemill.common.exit_codes import EXIT_INTERRUPTED

ROWS, COLUMNS = 12, 80


@contextlib.contextmanager
def on_terminal(running: Standalone, *arguments: str) -> Iterator[Callable[[], list[bytes]]]:
    """Run a command on a terminal, and yield a function that returns its screens so far.

    Ctrl-C ends the command with 130.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    variables = environment() | {"TIDEMILL_ADMIN": running.admin}
    for name in ("COLUMNS", "LINES"):
        variables.pop(name, None)
    process = subprocess.Popen(
        command(*arguments),
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - nothing else runs in this process
    )
    os.close(theirs)
    output = bytearray()

    def screens() -> list[bytes]:
        output.extend(os.read(ours, 1 << 16))
        return bytes(output).split(CLEAR.encode())[1:]

    try:
        yield screens
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_S) == EXIT_INTERRUPTED
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_a_terminal_shows_one_screen_each_second_until_ctrl_c(tmp_path: Path) -> None:
    with standalone(tmp_path / "data") as running:
        for number in range(9):
            tidemill(running, "topic", "create", f"orders-{number}")
        assert tidemill(running, "top").stdout.count("orders-") == 9
        with on_terminal(running, "top") as screens:
            eventually(lambda: len(screens()) > 2)
            screen = screens()[0].decode().splitlines()
            assert len(screen) < ROWS
            assert all(len(line) <= COLUMNS for line in screen)
            assert any(line.startswith("orders-") for line in screen)
        watch = ("--watch", "--interval", "100ms")
        with on_terminal(running, "topic", "list", "--prefix", "orders-1", *watch) as screens:
            eventually(lambda: len(screens()) > 2)
            [head, row] = screens()[0].decode().splitlines()
            assert (head.split()[0], row.split()[0]) == ("\x1b[1mTOPIC", "orders-1")
