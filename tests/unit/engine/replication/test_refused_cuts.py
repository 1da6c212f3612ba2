"""A needed log that would be emptied is refused before anything of it is cut."""

from __future__ import annotations

from zlib import crc32

from tests.unit.engine.replication.test_machines import Log, run, view
from tidemill.broker.engine.replication.config import ReplicationConfig
from tidemill.broker.engine.replication.epoch_journal import CommonPrefix, EpochEntry, LogExtent
from tidemill.broker.engine.replication.messages import Digest, Welcome
from tidemill.broker.engine.replication.replica import Replica
from tidemill.broker.engine.replication.replica_phases import ReplicaPhase

CONFIG = ReplicationConfig()


def test_a_refused_log_keeps_its_tail() -> None:
    log = Log(b"\1\2", (EpochEntry(1, 0),))
    replica = Replica(run(1), "broker-0", "store", log, view(), CONFIG, 0)
    replica.tick(CONFIG.dial_longest_ms)
    replica.handle_connected(7, CONFIG.dial_longest_ms)
    extent = LogExtent((EpochEntry(1, 0),), 0, 1)._replace(state_floor=2)
    digest = Digest(0, 1, crc32(b"\1"))
    welcome = Welcome(1, run(0), CommonPrefix(1), digest, extent, 0)
    replica.handle_welcome(welcome, CONFIG.dial_longest_ms)
    assert replica.phase is ReplicaPhase.DIVERGED
    assert log.data == b"\1\2"
