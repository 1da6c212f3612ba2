"""Security items of real processes: the home stores them, and every broker group has them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, standalone
from tests.support.security_items import MODE_OFF, delete, put
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.stubs.tidemill.broker.v1 import broker_pb2_grpc

CALL_S = 10.0
USERS = 400  # with 800 KB they need several pages


def addresses_of(running: Standalone) -> dict[str, str]:
    return {one["name"]: one["address"] for one in running.get("broker-groups")["items"]}


def change(address: str, *items: dict[str, Any], version: int) -> int:
    with grpc.insecure_channel(address) as channel:
        stub = broker_pb2_grpc.BrokerAdminStub(channel)
        encoded = [json.dumps(item).encode() for item in items]
        request = pb.ChangeSecurityRequest(expected_version=version, items=encoded)
        return int(stub.ChangeSecurity(request, timeout=CALL_S).version)


def table_at(address: str) -> tuple[int, dict[str, int]]:
    """Return the version of the table at a broker group, and the versions of its users."""
    versions: dict[str, int] = {}
    with grpc.insecure_channel(address) as channel:
        stub = broker_pb2_grpc.BrokerAdminStub(channel)
        while True:
            last = max(versions, default="")
            request = pb.ListSecurityRequest(kind="user", after_name=last, limit=150)
            page = stub.ListSecurity(request, timeout=CALL_S)
            for item in map(json.loads, page.items):
                versions[item["name"]] = item["version"]
            if not page.has_more:
                return int(page.version), versions


def test_all_broker_groups_have_the_items_while_the_home_is_killed(tmp_path: Path) -> None:
    with standalone(tmp_path / "data", "--groups=2") as running:
        addresses = addresses_of(running)
        home, member = addresses["broker-0"], addresses["broker-1"]
        version = change(home, MODE_OFF, version=0)
        for first in range(0, USERS, 100):
            users = [put(f"user {n:03}", "x" * 2_000) for n in range(first, first + 100)]
            version = change(home, *users, version=version)
        expected = {f"user {n:03}": n + 2 for n in range(USERS)}
        eventually(lambda: table_at(member) == (version, expected))
        with pytest.raises(grpc.RpcError) as caught:
            change(member, put("a"), version=version)
        trailers = {each.key: str(each.value) for each in caught.value.trailing_metadata()}
        assert trailers["tidemill-error"] == "Forbidden"

        os.kill(running.processes["broker-0"].pid, signal.SIGSTOP)
        assert table_at(member) == (version, expected)
        os.kill(running.processes["broker-0"].pid, signal.SIGKILL)

        def changed() -> bool:
            try:
                return change(home, delete("user 000"), put("new"), version=version) > 0
            except grpc.RpcError:
                return False

        eventually(changed, within_ms=20_000)
        del expected["user 000"]
        expected["new"] = version + 2
        eventually(lambda: table_at(member) == (version + 2, expected), within_ms=10_000)
        assert table_at(home) == (version + 2, expected)
