"""The names of a broker: its group's, its replica's, and the label on its metrics."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path

import httpx

from tests.support.processes.processes import broker
from tidemill.admin.cluster.broker_client import broker_client
from tidemill.admin.cluster.brokers import Brokers
from tidemill.admin.cluster.controllers import ControllerClients
from tidemill.admin.routes.broker_groups import get_broker_group

TIMEOUT_MS = 5_000


def names_of(*flags: str, data_dir: Path) -> tuple[str, str, str, str]:
    """Return what the REST API shows of a broker with these flags, and its metrics' node_id."""
    with broker(data_dir, *flags) as (_, address, log):

        async def ask() -> tuple[str, str, str]:
            connect = functools.partial(broker_client, timeout_ms=TIMEOUT_MS)
            brokers = Brokers([address], connect, timeout_ms=TIMEOUT_MS)
            async with brokers.running():
                [member] = await brokers.members()
                shown = await get_broker_group(member.name, brokers, ControllerClients([]))
                [replica] = shown.replicas
                return shown.name, shown.master, replica.name

        shown = asyncio.run(ask())
        return *shown, _node_id(log)


def _node_id(log: Path) -> str:
    [served] = [line for line in log.read_text().splitlines() if "broker serves" in line]
    url = served.split('"metrics": "')[1].split('"')[0]
    with httpx.Client(trust_env=False) as client:
        text = client.get(url).text
    return text.split('node_id="')[1].split('"')[0]


def test_a_replica_has_a_name_of_its_own(tmp_path: Path) -> None:
    flags = "--name=group-7", "--replica-name=group-7-0", "--node-id=pod"
    names = names_of(*flags, data_dir=tmp_path / "data")
    assert names == ("group-7", "group-7-0", "group-7-0", "pod")


def test_where_none_is_given_it_is_the_groups(tmp_path: Path) -> None:
    assert names_of("--name=one", data_dir=tmp_path / "data") == ("one", "one", "one", "one")
