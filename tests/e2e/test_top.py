"""`tidemill top` on a terminal, against real processes."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
from pathlib import Path

from tests.support.clients.commands import tidemill
from tests.support.eventually import eventually
from tests.support.processes.processes import STOP_S, command, environment, standalone
from tidemill.common.exit_codes import EXIT_INTERRUPTED

ROWS, COLUMNS = 12, 80


def test_a_terminal_shows_one_screen_each_second_until_ctrl_c(tmp_path: Path) -> None:
    with standalone(tmp_path / "data") as running:
        for number in range(9):
            tidemill(running, "topic", "create", f"orders-{number}")
        assert tidemill(running, "top").stdout.count("orders-") == 9
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        variables = environment() | {"TIDEMILL_ADMIN": running.admin}
        for name in ("COLUMNS", "LINES"):
            variables.pop(name, None)
        process = subprocess.Popen(
            command("top"),
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
            return bytes(output).split(b"\x1b[H\x1b[J")[1:]

        try:
            eventually(lambda: len(screens()) > 2)
            screen = screens()[0].decode().splitlines()
            assert len(screen) < ROWS
            assert all(len(line) <= COLUMNS for line in screen)
            assert any(line.startswith("orders-") for line in screen)
            process.send_signal(signal.SIGINT)
            assert process.wait(STOP_S) == EXIT_INTERRUPTED
        finally:
            process.kill()
            process.wait()
            os.close(ours)
