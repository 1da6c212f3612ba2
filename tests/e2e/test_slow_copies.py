"""A replica that copies the log over a slow link: no silence of the stream ends it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.support.clients.api import api, message
from tests.support.processes.controlled_group import controlled_group, proxy_of
from tests.support.processes.tcp_links import tcp_links
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

pytestmark = pytest.mark.heavy
BODY_BYTES = 1 << 20  # needs four seconds on the link, and a stream may be silent for one
MESSAGES = 3
LINK_BYTES_PER_S = 256 << 10
CALL_S = 30.0


def test_a_copy_over_a_slow_link_goes_on_in_one_stream(tmp_path: Path) -> None:
    async def send(endpoint: str) -> None:
        async with api(endpoint, call_s=CALL_S) as client:
            for number in range(MESSAGES):
                body = bytes([number]) * BODY_BYTES
                answer = await client.send(message("orders", body))
                assert answer.status.code == v2.OK, answer.status

    with tcp_links() as links, controlled_group(tmp_path, links) as group:
        master = group.await_in_sync().view.master.replica_id
        late = next(number for number in group.replicas if number != master)
        group.replicas[late].end()
        with proxy_of(group) as proxy:
            asyncio.run(send(proxy.grpc))
        group.await_in_sync(2)
        group.to_replica[master].slow(delay_s=0.0, bytes_per_s=LINK_BYTES_PER_S)
        log = tmp_path / f"replica-{late}.log"
        begin = log.stat().st_size
        group.start_replica(late)
        group.await_in_sync()
        events = list(map(json.loads, log.read_text()[begin:].splitlines()))
    reasons = [one["reason"] for one in events if one["event"] == "replication stream closed"]
    assert "silent" not in reasons
