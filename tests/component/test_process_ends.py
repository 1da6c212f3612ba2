"""The end of a process that does not destroy its objects."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes.processes import environment

# Leaves an unwritten line in the buffer of standard output, and prints a line if it is destroyed.
SCRIPT = """
import atexit, os

class Witness:
    write = staticmethod(os.write)

    def __del__(self):
        self.write(2, b"destroyed")

witness = Witness()
atexit.register(lambda: print("last words"))
from tidemill.__main__ import main
main()
"""
REFUSED = {"broker": "--data-dir=/proc/none/data", "controller": "--group-store=/proc/none/groups"}


def end(command: str, *more: str, out: str | None = None) -> subprocess.CompletedProcess[str]:
    with Path(out or "/dev/null").open("w") as file:
        return subprocess.run(
            [sys.executable, "-c", SCRIPT, command, REFUSED[command], *more],
            env={n: text for n, text in environment().items() if n != "PYTHONUNBUFFERED"},
            stdout=subprocess.PIPE if out is None else file,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )


@pytest.mark.parametrize("command", ["broker", "controller"])
def test_the_last_lines_of_a_process_are_written_and_its_objects_stay(command: str) -> None:
    done = end(command)
    assert (done.returncode, done.stdout) == (1, "last words\n")
    assert "destroyed" not in done.stderr


def test_a_full_standard_output_does_not_change_the_status() -> None:
    done = end("broker", out="/dev/full")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
