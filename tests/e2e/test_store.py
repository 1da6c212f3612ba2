"""`tidemill store` on the folder of a real standalone, live and stopped."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
from pathlib import Path

import pytest

from tests.support.clients.history import History, Outcome
from tests.support.clients.load import Load
from tests.support.processes.processes import Standalone, command, environment, standalone
from tidemill.common.exit_codes import EXIT_PROBLEM

TOPIC = "orders"
GROUP = "billing"
RUN_S = 60  # Far more than a command needs.
DRAIN_S = 60
SENT_MIN = 300  # Messages before the copy begins.


def tidemill(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("store", *arguments),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )


def as_of_now(history: History) -> History:
    """Return a snapshot of a history. The result of a call in flight is unknown."""
    known = History()
    for send in history.sends.values():
        known.send(send.key).outcome = send.outcome
    for ack in history.acks:
        again = known.ack(ack.key)
        if ack.outcome is not Outcome.UNKNOWN:
            again.ended(ack.outcome)
    return known


def add_unknown(known: History, later: History) -> None:
    """Add the calls since the snapshot: the copy may or may not have their effects."""
    for key in later.sends.keys() - known.sends.keys():
        known.send(key)
    for ack in later.acks[len(known.acks) :]:
        known.ack(ack.key)


async def copy_under_load(
    load: Load, data: Path, target: Path
) -> tuple[subprocess.CompletedProcess[str], History]:
    """Copy while messages are sent and acked; return the history at the start of the copy."""
    loop = asyncio.get_running_loop()
    run = loop.create_task(load.run(producers=4, consumers=2, stop=asyncio.Event()))
    while load.sent_ok < SENT_MIN or load.acked_ok < SENT_MIN // 3:  # noqa: ASYNC110  # No event.
        await asyncio.sleep(0.01)
    known = as_of_now(load.history)
    copied = await loop.run_in_executor(None, tidemill, "copy", data, target)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    add_unknown(known, load.history)
    return copied, known


async def drain(running: Standalone, history: History) -> None:
    """Receive and ack all messages."""
    stop = asyncio.Event()
    stop.set()
    load = Load(running.grpc, TOPIC, GROUP, random.Random(2), history=history)
    await asyncio.wait_for(load.run(producers=1, consumers=2, stop=stop), DRAIN_S)


@pytest.mark.heavy
def test_a_copy_under_load_is_a_store_that_serves_all_that_was_answered(tmp_path: Path) -> None:
    data, target = tmp_path / "data", tmp_path / "copies" / "monday"
    with standalone(data) as running:
        running.put(f"groups/{GROUP}", maxAttempts=1000)
        load = Load(running.grpc, TOPIC, GROUP, random.Random(1))
        copied, history = asyncio.run(copy_under_load(load, data, target))
        assert copied.returncode == 0, copied.stderr
        assert copied.stdout.startswith("copied ")
        live = tidemill("check", data)
        assert live.returncode == 0, live.stdout + live.stderr
    checked = tidemill("check", target, "-o", "json")
    assert (checked.returncode, json.loads(checked.stdout)["state"]) == (0, "sound")
    with standalone(target) as restored:
        asyncio.run(drain(restored, history))
        recovered = restored.log.read_text()
    verdict = history.judge()
    assert verdict.is_clean, str(verdict)
    assert "store recovered" in recovered


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a stopped store and a copy of it."""
    folder = tmp_path_factory.mktemp("store")
    with standalone(folder / "data") as running:
        running.put(f"topics/{TOPIC}", queues=1)
        for n in range(3):
            sent = subprocess.run(
                command("message", "send", TOPIC, f"body {n}", "--admin", running.admin),
                env=environment(),
                capture_output=True,
                timeout=RUN_S,
                check=False,
            )
            assert sent.returncode == 0, sent.stderr
    assert tidemill("copy", folder / "data", folder / "backup").returncode == 0
    return folder


def test_a_check_reports_damage_and_a_mend_restores_it_from_a_copy(
    stopped: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    assert tidemill("copy", stopped / "data", data).returncode == 0
    (log,) = (data / "log").iterdir()
    sound = log.read_bytes()
    at = sound.index(b"body 1") + 2
    with log.open("r+b") as file:
        file.seek(at)
        file.write(b"?")
    found = tidemill("check", data)
    assert found.returncode == EXIT_PROBLEM
    for text in (log.name, "kind MESSAGE", f"topic {TOPIC}, queue 0, offset 1", "remedy"):
        assert text in found.stdout, text
    (finding,) = json.loads(tidemill("check", data, "--output=json").stdout)["findings"]
    assert (finding["damage"], finding["concerns"][0]["queueOffset"]) == ("record", 1)
    assert tidemill("mend", data).returncode == 1
    dry = tidemill("mend", data, "--from", stopped / "backup", "--dry-run")
    assert (dry.returncode, "would be mended" in dry.stdout) == (0, True)
    assert log.read_bytes() != sound
    assert tidemill("mend", data, "--from", stopped / "backup").returncode == 0
    assert log.read_bytes() == sound
    # A mend deletes the derived files, which a broker may have derived from the damaged log.
    checked = tidemill("check", data, "--output=json")
    assert checked.returncode == 0
    report = json.loads(checked.stdout)
    assert (report["state"], report["findings"]) == ("sound", [])
    assert {one["file"].partition("/")[0] for one in report["notes"]} == {"queues", "index"}
    assert all(one["remedy"].startswith("None needed") for one in report["notes"])
    assert "note: queues/" in tidemill("check", data).stdout
    with standalone(data):
        pass
    assert json.loads(tidemill("check", data, "--output=json").stdout)["notes"] == []


def test_a_check_writes_nothing(stopped: Path) -> None:
    def state() -> dict[Path, tuple[int, int]]:
        files = [path for path in stopped.rglob("*") if path.is_file()]
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in files}

    before = state()
    assert tidemill("check", stopped / "data").returncode == 0
    assert state() == before


def test_an_impossible_command_exits_with_2_and_the_reason(stopped: Path, tmp_path: Path) -> None:
    data = stopped / "data"
    empty = tmp_path / "empty"
    empty.mkdir()
    for arguments, text in (
        (("check", tmp_path / "none"), "is not a folder"),
        (("check", empty), "there is no store"),
        (("copy", data, stopped / "backup"), "is not empty"),
        (("copy", data, data / "inside"), "is inside of"),
        (("mend", data, "--from", data), "is the store itself"),
        (("mend", data, "--from", tmp_path / "none"), "is not a folder"),
    ):
        refused = tidemill(*arguments)
        assert (refused.returncode, refused.stdout) == (2, ""), arguments
        assert text in refused.stderr, arguments
    assert not (data / "inside").exists()


def test_a_rebuild_rejects_the_store_of_a_running_broker(tmp_path: Path) -> None:
    with standalone(tmp_path / "data"):
        refused = tidemill("mend", tmp_path / "data")
    assert refused.returncode == 2
    assert "in use by another broker" in refused.stderr


def test_a_store_is_deleted_after_a_confirmation(stopped: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    assert tidemill("copy", stopped / "data", data).returncode == 0
    dry = tidemill("delete", data, "--dry-run")
    assert (dry.returncode, "would be deleted" in dry.stdout) == (0, True)
    asked = tidemill("delete", data)
    assert (asked.returncode, "add --yes" in asked.stderr) == (2, True)
    assert tidemill("check", data).returncode == 0
    assert tidemill("delete", data, "--yes").returncode == 0
    assert not data.exists()


def test_a_folder_in_use_or_without_a_store_is_not_deleted(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "letter").write_text("dear reader")
    refused = tidemill("delete", other, "--yes")
    assert (refused.returncode, (other / "letter").exists()) == (2, True)
    assert "is not the data directory of a broker" in refused.stderr
    with standalone(tmp_path / "data") as running:
        refused = tidemill("delete", tmp_path / "data", "--yes")
        assert (refused.returncode, "in use by another broker" in refused.stderr) == (2, True)
        running.put(f"topics/{TOPIC}", queues=1)
