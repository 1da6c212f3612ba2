"""Broker groups are replaced in turn, and never while another one is away."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tidemill.release.rest import Rest, Unreachable
from tidemill.release.rolling import roll

SETS = ["mill-a", "mill-b"]


class Cluster:
    """StatefulSets of one replica with their pods, as their controller and kubelet treat them."""

    def __init__(self, *, budget_refuses: int = 0) -> None:
        self.revisions = {f"{name}-0": "old" for name in SETS}
        self.away: set[str] = set()
        self.evicted: list[str] = []
        self._budget_refuses = budget_refuses

    def api(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        name = path.rstrip("/").split("/")[7 if "apps" in path else 6]
        if "statefulsets" in path:
            status = {"updateRevision": "new", "observedGeneration": 3}
            metadata = {"name": name, "generation": 3}
            answer = {"metadata": metadata, "spec": {"replicas": 1}, "status": status}
            return httpx.Response(200, json=answer)
        if path.endswith("/eviction"):
            if self._budget_refuses:
                self._budget_refuses -= 1
                return httpx.Response(429)
            assert not self.away, "one is away already"
            self.evicted.append(name)
            self.away.add(name)
            self.revisions[name] = ""
            return httpx.Response(201, json={})
        revision = self.revisions[name]
        if not revision:
            # The next look finds the new pod, and the one after that finds it ready.
            self.revisions[name] = "new"
            return httpx.Response(404)
        is_ready = revision == "new" and name in self.away
        self.away.discard(name)
        conditions = [{"type": "Ready", "status": "True" if is_ready else "False"}]
        labels = {"controller-revision-hash": revision}
        answer = {"metadata": {"labels": labels}, "status": {"conditions": conditions}}
        return httpx.Response(200, json=answer)

    def rest(self, _request: httpx.Request) -> httpx.Response:
        items: list[dict[str, Any]] = [
            {"name": name, "reachable": f"{name}-0" not in self.away} for name in SETS
        ]
        return httpx.Response(200, json={"items": items})

    def roll(self, patience_s: float = 20.0) -> list[str]:
        said: list[str] = []
        api = httpx.Client(base_url="https://api", transport=httpx.MockTransport(self.api))
        rest = httpx.Client(base_url="http://admin", transport=httpx.MockTransport(self.rest))
        roll(api, "ns", SETS, Rest(rest, patience_s=patience_s), said.append)
        return said


def test_they_are_replaced_one_after_the_other() -> None:
    cluster = Cluster()
    assert cluster.roll() == ["replaced mill-a-0", "replaced mill-b-0"]
    assert cluster.evicted == ["mill-a-0", "mill-b-0"]


def test_what_is_as_it_should_be_stays() -> None:
    cluster = Cluster()
    cluster.revisions["mill-a-0"] = "new"
    assert cluster.roll() == ["replaced mill-b-0"]


def test_a_disruption_budget_is_waited_for() -> None:
    cluster = Cluster(budget_refuses=1)
    assert len(cluster.roll()) == 2


def test_none_is_replaced_while_another_is_away() -> None:
    cluster = Cluster()
    cluster.away.add("mill-b-0")
    with pytest.raises(Unreachable, match="waiting for mill-b"):
        cluster.roll(patience_s=0)
    assert cluster.evicted == []
