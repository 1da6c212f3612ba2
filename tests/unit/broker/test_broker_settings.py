"""Each setting belongs to the engine or to the shell; a misspelled one would have no effect."""

from __future__ import annotations

from dataclasses import fields

import pytest

from tidemill.broker.engine.config import EngineConfig
from tidemill.broker.engine.dedup.config import DedupConfig
from tidemill.broker.engine.timer.config import TimerConfig
from tidemill.broker.engine.transaction.config import TransactionConfig
from tidemill.broker.settings import BrokerSettings
from tidemill.common.addresses import in_brackets
from tidemill.common.settings import ProcessSettings

OF_THE_SHELL = {
    "transaction_checks_per_second",
    "cluster_tls_ca_file",
    "cluster_tls_certificate_file",
    "cluster_tls_key_file",
    "data_dir",
    "data_dir_wait_ms",
    "controllers",
    "controllers_fd",
    "drain_timeout_ms",
    "feature_level_max",
    "grpc_host",
    "grpc_port",
    "grpc_reuse_port",
    "parked_max",
    "pending_bytes_max",
    "plain_links",
    "replica_address",
    "replica_id",
    "replica_name",
    "timer_clock_hold_ms",
}


def test_every_setting_belongs_to_the_engine_or_to_the_shell() -> None:
    of_the_engine = {one.name for one in fields(EngineConfig)}
    of_the_engine |= {f"timer_{one.name}" for one in fields(TimerConfig)}
    of_the_engine |= {f"transaction_{one.name}" for one in fields(TransactionConfig)}
    of_the_engine |= {f"dedup_{one.name}" for one in fields(DedupConfig)}
    own = set(BrokerSettings.model_fields) - set(ProcessSettings.model_fields)
    assert own - of_the_engine == OF_THE_SHELL


FILES = ["--cluster-tls-ca-file=a", "--cluster-tls-certificate-file=b", "--cluster-tls-key-file=c"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "broker.example", ""])
def test_a_broker_without_tls_serves_only_its_machine(
    host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        BrokerSettings.load([f"--grpc-host={host}"])
    assert exited.value.code == 2
    error = capsys.readouterr().err
    for remedy in ("cluster_tls_ca_file", "plain_links"):
        assert remedy in error
    assert BrokerSettings.load([f"--grpc-host={host}", "--plain-links"]).plain_links
    assert BrokerSettings.load([f"--grpc-host={host}", *FILES]).cluster_tls_ca_file == "a"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "[::1]", "localhost"])
def test_a_broker_on_loopback_needs_no_tls(host: str) -> None:
    assert BrokerSettings.load([f"--grpc-host={host}"]).grpc_host == host


@pytest.mark.parametrize("missing", FILES)
def test_tls_between_the_processes_needs_all_three_files(
    missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        BrokerSettings.load([file for file in FILES if file != missing])
    assert "cluster_tls_key_file" in capsys.readouterr().err


REPLICA = ["--replica-id=0", "--controllers=a:10912", "--plain-links"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_a_replica_needs_an_address_that_others_reach(
    host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"{in_brackets(host or '0.0.0.0')}:10911"
    for flags in ([f"--grpc-host={host}"], [f"--replica-address={address}"]):
        with pytest.raises(SystemExit):
            BrokerSettings.load([*REPLICA, *flags])
        assert "set replica_address" in capsys.readouterr().err
    named = [f"--grpc-host={host}", "--replica-address=r0:10911"]
    assert BrokerSettings.load([*REPLICA, *named]).replica_address == "r0:10911"
    assert BrokerSettings.load([*REPLICA, "--grpc-host=10.0.0.7"]).replica_address == ""
