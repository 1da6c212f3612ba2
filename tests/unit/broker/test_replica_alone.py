"""A start of a replica's store as a broker without replicas is rejected."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.broker.settings import BrokerSettings
from tidemill.broker.store import open_engine, open_replica
from tidemill.common.lifecycle import StartError


def test_a_replicas_store_is_not_opened_alone_and_joins_again(tmp_path: Path) -> None:
    settings = BrokerSettings(data_dir=tmp_path, segment_bytes=1 << 20, disk_reserve_bytes=0)
    with open_engine(settings, now_ms=0):
        pass
    with open_replica(settings, now_ms=0) as replica:
        assert (replica.epoch_seen, replica.epoch_alone) == (0, 1)
        end = replica.log_end
    with open_engine(settings, now_ms=0):
        pass  # The store has not been part of a broker group yet.
    with open_replica(settings, now_ms=0) as replica:
        assert replica.log_end > end
        end = replica.log_end
        replica.save_epoch_seen(5)
    with pytest.raises(StartError, match="has reached epoch 5;"):
        open_engine(settings, now_ms=0).__enter__()
    with open_replica(settings, now_ms=0) as replica:
        assert (replica.epoch_seen, replica.log_end) == (5, end)
    (tmp_path / "replica").rename(tmp_path / "away")
    with open_engine(settings, now_ms=0) as engine:
        assert engine.log.log_end > end
