"""What a command imports before it does anything: people, and scripts, wait for that."""

from __future__ import annotations

import subprocess
import sys

SLOW = (
    "httpx",
    "rich",
    "pygments",
    "click",
    "yaml",
    "prometheus_client",
    "structlog",
    "pyspark",
    "pyarrow",
)


def test_a_command_imports_nothing_slow_that_it_may_not_need() -> None:
    script = (
        "import sys, tidemill.cli.app\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))\n"
        # The client leaves httpx whole: its command line can be imported afterwards.
        "from tidemill.common import rest_client\n"
        "with rest_client._without_command_line(): import httpx\n"
        "import httpx._main\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert not set(SLOW) & set(done.stdout.split())
