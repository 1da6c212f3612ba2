"""A call of another process that is made to fail fails there, once."""

from __future__ import annotations

import errno
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.disk.failing_calls import SYNC, WRITE, fail_once, is_possible

CHILD = """
import os, sys
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
for call in sys.stdin:
    try:
        os.pwritev(file, [b"x"], 0) if call == "write\\n" else os.fdatasync(file)
        print(0, flush=True)
    except OSError as error:
        print(error.errno, flush=True)
"""


@pytest.mark.skipif(not is_possible(), reason="here nobody can trace another process")
@pytest.mark.parametrize(("call", "numbers"), [("write", WRITE), ("sync", SYNC)])
def test_one_call_fails_and_the_next_does_not(
    tmp_path: Path, call: str, numbers: frozenset[int]
) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path / "file")]
    other = "sync" if call == "write" else "write"
    with (
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        ) as child,
        ThreadPoolExecutor(1) as threads,
    ):

        def ask(name: str) -> int:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(f"{name}\n")
            return int(child.stdout.readline())

        assert (ask(call), ask(other)) == (0, 0)
        failing = threads.submit(fail_once, child.pid, numbers, errno.EIO)
        # Some calls are made before the other thread traces them.
        asked = [(ask(other), ask(call))]
        while not failing.done():
            asked.append((ask(other), ask(call)))
        failing.result()
        assert [answers for answers in asked if answers != (0, 0)] == [(0, errno.EIO)]
        assert (ask(other), ask(call)) == (0, 0)
