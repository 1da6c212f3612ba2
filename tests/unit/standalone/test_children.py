"""The processes of a standalone, their data folders and their ports."""

from __future__ import annotations

import asyncio
import shutil
from functools import partial
from pathlib import Path

import pytest

from tidemill.__main__ import run_to_end
from tidemill.common.lifecycle import StartError
from tidemill.common.replica_group import ReplicaId, ReplicaRun
from tidemill.controller.election.record import GroupRecord, RegisteredRun, Retirement
from tidemill.controller.sqlite_store import SqliteStore
from tidemill.standalone.app import run_after
from tidemill.standalone.broker_stores import brokers_of, check_all_served
from tidemill.standalone.child import Child
from tidemill.standalone.child_plan import child_names, metrics_ports_of
from tidemill.standalone.settings import StandaloneSettings


def load(*flags: str) -> StandaloneSettings:
    return StandaloneSettings.load(["--data-dir=/d", *flags])


def test_all_processes_take_consecutive_metrics_ports_brokers_first() -> None:
    settings = load("--groups=3", "--proxies=2", "--metrics-port=7000")
    assert metrics_ports_of(settings) == {
        "broker-0": 7000,
        "broker-1": 7001,
        "broker-2": 7002,
        "proxy-0": 7003,
        "proxy-1": 7004,
        "admin": 7005,
    }


def stores(*flags: str) -> dict[str, Path]:
    return {one.name: one.data_dir for one in brokers_of(load(*flags))}


def test_the_first_broker_uses_the_store_of_a_single_broker() -> None:
    assert stores() == {"broker-0": Path("/d")}
    assert stores("--groups=2") == {"broker-0": Path("/d"), "broker-1": Path("/d/broker-1")}


def test_replica_0_uses_the_store_of_its_broker_group_without_replicas() -> None:
    assert stores("--groups=2", "--replicas=2") == {
        "broker-0-0": Path("/d"),
        "broker-0-1": Path("/d/broker-0-1"),
        "broker-1-0": Path("/d/broker-1"),
        "broker-1-1": Path("/d/broker-1-1"),
    }


def test_replicas_take_metrics_ports_in_order_and_the_controller_the_last() -> None:
    settings = load("--groups=2", "--replicas=2", "--metrics-port=7000")
    assert metrics_ports_of(settings) == {
        "broker-0-0": 7000,
        "broker-0-1": 7001,
        "broker-1-0": 7002,
        "broker-1-1": 7003,
        "proxy-0": 7004,
        "admin": 7005,
        "controller-0": 7006,
    }


def test_one_broker_group_has_three_processes() -> None:
    assert child_names(load()) == ["broker-0", "proxy-0", "admin"]


def test_a_store_without_a_broker_prevents_the_start(tmp_path: Path) -> None:
    for name in ("broker-1", "broker-2", "broker-other"):
        (tmp_path / name).mkdir()
    at = f"--data-dir={tmp_path}"
    for flags in ([], ["--groups=2"]):
        with pytest.raises(StartError, match="holds 3 broker groups: start with --groups 3\\."):
            check_all_served(load(at, *flags))
    check_all_served(load(at, "--groups=3"))
    check_all_served(load(at, "--groups=4"))


def test_fewer_replicas_than_stores_prevent_the_start(tmp_path: Path) -> None:
    for name in ("broker-0-1", "broker-0-2"):
        (tmp_path / name).mkdir()
    at = f"--data-dir={tmp_path}"
    for flags in ([], ["--replicas=2"]):
        with pytest.raises(StartError, match=r"holds 3 replicas .* start with --replicas 3"):
            check_all_served(load(at, *flags))
    check_all_served(load(at, "--replicas=3"))
    check_all_served(load(at, "--replicas=5"))


def keep_record(data_dir: Path, *, count: int, drained: set[int], sss: set[int]) -> None:
    """Write the record of a broker group whose replica 0 is the master."""
    replicas = tuple(
        (
            ReplicaId(n),
            RegisteredRun(
                store_uuid="",
                incarnation=f"run {n}",
                address="",
                is_unclean=False,
                retired=Retirement.DRAINED if n in drained else Retirement.NO,
            ),
        )
        for n in range(count)
    )
    record = GroupRecord(
        min_in_sync=2,
        epoch=1,
        version=1,
        master=ReplicaRun(ReplicaId(0), "run 0"),
        sss=frozenset(ReplicaRun(ReplicaId(n), f"run {n}") for n in sss),
        replicas=replicas,
    )

    async def write() -> None:
        shutil.rmtree(data_dir / "controller-0", ignore_errors=True)
        async with SqliteStore.open(data_dir / "controller-0" / "groups.sqlite") as store:
            await store.create("broker-0", record)

    asyncio.run(write())


def test_drained_replicas_need_not_be_started(tmp_path: Path) -> None:
    for number in range(1, 5):
        (tmp_path / f"broker-0-{number}").mkdir()
    at = f"--data-dir={tmp_path}"
    keep = partial(keep_record, tmp_path, count=5)
    keep(drained={3, 4}, sss={0, 1, 2})
    check_all_served(load(at, "--replicas=3"))
    with pytest.raises(
        StartError, match="first drain the others with `tidemill replica drain broker-0-2`"
    ):
        check_all_served(load(at, "--replicas=2"))
    keep(drained={4}, sss={0, 1, 2, 3})
    with pytest.raises(StartError, match=r"first drain the others with .* broker-0-3`, and stop"):
        check_all_served(load(at, "--replicas=3"))
    # It is draining, and it is still needed.
    keep(drained={3, 4}, sss={0, 3})
    with pytest.raises(StartError, match=r"drain broker-0-3`, and stop"):
        check_all_served(load(at, "--replicas=3"))
    keep(drained={1, 2, 3, 4}, sss={0})
    check_all_served(load(at, "--replicas=2"))


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("are_drained", [False, True])
def test_the_refusal_of_one_replica_names_a_possible_number(
    tmp_path: Path, *, count: int, are_drained: bool
) -> None:
    for number in range(1, count):
        (tmp_path / f"broker-0-{number}").mkdir()
    drained = set(range(1, count)) if are_drained else set()
    keep_record(tmp_path, count=count, drained=drained, sss=set(range(count)) - drained)
    with pytest.raises(StartError) as refused:
        check_all_served(load(f"--data-dir={tmp_path}"))
    text = str(refused.value)
    assert "cannot become one of a single replica" in text
    assert "drain broker-0-1" not in text, "replica 1 is needed whatever its state"
    assert ("drain broker-0-2`" in text) == (count == 3 and not are_drained)
    assert f"start with --replicas {2 if are_drained else count}" in text


def test_a_replica_is_not_started_as_a_single_broker(tmp_path: Path) -> None:
    (tmp_path / "replica").mkdir()
    at = f"--data-dir={tmp_path}"
    with pytest.raises(StartError, match="is that of a replica"):
        check_all_served(load(at))
    check_all_served(load(at, "--replicas=2"))


def test_a_missing_data_directory_is_empty(tmp_path: Path) -> None:
    check_all_served(load(f"--data-dir={tmp_path / 'none'}"))


class StartNotes(Child):
    """A child that starts no process, and notes that it would serve."""

    def __init__(self, name: str) -> None:
        super().__init__(name, lambda _addresses: [], run_to_end)
        self.is_started = asyncio.Event()

    async def run(self) -> None:
        await self.may_serve.wait()
        self.is_started.set()


def test_a_child_starts_after_those_that_it_needs_and_not_without_end() -> None:
    async def run() -> None:
        broker, proxy = StartNotes("broker-0"), StartNotes("proxy-0")
        start = asyncio.create_task(run_after([broker], proxy, patience_s=600))
        await asyncio.sleep(0)
        assert not proxy.is_started.is_set()
        broker.is_ready.set()
        await asyncio.wait_for(start, 30)
        assert proxy.is_started.is_set()
        late = StartNotes("proxy-1")
        await asyncio.wait_for(run_after([StartNotes("broker-1")], late, patience_s=0.01), 30)
        assert late.is_started.is_set()

    asyncio.run(run())
