"""A real Prometheus scrapes real processes: every panel shows something, and so does every alert.

Whoever opens a dashboard after the first round trip shall see no panel without data. Those of
Kubernetes are parsed alone, since their metrics are others'.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import promql_parser
import pytest

from tests.e2e.conftest import Certificates
from tests.support import queries
from tests.support.api import api, message
from tests.support.client_process import needs
from tests.support.eventually import eventually
from tests.support.everything import measuring, quick_start, touch_everything
from tests.support.processes import Standalone, standalone
from tests.support.prometheus import PROMETHEUS, Prometheus, prometheus
from tests.support.replicated_standalone import FLAGS, Replicated
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tools.generate_dashboards import RULES

RATE = "10s"  # ten scrapes
DATA_MS = 60_000  # until a few scrapes have seen everything

pytestmark = [pytest.mark.large, needs("go", PROMETHEUS)]


def targets(running: Standalone) -> dict[str, list[str]]:
    """Return where the processes are scraped, by the job that alerts know them by."""
    found: dict[str, list[str]] = {}
    for name, process in running.processes.items():
        address = process.metrics.removeprefix("http://").removesuffix("/metrics")
        found.setdefault(f"tidemill-{name.partition('-')[0]}", []).append(address)
    return found


# Of broker groups of several replicas, which the processes here have not.
OF_REPLICAS = ("rocketmq_ha_", "rocketmq_controller_")


def is_of_replicas(expression: str) -> bool:
    return any(prefix in expression for prefix in OF_REPLICAS)


def without_data(asked: Prometheus, *, of_replicas: bool = False) -> dict[str, str]:
    """Return the queries that have no answer, by what asks them: of replicas, or of the rest."""
    found = {}
    for page, panel, expression in queries.of_panels():
        query = queries.concrete(expression, rate=RATE)
        promql_parser.parse(query)
        if any(prefix in expression for prefix in page.needs):
            continue
        if is_of_replicas(expression) is of_replicas and not asked.query(query):
            found[f"{page.name}: {panel.title}: {query}"] = query
    for alert, operand in queries.operands_of_alerts():
        if is_of_replicas(operand) is of_replicas and not asked.query(operand):
            found[f"{alert}: {operand}"] = operand
    return found


def has_data(asked: Prometheus, *, of_replicas: bool = False) -> Callable[[], bool]:
    def check() -> bool:
        missing = without_data(asked, of_replicas=of_replicas)
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
        # The certificate is good for two days, and the alert waits an hour.
        assert asked.query('ALERTS{alertname="CertificateExpires",alertstate="pending"}')
        assert not asked.query('ALERTS{alertstate="firing"}')


def test_every_panel_and_every_alert_of_replicas_has_data(tmp_path: Path) -> None:
    with (
        standalone(tmp_path / "data", *FLAGS) as running,
        prometheus(tmp_path, targets(running), RULES) as asked,
    ):
        group = Replicated(running)
        asyncio.run(group.in_sync())
        running.put("topics/orders", queues=4)
        epoch = group.led()["epoch"]
        group.transfer()
        asyncio.run(group.in_sync(after_epoch=epoch))
        asyncio.run(send_one(running))
        eventually(has_data(asked, of_replicas=True), within_ms=DATA_MS)
        assert not asked.query('ALERTS{alertstate="firing"}')


async def send_one(running: Standalone) -> None:
    async with api(running.grpc) as client:
        answer = await client.send(message("orders", b"one"))
        assert answer.status.code == v2.OK, answer.status
