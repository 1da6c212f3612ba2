"""Official clients report measurements, and the proxies export them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.clients.client_process import (
    JAVA_CLASSES,
    JAVA_LIBRARIES,
    needs,
    run_java_client,
    run_python_client,
)
from tests.support.processes.processes import ADMIN_S, Standalone, standalone


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    folder = tmp_path_factory.mktemp("measured")
    config = folder / "tidemill.yaml"
    config.write_text("client_metrics: true\n")
    with standalone(folder / "data", f"--config={config}", "--proxies=2") as started:
        yield started


def total(running: Standalone, sample_name: str, **labels: str) -> float:
    """Return a sample summed over the proxies."""
    found = 0.0
    for name, process in running.processes.items():
        if not name.startswith("proxy"):
            continue
        text = httpx.get(process.metrics, trust_env=False, timeout=ADMIN_S).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == sample_name and labels.items() <= sample.labels.items():
                    found += sample.value
    return found


def test_python_clients_export_their_measurements(tmp_path: Path, running: Standalone) -> None:
    """The clients report every minute and at their end."""
    run_python_client(tmp_path, "push", running.grpc, topic="snake", group="snake", messages=50)
    # A producer starts to measure a moment after it may send, so its first sends are not counted.
    # A send whose first attempt failed counts as a failure.
    assert total(running, "rocketmq_send_cost_time_count", topic="snake") >= 1
    consumed = {"topic": "snake", "consumer_group": "snake"}
    # The process may end before it reports the last ones.
    assert total(running, "rocketmq_process_time_count", **consumed) >= 25
    assert total(running, "rocketmq_await_time_count", **consumed) >= 25
    rejected = {"result": "rejected"}
    assert total(running, "rocketmq_proxy_client_metric_points_total", **rejected) == 0


@needs("java", JAVA_CLASSES, JAVA_LIBRARIES)
def test_java_clients_export_their_measurements(tmp_path: Path, running: Standalone) -> None:
    facts = run_java_client(tmp_path, "roundTrip", running.grpc, topic="bean", group="bean")
    sent = {"topic": "bean", "invocation_status": "success"}
    assert total(running, "rocketmq_send_cost_time_count", **sent) == len(facts.of("sent"))
