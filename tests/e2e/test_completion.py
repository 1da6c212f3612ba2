"""`tidemill completion bash` in a real shell, against real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.clients.commands import tidemill
from tests.support.eventually import eventually
from tests.support.processes.processes import environment, standalone

# Completes the last word of its arguments, as the shell does after a Tab.
COMPLETE = """
source "$SCRIPT"
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_tidemill_complete "$PROGRAM"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def test_bash_completes_the_name_of_a_topic(tmp_path: Path) -> None:
    with standalone(tmp_path / "data") as running:
        tidemill(running, "topic", "create", "orders")
        script = tmp_path / "script"
        script.write_text(tidemill(running, "completion", "bash").stdout)
        program = tmp_path / "tidemill"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m tidemill "$@"\n')
        program.chmod(0o700)
        variables = environment() | {
            "TIDEMILL_ADMIN": running.admin,
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "SCRIPT": str(script),
            "PROGRAM": str(program),
            "PATH": os.environ["PATH"],
        }

        def complete(*words: str) -> list[str]:
            done = subprocess.run(
                ["bash", "-c", COMPLETE, "bash", "tidemill", *words],
                env=variables,
                capture_output=True,
                text=True,
                check=True,
            )
            assert done.stderr == ""
            return done.stdout.split()

        # A busy machine may take longer than a shell waits.
        eventually(lambda: complete("topic", "show", "or") == ["orders"])
        assert complete("topic", "pur") == ["purge"]
