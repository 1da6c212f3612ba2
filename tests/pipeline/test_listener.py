"""Reports of listeners on progress events of Spark, without a Spark session."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.worlds.fake_cluster import FakeCluster
from tidemill_pipeline.listener import ProgressPublisher, QueryMetrics
from tidemill_pipeline.metrics import PipelineMetrics
from tidemill_pipeline.offsets import Incarnation, Offsets, SourceQueue, with_report


def query_progress(
    *, end: dict[str, Any], latest: dict[str, Any] | None = None, rows: int = 0
) -> Any:
    source = SimpleNamespace(
        startOffset=None,
        endOffset=json.dumps(end),
        numInputRows=rows,
        latestOffset=None if latest is None else json.dumps(latest),
    )
    return SimpleNamespace(
        progress=SimpleNamespace(
            sources=[source], name="q", id="q", batchId=1, numInputRows=rows, batchDuration=5
        )
    )


def logs(**places: tuple[int, str]) -> dict[str, Any]:
    return {"v": 1, "e": {name: {"at": at, "log": log} for name, (at, log) in places.items()}}


def test_event_logs_report_their_backlog_in_bytes() -> None:
    metrics = PipelineMetrics("copy")
    watching = QueryMetrics(metrics)
    # The store of `b` was created again, and `c` is new.
    read, there = logs(a=(40, "x"), b=(90, "y")), logs(a=(100, "x"), b=(70, "z"), c=(8, "w"))
    watching.onQueryProgress(query_progress(end=read, latest=there, rows=3))
    assert metrics.waiting_bytes == {"a": 60, "b": 70, "c": 8}
    assert metrics.rows == {"*": 3}
    # If a broker does not answer, the listener keeps the last known value.
    watching.onQueryProgress(query_progress(end=logs(a=(100, "x")), latest=logs(a=(100, "x"))))
    assert metrics.waiting_bytes == {"a": 0, "b": 70, "c": 8}


def test_a_group_that_is_refused_is_a_warning(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.add("orders", "a", 0, 3)
    cluster.missing_groups.add("nobody")
    queue = SourceQueue("orders", "a", 0, Incarnation("x", 1))
    document = with_report(
        Offsets(at={queue: 3}).as_document(),
        group="nobody",
        connection={"endpoints": cluster.endpoint, "maxRetries": "0"},
    )
    ProgressPublisher().onQueryProgress(query_progress(end=document))
    assert not cluster.pull_offsets
    assert "cannot publish progress" in caplog.text
    assert "there is no group nobody" in caplog.text
