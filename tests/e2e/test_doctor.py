"""`tidemill doctor` against real processes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from tests.support.clients.commands import tidemill
from tests.support.eventually import eventually
from tests.support.processes.processes import standalone


def test_the_doctor_reports_a_fine_cluster_and_each_command_works(tmp_path: Path) -> None:
    with standalone(tmp_path / "data") as running:
        # The sampler counts, and brokers know a proxy, some time after the start.
        eventually(lambda: len(running.get("processes")["items"]) == len(running.processes))
        eventually(lambda: tidemill(running, "doctor").returncode in {0, 4})
        found = json.loads(tidemill(running, "doctor", "-o", "json").stdout)["checks"]
        # The disk of the test machine may be nearly full.
        assert {each["check"] for each in found if each["state"] != "ok"} <= {"disks"}
        for each in found:
            done = tidemill(running, *shlex.split(each["command"])[1:])
            assert done.returncode == 0, done.stderr
