"""Every listener and every address of a cluster is IPv6."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import httpx
import pytest

from tests.support.clients.api import api, message
from tests.support.processes.controlled_group import controlled_group, proxy_of
from tests.support.processes.processes import standalone
from tidemill.stubs.apache.rocketmq.v2 import admin_pb2, admin_pb2_grpc
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

TOPIC, CONSUMERS = "orders", "billing"
READ_S = 30.0


def get(url: str) -> httpx.Response:
    with httpx.Client(trust_env=False, timeout=READ_S) as client:
        return client.get(url).raise_for_status()


async def send_and_receive(endpoint: str) -> None:
    async with api(endpoint, call_s=READ_S) as client:
        sent = await client.send(message(TOPIC, b"body"))
        assert sent.status.code == v2.OK, sent
        [received] = await client.receive(TOPIC, CONSUMERS, poll_ms=20_000)
        acked = await client.ack(TOPIC, CONSUMERS, [received.system_properties.receipt_handle])
        assert acked.status.code == v2.OK, acked


def count_clients(endpoint: str) -> None:
    """Call the gRPC service Admin."""
    with grpc.insecure_channel(endpoint) as channel:
        request = admin_pb2.GetProxyRuntimeStatsRequest()
        answer = admin_pb2_grpc.AdminStub(channel).GetProxyRuntimeStats(request, timeout=READ_S)
        assert answer.status.code == v2.OK, answer


@pytest.mark.parametrize(
    ("host", "reached_at"), [("::1", ["[::1]"]), ("::", ["[::1]", "127.0.0.1"])]
)
def test_a_standalone_serves_ipv6(host: str, reached_at: list[str], tmp_path: Path) -> None:
    flags = [f"--{name}-host={host}" for name in ("grpc", "admin", "metrics", "scaler")]
    flags += ["--admin-open", "--admin-plain", "--scaler-open", "--scaler-port=0", "--replicas=3"]
    flags += ["--admin-grpc-port=0"]
    with standalone(tmp_path / "data", *flags) as running:
        for address in (running.grpc, running.admin, running.scaler, running.admin_grpc):
            assert f"[{host}]:" in address
        for reached in reached_at:
            asyncio.run(send_and_receive(running.grpc.replace(f"[{host}]", reached)))
            api_url = running.admin.replace(f"[{host}]", reached)
            assert get(f"{api_url}/api/v1/topics/{TOPIC}").json()["name"] == TOPIC
            count_clients(running.admin_grpc.replace(f"[{host}]", reached))
            for process in running.processes.values():
                assert get(process.metrics.replace(f"[{host}]", reached)).text


def test_replicas_controllers_and_proxies_reach_each_other_by_ipv6(tmp_path: Path) -> None:
    flags = ("--grpc-host=::1", "--metrics-host=::1")
    with controlled_group(tmp_path, flags=flags, controller_flags=flags) as group:
        group.await_in_sync()
        with proxy_of(group, *flags) as proxy:
            asyncio.run(send_and_receive(proxy.grpc))
            group.move_master((group.master + 1) % 3)
            asyncio.run(send_and_receive(proxy.grpc))
        assert all(one.address.startswith("[::1]:") for one in group.group().replicas)
