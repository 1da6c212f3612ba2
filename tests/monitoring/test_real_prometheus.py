"""A real Prometheus scrapes real processes: every panel and every alert has data.

After the first round trip, no panel of a dashboard is empty. Queries of Kubernetes metrics are only
parsed, as other exporters provide these metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.server
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import promql_parser
import pytest

from tests.e2e.conftest import Certificates
from tests.support import queries
from tests.support.clients.api import api, message
from tests.support.clients.client_process import needs
from tests.support.clients.everything import measuring, quick_start, touch_everything
from tests.support.eventually import eventually
from tests.support.processes.processes import ADMIN_S, Standalone, standalone
from tests.support.processes.prometheus import PROMETHEUS, Prometheus, prometheus
from tests.support.processes.replicated_standalone import FLAGS, REPLICAS, ReplicatedStandalone
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tools.generate_dashboards import RULES

RATE = "10s"  # Ten scrapes.
JOB_MS = 240_000  # For a job of Spark to start and to do its work.
DATA_MS = 60_000  # For a few scrapes with all metrics.

pytestmark = [pytest.mark.large, needs("go", PROMETHEUS)]


def targets(running: Standalone) -> dict[str, list[str]]:
    """Return the scrape addresses of the processes, by the job name in alerts."""
    found: dict[str, list[str]] = {}
    for name, process in running.processes.items():
        address = process.metrics.removeprefix("http://").removesuffix("/metrics")
        found.setdefault(f"tidemill-{name.partition('-')[0]}", []).append(address)
    return found


# Prefixes of metrics that the processes of most tests here do not export.
OF_REPLICAS = ("rocketmq_ha_", "rocketmq_controller_")
OF_JOBS = ("rocketmq_pipeline_", "rocketmq_audit_")
Prefixes = tuple[str, ...]


def is_of(prefixes: Prefixes, expression: str) -> bool:
    """Return whether an expression has one of the prefixes; if empty, whether it has none."""
    return any(map(expression.__contains__, prefixes or OF_REPLICAS + OF_JOBS)) is bool(prefixes)


def without_data(asked: Prometheus, of: Prefixes = ()) -> dict[str, str]:
    """Return the queries without data, by panel or alert."""
    found = {}
    for page, panel, expression in queries.of_panels():
        query = queries.concrete(expression, rate=RATE)
        promql_parser.parse(query)
        if any(prefix in expression for prefix in page.needs):
            continue
        if is_of(of, expression) and not asked.query(query):
            found[f"{page.name}: {panel.title}: {query}"] = query
    for alert, operand in queries.operands_of_alerts():
        if is_of(of, operand) and not asked.query(operand):
            found[f"{alert}: {operand}"] = operand
    return found


def has_data(asked: Prometheus, of: Prefixes = ()) -> Callable[[], bool]:
    def check() -> bool:
        missing = without_data(asked, of)
        assert not missing, "\n".join(missing)
        return True

    return check


def test_every_panel_and_every_alert_has_data(tmp_path: Path, certificates: Certificates) -> None:
    flags = ["--groups=2", "--proxies=2", "--tls=optional", f"--config={measuring(tmp_path)}"]
    flags += [f"--{name.replace('_', '-')}={path}" for name, path in certificates.served.items()]
    with (
        standalone(tmp_path / "data", *flags) as running,
        prometheus(tmp_path, targets(running), RULES) as asked,
    ):
        eventually(lambda: asked.ups() == len(running.processes), within_ms=DATA_MS)
        quick_start(running, tmp_path)
        asyncio.run(touch_everything(running))
        eventually(has_data(asked), within_ms=DATA_MS)
        # The certificate is valid for two days, and the alert waits an hour.
        assert asked.query('ALERTS{alertname="CertificateExpires",alertstate="pending"}')
        assert not asked.query('ALERTS{alertstate="firing"}')


def test_every_panel_and_every_alert_of_replicas_has_data(tmp_path: Path) -> None:
    with (
        standalone(tmp_path / "data", *FLAGS) as running,
        prometheus(tmp_path, targets(running), RULES) as asked,
    ):
        group = ReplicatedStandalone(running)
        asyncio.run(group.in_sync())
        running.put("topics/orders", queues=4)
        epoch = group.led()["epoch"]
        group.transfer()
        asyncio.run(group.in_sync(after_epoch=epoch))
        asyncio.run(send_one(running))
        refused = httpx.post(
            f"{running.admin}/api/v1/replicas/{group.group}:transfer",
            json={"target": REPLICAS},
            trust_env=False,
            timeout=ADMIN_S,
        )
        assert refused.is_client_error, refused.text
        eventually(has_data(asked, OF_REPLICAS), within_ms=DATA_MS)
        assert not asked.query('ALERTS{alertstate="firing"}')


async def send_one(running: Standalone) -> None:
    async with api(running.grpc) as client:
        answer = await client.send(message("orders", b"one"))
        assert answer.status.code == v2.OK, answer.status


def test_every_panel_and_every_alert_of_jobs_has_data(tmp_path: Path) -> None:
    served = tmp_path / "served"
    served.mkdir()
    with standalone(tmp_path / "data") as running, files_of(served) as files:
        running.put("topics/orders", queues=4)
        asyncio.run(send_one(running))
        with socket.create_server(("127.0.0.1", 0)) as reserved:
            port = reserved.getsockname()[1]
        archive = [f"--to={tmp_path / 'archive'}", "--every=1", f"--metrics-port={port}"]
        found = {"tidemill-pipeline": [f"127.0.0.1:{port}", files]}
        # A finished job leaves a file, which another server exports.
        audit = [f"--to={tmp_path / 'audit'}", f"--metrics-file={served / 'metrics'}"]
        with (
            job(running, tmp_path, "archive", *archive),
            job(running, tmp_path, "audit", *audit),
            prometheus(tmp_path, found, RULES) as asked,
        ):
            eventually(lambda: asked.ups() == len(found["tidemill-pipeline"]), within_ms=JOB_MS)
            eventually(has_data(asked, OF_JOBS), within_ms=JOB_MS)


@contextlib.contextmanager
def job(running: Standalone, folder: Path, name: str, *flags: str) -> Iterator[None]:
    """Run a job of the pipeline for the block. Its log is in the folder of the data."""
    command = [sys.executable, "-m", "tidemill", "pipeline", name]
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            [*command, f"--endpoints={running.grpc}", "--master=local[1]", *flags],
            stdout=log,
            stderr=log,
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait(JOB_MS / 1000)


class _Files(http.server.SimpleHTTPRequestHandler):
    extensions_map = {"": "text/plain; version=0.0.4"}  # noqa: RUF012  # As it is there.

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # As it is there.
        """Suppress the access log."""


@contextlib.contextmanager
def files_of(folder: Path) -> Iterator[str]:
    """Serve the files of a folder for the block; yield host:port."""
    handler = functools.partial(_Files, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
