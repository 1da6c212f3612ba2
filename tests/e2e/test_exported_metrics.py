"""The exported metrics match docs/metrics.md and the numbers of a known load."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.e2e.conftest import Certificates
from tests.support.clients.everything import (
    MESSAGES,
    URGENT,
    measuring,
    quick_start,
    touch_everything,
)
from tests.support.processes.controlled_group import controlled_group
from tests.support.processes.exposed import exposed, parse, table
from tests.support.processes.processes import Standalone, standalone
from tests.support.worlds.pipeline_metrics import exercised
from tidemill.stubs.apache.rocketmq.v2 import admin_pb2, admin_pb2_grpc
from tidemill.stubs.externalscaler import externalscaler_pb2 as keda
from tidemill.stubs.externalscaler import externalscaler_pb2_grpc

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
BEGIN = "<!-- metrics of the processes -->\n"
SCRAPE_S = 10.0
# Set this variable to write the page instead of comparing it.
WRITE = "TIDEMILL_TEST_WRITE_METRICS"


@pytest.fixture(scope="module")
def running(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[Standalone]:
    folder = tmp_path_factory.mktemp("metrics")
    flags = [
        "--groups=2",
        "--scaler-port=0",
        "--admin-grpc-port=0",
        "--tls=optional",
        f"--config={measuring(folder)}",
    ]
    flags += [f"--{name.replace('_', '-')}={path}" for name, path in certificates.served.items()]
    with standalone(folder / "data", *flags) as started:
        started.put("quotas/topic/parcels", publishMessagesPerS=1_000_000)
        quick_start(started, folder)
        asyncio.run(touch_everything(started))
        ask_as_keda(started)
        ask_as_console(started)
        yield started


def ask_as_keda(running: Standalone) -> None:
    """Request the backlog of a consumer group."""
    metadata = {"group": "depot", "topic": "parcels", "messagesPerReplica": "10"}
    with grpc.insecure_channel(running.scaler) as channel:
        stub = externalscaler_pb2_grpc.ExternalScalerStub(channel)
        stub.IsActive(keda.ScaledObjectRef(scalerMetadata=metadata), timeout=SCRAPE_S)


def ask_as_console(running: Standalone) -> None:
    """Call the gRPC service Admin."""
    with grpc.insecure_channel(running.admin_grpc) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        stub.GetProxyRuntimeStats(admin_pb2.GetProxyRuntimeStatsRequest(), timeout=SCRAPE_S)


def scrape(running: Standalone) -> dict[str, list[str]]:
    texts: dict[str, list[str]] = defaultdict(list)
    for name, process in running.processes.items():
        answer = httpx.get(process.metrics, trust_env=False, timeout=SCRAPE_S)
        texts[name.partition("-")[0]].append(answer.raise_for_status().text)
    return texts


def scraped(address: str) -> str:
    answer = httpx.get(address, trust_env=False, timeout=SCRAPE_S)
    return answer.raise_for_status().text


@pytest.fixture(scope="module")
def seen(running: Standalone) -> list[Sample]:
    """The metrics of all processes after the load."""
    return samples_of(running)


def samples_of(running: Standalone) -> list[Sample]:
    return [
        sample
        for texts in scrape(running).values()
        for text in texts
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


def total(seen: list[Sample], name: str, **labels: str) -> float:
    """Return the sum of a sample over all processes."""
    return sum(
        sample.value
        for sample in seen
        if sample.name == f"rocketmq_{name}" and labels.items() <= sample.labels.items()
    )


def test_the_metrics_page_lists_the_exported_metrics(running: Standalone, tmp_path: Path) -> None:
    with controlled_group(tmp_path) as group:
        before = group.await_in_sync()
        group.transfer(1)
        # A replica that becomes a follower opens its store again and ends the scrapes of before.
        group.await_group(
            lambda found: (
                found.view.epoch > before.view.epoch
                and len(found.view.sss) == 3
                and found.history[-1].HasField("away_ms")
            )
        )
        controller = [scraped(group.controller.metrics)]
        replicas = [scraped(replica.metrics) for replica in group.replicas.values()]
    alone = scrape(running)
    texts = {**alone, "broker": [*alone["broker"], *replicas], "controller": controller}
    texts["pipeline"] = [exercised()]
    found = exposed(texts)
    introduction, begin, _ = PAGE.read_text("utf-8").partition(BEGIN)
    page = introduction + begin + table(found.values())
    if os.environ.get(WRITE):
        PAGE.write_text(page, "utf-8")
    known = parse(PAGE.read_text("utf-8"))
    assert {name: each.row() for name, each in known.items()} == {
        name: each.row() for name, each in found.items()
    }, f"see what {WRITE}=1 makes of docs/metrics.md"


def test_the_metrics_match_the_load(seen: list[Sample]) -> None:
    pair = {"topic": "parcels", "consumer_group": "depot"}
    assert total(seen, "messages_in_total", topic="parcels") == MESSAGES + 1
    assert total(seen, "messages_out_total", **pair, is_retry="false") == MESSAGES + 1
    assert total(seen, "messages_out_total", **pair, is_retry="true") == 2
    assert total(seen, "e2e_delivery_seconds_count", **pair) == MESSAGES + 3
    assert total(seen, "ack_total", **pair, result="applied") == MESSAGES + 1
    assert total(seen, "ack_seconds_count", **pair) == MESSAGES + 1
    assert total(seen, "redelivery_total", **pair, reason="expired") == 1
    assert total(seen, "redelivery_total", **pair, reason="nack") == 1
    assert total(seen, "send_to_dlq_messages_total", consumer_group="strict") >= 1
    assert total(seen, "dlq_messages", consumer_group="strict", state="open") >= 1
    assert total(seen, "dlq_messages", consumer_group="depot") == 0
    assert total(seen, "pop_lock_conflict_total", consumer_group="orderly") >= 1


def test_delayed_messages_are_counted(seen: list[Sample]) -> None:
    assert total(seen, "timer_enqueue_total", topic="reminders") == 2
    assert total(seen, "timer_dequeue_total", topic="reminders") == 1
    assert total(seen, "timer_recall_total", topic="reminders", result="recalled") == 1
    assert total(seen, "timer_lateness_seconds_count", topic="reminders") == 1
    assert total(seen, "timing_messages", topic="reminders") == 0
    assert total(seen, "timer_dropped_total") == 0
    assert total(seen, "timer_early_total") == 0
    assert total(seen, "metrics_overflow_total") == 0


def test_levels_of_a_priority_topic_are_counted(seen: list[Sample]) -> None:
    pair = {"topic": "urgent", "consumer_group": "ambulance"}
    for level, waiting in (("0", 0), ("1", 1)):
        stored = total(seen, "priority_stored_total", topic="urgent", level=level)
        assert stored == URGENT // 2 + waiting
        assert total(seen, "priority_delivered_total", **pair, level=level) == URGENT // 2
        assert total(seen, "priority_ready_messages", **pair, level=level) == waiting
        oldest_s = total(seen, "priority_oldest_ready_seconds", **pair, level=level)
        assert (oldest_s > 0) == bool(waiting)
    assert total(seen, "priority_delivered_total", **pair, slot="fair", level="0") >= 1
    assert total(seen, "priority_delivered_total", **pair, slot="fair", level="1") == 0
    assert {s.value for s in seen if s.name == "rocketmq_priority_factor"} == {50}


def test_known_label_values_start_at_zero(running: Standalone) -> None:
    running.put("topics/untouched", messageType="MIXED", queues=1)
    begun = {
        "rocketmq_messages_in_total",
        "rocketmq_throughput_in_total",
        "rocketmq_timing_messages",
        "rocketmq_timer_enqueue_total",
        "rocketmq_timer_dequeue_total",
    }
    of_topic = [each for each in samples_of(running) if each.labels.get("topic") == "untouched"]
    assert begun <= {each.name for each in of_topic}
    assert not any(each.value for each in of_topic)
