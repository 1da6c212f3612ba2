"""Deleted topics and consumer groups that clients still use."""

from __future__ import annotations

from pathlib import Path

import grpc
import httpx

from tests.support.clients.client_process import staying_client
from tests.support.clients.commands import tidemill
from tests.support.clients.pulling import METADATA, TIMEOUT_S, PullClient, message_of
from tests.support.eventually import eventually
from tests.support.processes.processes import ADMIN_S, Standalone
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service

NAME = "deleted"
TOPIC = {"messageType": "FIFO", "queues": 2}
GROUP = {"deliveryOrder": "FIFO", "maxAttempts": 3}


def test_a_name_that_clients_use_stays_deleted_until_an_operator_creates_it(
    tmp_path: Path, running: Standalone
) -> None:
    running.put(f"topics/{NAME}", **TOPIC)
    running.put(f"groups/{NAME}", **GROUP)
    rest = httpx.Client(base_url=f"{running.admin}/api/v1", trust_env=False, timeout=ADMIN_S)
    with (
        rest,
        grpc.insecure_channel(running.grpc) as channel,
        staying_client("python", tmp_path, running.grpc, topic=NAME, group=NAME),
    ):

        def consumers() -> list[str]:
            found = rest.get("/clients", params={"group": NAME}).raise_for_status().json()
            assert found["clients"]
            return [each["clientId"] for each in found["clients"]]

        consumer_id = eventually(consumers)[0]
        planned = tidemill(running, "topic", "delete", NAME, "--dry-run")
        assert "these clients use it, and their requests fail afterwards: " in planned.stderr
        assert consumer_id in planned.stderr
        for kind in ("topics", "groups"):
            deleted = rest.delete(f"/{kind}/{NAME}").raise_for_status().json()
            assert consumer_id in deleted["clients"]
        late = service.SendMessageRequest(messages=[message_of(NAME, b"late")])
        sent = PullClient(channel).stub.SendMessage(late, metadata=METADATA, timeout=TIMEOUT_S)
        assert sent.status.code == v2.TOPIC_NOT_FOUND
        assert "an operator can: tidemill topic create deleted" in sent.status.message
        refused = rest.post(f"/topics/{NAME}/messages", json={"body": "late"})
        assert refused.status_code == 404
        # The consumer has polled again since: its poll cannot create them either.
        for kind in ("topics", "groups"):
            assert rest.get(f"/{kind}/{NAME}").status_code == 404
        running.put(f"topics/{NAME}", **TOPIC)
        running.put(f"groups/{NAME}", **GROUP)
        assert running.get(f"topics/{NAME}")["messageType"] == "FIFO"
        assert running.get(f"groups/{NAME}")["deliveryOrder"] == "FIFO"
