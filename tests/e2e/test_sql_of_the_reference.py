"""Our table of SQL92 filters: its column of RocketMQ is checked with the classes of RocketMQ."""

from __future__ import annotations

import json
import os
import subprocess

from tests.support.clients.client_process import JAVA_CLASSES, JAVA_LIBRARIES, RUN_S, needs
from tests.support.sql92_cases import CASES

pytestmark = needs("java", JAVA_CLASSES, JAVA_LIBRARIES)


def test_rocketmq_evaluates_each_filter_as_the_table_says() -> None:
    lines = [{"expression": case.expression, "properties": case.properties} for case in CASES]
    run = subprocess.run(
        ["java", "-cp", f"{JAVA_CLASSES}{os.pathsep}{JAVA_LIBRARIES}/*", "SqlFilters"],
        input="\n".join(map(json.dumps, lines)),
        capture_output=True,
        check=True,
        encoding="utf-8",
        timeout=RUN_S,
    )
    results = [json.loads(line)["result"] for line in run.stdout.splitlines()]
    assert list(zip(CASES, results, strict=True)) == [(case, case.reference) for case in CASES]
