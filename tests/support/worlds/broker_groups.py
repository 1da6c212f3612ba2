"""The broker groups of an admin process, with fake clients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from tests.support.worlds.fake_calls import CallsByRequest
from tidemill.admin.audit.author import Author
from tidemill.admin.cluster.brokers import BrokerGroupClient, Brokers
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

AUTHOR = cast("Author", SimpleNamespace(of=lambda _resource: pb.ChangeAuthor(user="me")))
_NO_CONNECTION = cast("Any", None)  # the list of members is known, so no client is opened


def cluster_of(*groups: CallsByRequest) -> Brokers:
    """Return the broker groups broker-0, broker-1 and so on."""
    brokers = Brokers([], _NO_CONNECTION, timeout_ms=30_000)
    brokers._members = [
        BrokerGroupClient(f"broker-{n}", f"at:{n}", n == 0, False, cast("Any", one), 0, "")
        for n, one in enumerate(groups)
    ]
    brokers._refreshed_at_s = float("inf")
    return brokers
