"""`tidemill store` on the folder of a standalone with several broker groups."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.support.eventually import eventually
from tests.support.processes.processes import ADMIN_S, Standalone, command, environment, standalone
from tidemill.common.exit_codes import EXIT_PROBLEM

TOPIC = "orders"
SENT = 12  # messages, each of a message group of its own: all broker groups have some
RUN_S = 180  # far more than a command takes
FLAGS = ("--groups=2", "--proxies=1")


def tidemill(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("store", *arguments),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )


def stored(running: Standalone) -> dict[str, int]:
    """Return how many messages each broker group has, once the admin process reaches all.

    A broker that has come back on another port is found there a moment later.
    """
    return eventually(lambda: _stored(running), within_ms=RUN_S * 1000)


def _stored(running: Standalone) -> dict[str, int]:
    with httpx.Client(trust_env=False, timeout=ADMIN_S) as rest:
        shown = rest.get(f"{running.admin}/api/v1/topics/{TOPIC}").raise_for_status().json()
    assert not shown.get("unreachable"), shown
    counts: dict[str, int] = {}
    for queue in shown["queueStatus"]:
        counts[queue["broker"]] = counts.get(queue["broker"], 0) + queue["maxOffset"]
    return counts


@pytest.fixture(scope="module")
def backup(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """Return a copy of two broker groups, made while they ran, and what each of them had."""
    folder = tmp_path_factory.mktemp("groups")
    with standalone(folder / "data", *FLAGS, start_s=RUN_S) as running:
        running.put(f"topics/{TOPIC}", messageType="FIFO", queues=2)
        with httpx.Client(trust_env=False, timeout=ADMIN_S) as rest:
            for n in range(SENT):
                sent = {"body": "b", "messageGroup": f"g{n}"}
                path = f"{running.admin}/api/v1/topics/{TOPIC}/messages"
                rest.post(path, json=sent).raise_for_status()
        counts = stored(running)
        copied = tidemill("copy", folder / "data", folder / "backup")
        assert copied.returncode == 0, copied.stderr
        # The home last: a restored home deletes at the others what it does not know of.
        assert [line.split(", to ")[1] for line in copied.stdout.splitlines()] == [
            str(folder / "backup" / "broker-1"),
            str(folder / "backup"),
        ]
    assert sum(counts.values()) == SENT
    assert len(counts) == 2
    return folder / "backup", counts


@pytest.mark.heavy
def test_a_copy_has_all_broker_groups_and_a_start_needs_all(
    backup: tuple[Path, dict[str, int]], tmp_path: Path
) -> None:
    target, counts = backup
    data = tmp_path / "data"
    assert tidemill("copy", target, data).returncode == 0
    alone = subprocess.run(
        command("standalone", f"--data-dir={data}", "--grpc-port=0", "--admin-port=0"),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert alone.returncode == 1
    assert "--groups 2" in alone.stderr
    with standalone(data, *FLAGS, start_s=RUN_S) as running:
        assert stored(running) == counts


def test_check_and_mend_handle_all_broker_groups(
    backup: tuple[Path, dict[str, int]], tmp_path: Path
) -> None:
    target, _ = backup
    data = tmp_path / "data"
    assert tidemill("copy", target, data).returncode == 0
    sound = tidemill("check", data)
    assert sound.returncode == 0, sound.stdout
    assert f"{data} is sound" in sound.stdout
    assert f"{data / 'broker-1'} is sound" in sound.stdout
    (log,) = (data / "broker-1" / "log").iterdir()
    content = log.read_bytes()
    with log.open("r+b") as file:
        file.seek(content.index(TOPIC.encode()) + 1)
        file.write(b"?")
    damaged = tidemill("check", data, "-o", "json")
    assert damaged.returncode == EXIT_PROBLEM
    states = {one["store"]: one["state"] for one in json.loads(damaged.stdout)["stores"]}
    assert states == {str(data): "sound", str(data / "broker-1"): "damaged"}
    assert tidemill("mend", data).returncode == 1
    mended = tidemill("mend", data, "--from", target)
    assert mended.returncode == 0, mended.stdout + mended.stderr
    assert f"{data / 'broker-1'}: mended" in mended.stdout
    assert log.read_bytes() == content


def test_a_copy_that_ended_between_two_broker_groups_does_not_start(
    backup: tuple[Path, dict[str, int]], tmp_path: Path
) -> None:
    target, _ = backup
    data = tmp_path / "data"
    (home_log,) = [one for one in (target / "log").iterdir() if one.is_file()]
    assert tidemill("copy", target, data).returncode == 0
    # As `broker-1` alone has been copied: the home's folder has the mark, and no segment.
    (data / "log" / home_log.name).rename(tmp_path / "kept")
    (data / "log" / "unfinished.copying").touch()
    started = subprocess.run(
        command("broker", f"--data-dir={data}", "--grpc-port=0", "--metrics-port=0"),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert started.returncode == 1
    assert "cannot be opened" in started.stderr


def test_an_unfinished_copy_leaves_its_mark(
    backup: tuple[Path, dict[str, int]], tmp_path: Path
) -> None:
    target, _ = backup
    data = tmp_path / "data"
    assert tidemill("copy", target, data).returncode == 0
    (log,) = (data / "log").iterdir()
    log.unlink()
    for snapshot in (data / "snapshots").glob("*"):
        snapshot.unlink()
    refused = tidemill("copy", data, tmp_path / "again")
    assert refused.returncode == 2
    assert (tmp_path / "again" / "log" / "unfinished.copying").exists()
