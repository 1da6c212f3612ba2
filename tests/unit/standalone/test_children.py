"""Which processes a standalone has, where they keep their data, and on which ports they serve."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.common.lifecycle import StartRefused
from tidemill.standalone.app import (
    check_all_served,
    child_names,
    data_dir_of,
    metrics_ports_of,
)
from tidemill.standalone.settings import StandaloneSettings


def load(*flags: str) -> StandaloneSettings:
    return StandaloneSettings.load(["--data-dir=/d", *flags])


def test_all_processes_take_consecutive_metrics_ports_brokers_first() -> None:
    settings = load("--groups=3", "--proxies=2", "--metrics-port=7000")
    assert metrics_ports_of(settings) == {
        "broker-0": 7000, "broker-1": 7001, "broker-2": 7002,
        "proxy-0": 7003, "proxy-1": 7004, "admin": 7005,
    }  # fmt: skip


def test_the_first_broker_keeps_the_store_that_one_alone_has() -> None:
    assert data_dir_of(load(), "broker-0") == Path("/d")
    assert data_dir_of(load("--groups=2"), "broker-0") == Path("/d")
    assert data_dir_of(load("--groups=2"), "broker-1") == Path("/d/broker-1")


def test_one_broker_group_is_as_before() -> None:
    assert child_names(load()) == ["broker-0", "proxy-0", "admin"]


def test_a_store_that_no_broker_would_serve_refuses_the_start(tmp_path: Path) -> None:
    for name in ("broker-1", "broker-2", "broker-other"):
        (tmp_path / name).mkdir()
    at = f"--data-dir={tmp_path}"
    for flags in ([], ["--groups=2"]):
        with pytest.raises(StartRefused, match="holds 3 broker groups: start with --groups 3,"):
            check_all_served(load(at, *flags))
    check_all_served(load(at, "--groups=3"))
    check_all_served(load(at, "--groups=4"))


def test_a_data_directory_that_is_not_there_yet_holds_nothing(tmp_path: Path) -> None:
    check_all_served(load(f"--data-dir={tmp_path / 'none'}"))
