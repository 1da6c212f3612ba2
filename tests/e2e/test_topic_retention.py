"""Retention per topic at two broker groups, by the command line, REST and an official client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from tests.support.clients.client_process import run_python_client
from tests.support.clients.commands import tidemill
from tests.support.eventually import eventually
from tests.support.processes.processes import ADMIN_S, LARGEST_MESSAGES, Standalone, standalone

MIB = 1 << 20


def stored(running: Standalone, topic: str) -> int:
    queues = running.get(f"topics/{topic}")["queueStatus"]
    return sum(one["maxOffset"] - one["minOffset"] for one in queues)


def done(running: Standalone, *arguments: str) -> str:
    result = tidemill(running, "topic", *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_topics_lose_messages_by_their_own_rules(tmp_path: Path) -> None:
    with standalone(tmp_path / "data", "--groups=2", LARGEST_MESSAGES) as running:
        eventually(lambda: len(running.get("broker-groups")["items"]) == 2)
        # The members must have reported their feature level.
        eventually(
            lambda: (
                tidemill(running, "topic", "create", "round", "--retention-acked=free").returncode
                == 0
            )
        )
        assert "until all consumer groups have settled them" in done(running, "show", "round")
        facts = run_python_client(
            tmp_path, "round_trip", running.grpc, topic="round", group="round"
        )
        assert len(facts.of("received")) == 8
        check_sizes(running)
        check_settings(running)
        eventually(lambda: stored(running, "round") == 0)


def check_sizes(running: Standalone) -> None:
    """Send more than the topic may keep."""
    running.put("topics/large", messageType="NORMAL", queues=1, retention={"bytes": MIB})
    with httpx.Client(trust_env=False, timeout=ADMIN_S) as client:
        for n in range(60):
            path = f"{running.admin}/api/v1/topics/large/messages"
            client.post(path, json={"body": f"{n}" + "x" * 100_000}).raise_for_status()
    # Each broker group keeps about ten of them.
    eventually(lambda: 0 < stored(running, "large") <= 24)


def put_dry(running: Standalone, topic: str, **retention: int) -> dict[str, Any]:
    url = f"{running.admin}/api/v1/topics/{topic}?dryRun=true"
    with httpx.Client(trust_env=False, timeout=ADMIN_S) as client:
        answer = client.put(url, json={"retention": retention}).raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def check_settings(running: Standalone) -> None:
    """Change and clear settings by both interfaces."""

    def retention(topic: str) -> dict[str, Any]:
        found: dict[str, Any] = running.get(f"topics/{topic}").get("retention", {})
        return found

    line = "topic", "set", "large", "--retention=30d", "--retention-bytes=2MiB"
    refused = tidemill(running, *line)
    assert refused.returncode == 2
    assert "topic set with a shorter retention needs a confirmation" in refused.stderr
    changed = done(running, *line[1:], "--yes")
    assert "for 30 d 0 h, up to 2.0 MiB per broker group" in changed
    assert retention("large") == {"ms": 30 * 86_400_000, "bytes": 2 * MIB}
    done(running, "set", "large", "--retention=forever", "--retention-bytes=default")
    assert retention("large") == {"ms": -1}
    running.put("topics/large", retention={"ms": None})
    assert retention("large") == {}
    planned = put_dry(running, "large", ms=60_000)
    assert planned["expiredMessages"] == 0, "all messages are younger than a minute"
    assert "expiredMessages" not in put_dry(running, "large", ms=-1)
    done(running, "set", "%DLQ%round", "--retention=90d", "--yes")
    assert retention("%DLQ%round") == {"ms": 90 * 86_400_000}
    assert tidemill(running, "topic", "set", "missing", "--retention=1d").returncode == 1
    assert tidemill(running, "topic", "set", "large", "--retention=59s").returncode == 1
    assert tidemill(running, "topic", "set", "large", "--retention-bytes=5").returncode == 2
