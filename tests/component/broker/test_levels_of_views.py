"""The feature level that a replica takes from views of the controllers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from tidemill.broker.engine.replication.config import ReplicationConfig
from tidemill.broker.server.replicas.replica_shell import ReplicaShell
from tidemill.broker.server.round.durability import Durability
from tidemill.broker.settings import BrokerSettings
from tidemill.broker.store import open_replica
from tidemill.common.clock import SystemClock
from tidemill.common.replica_group import ReplicaId, ReplicaRun, ReplicationView

if TYPE_CHECKING:
    from tidemill.broker.engine.replica.replica_engine import ReplicaEngine

NOW_MS = 1_000_000
ME = ReplicaRun(ReplicaId(0), "a")
GROUP = "mill/broker-0"
VIEW = ReplicationView(1, 1, ME, frozenset({ME}), frozenset(), 1, group=GROUP)


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[ReplicaEngine]:
    settings = BrokerSettings(
        data_dir=tmp_path, replica_id=0, controllers=["h:1"], disk_reserve_bytes=0
    )
    with open_replica(settings, now_ms=NOW_MS) as opened:
        yield opened


def levels_after(replica: ReplicaEngine, *views: ReplicationView) -> list[int]:
    """Return the level of the log after each view, at the master of the first view."""

    async def learn() -> list[int]:
        unused = cast("object", None)
        shell = ReplicaShell(
            ME,
            GROUP,
            replica,
            Durability(replica.engine, unused),  # type: ignore[arg-type]  # Nothing is synced.
            ReplicationConfig(),
            connect=unused,  # type: ignore[arg-type]  # No stream is dialled.
            controllers=unused,  # type: ignore[arg-type]  # Nothing is proposed.
            clock=SystemClock(),
        )
        levels = []
        for view in views:
            shell.learn(view)
            replica.engine.run_due(NOW_MS, firing_ms=NOW_MS)
            replica.engine.commit(NOW_MS)
            levels.append(replica.engine.catalog.feature_level)
        return levels

    return asyncio.run(learn())


def test_a_master_records_the_level_of_its_view(replica: ReplicaEngine) -> None:
    assert levels_after(replica, VIEW, VIEW._replace(version=2, feature_level=2)) == [1, 2]


def test_a_view_of_another_cluster_does_not_raise_the_level(replica: ReplicaEngine) -> None:
    other = VIEW._replace(version=99, feature_level=2, group="other/broker-0")
    assert levels_after(replica, VIEW, other) == [1, 1]


def test_an_outdated_view_does_not_raise_the_level(replica: ReplicaEngine) -> None:
    newer, older = VIEW._replace(version=3), VIEW._replace(version=2, feature_level=2)
    assert levels_after(replica, VIEW, newer, older) == [1, 1, 1]


def test_the_level_that_an_old_controller_left_out_of_a_version_counts(
    replica: ReplicaEngine,
) -> None:
    assert levels_after(replica, VIEW, VIEW._replace(feature_level=2)) == [1, 2]
