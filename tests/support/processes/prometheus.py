"""A real Prometheus for tests: it scrapes targets every second and answers queries over HTTP."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.eventually import eventually

BUILD = Path(__file__).parents[2] / "monitoring" / "prometheus" / "build"
PROMETHEUS = BUILD / "prometheus"
SCRAPE_PERIOD = "1s"
START_MS = 30_000  # far longer than a start on the slowest machine
STOP_S = 30.0
QUERY_S = 30.0
_LISTENS = re.compile(r'msg="Listening on".* address=(127\.0\.0\.1:\d+)')

Sample = dict[str, Any]


class Prometheus:
    """A running Prometheus."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._client = httpx.Client(
            base_url=f"http://{address}/api/v1", trust_env=False, timeout=QUERY_S
        )

    def is_ready(self) -> bool:
        """Return whether it has loaded its store and answers queries."""
        return self._client.get(f"http://{self._address}/-/ready").is_success

    def query(self, expression: str) -> list[Sample]:
        """Return the current samples of an expression. Raises AssertionError if it is invalid."""
        answer = self._client.post("/query", data={"query": expression}).json()
        assert answer["status"] == "success", f"{expression}: {answer['error']}"
        result = answer["data"]["result"]
        is_scalar = answer["data"]["resultType"] == "scalar"
        return [{"value": result}] if is_scalar else list(result)

    def ups(self) -> int:
        """Return the number of targets whose last scrape succeeded."""
        return len(self.query("up == 1"))

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


@contextlib.contextmanager
def prometheus(folder: Path, targets: Mapping[str, list[str]], rules: Path) -> Iterator[Prometheus]:
    """Run Prometheus during the block; `targets` maps job names to host:port."""
    configuration = {
        "global": {
            "scrape_interval": SCRAPE_PERIOD,
            "scrape_timeout": SCRAPE_PERIOD,
            "evaluation_interval": SCRAPE_PERIOD,
        },
        "rule_files": [str(rules)],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": addresses}]}
            for job, addresses in targets.items()
        ],
    }
    config, log = folder / "prometheus.yaml", folder / "prometheus.log"
    config.write_text(yaml.safe_dump(configuration), "utf-8")
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [
                str(PROMETHEUS),
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'prometheus'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdout=stderr,
            stderr=stderr,
        )
    try:
        address = eventually(lambda: _LISTENS.search(log.read_text("utf-8")), within_ms=START_MS)
        assert address is not None, "eventually returns what is true"
        with contextlib.closing(Prometheus(address[1])) as running:
            eventually(running.is_ready, within_ms=START_MS)
            yield running
    finally:
        process.terminate()
        process.wait(STOP_S)
