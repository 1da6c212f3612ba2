"""What the commands say to wrong input, before Spark is started, and how they end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.eventually import eventually
from tests.support.processes.processes import command, descendants, environment, is_running
from tests.support.worlds.archiving import ArchiveWorld
from tests.support.worlds.fake_cluster import FakeCluster
from tidemill.common.exit_codes import EXIT_UNREACHABLE, EXIT_USAGE
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill_pipeline.cli import app
from tidemill_pipeline.commands.shared import (
    EXIT_DAMAGED,
    EXIT_FOUND,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    run_job,
)
from tidemill_pipeline.offsets import Offsets

EXAMPLE = Path(__file__).parents[2] / "examples" / "pipeline.py"
RUN_S = 600.0  # for a job on Spark; only a test that fails waits for so long
RIGHT = '{"message_id": "a", "topic": "t"}\n'
# Second lines of lists of sends, by the name of the list.
WRONG_SENDS = {
    "untold": '{"message_id": "b"}',
    "null": '{"message_id": "b", "topic": null}',
    "empty": '{"message_id": "b", "topic": ""}',
    "number": '{"message_id": "b", "topic": 5}',
    "list": '{"message_id": "b", "topic": ["t"]}',
    "half": '{"message_id": "b", "topic": "\\ud800"}',
    "halfid": '{"message_id": "\\ud800", "topic": "t"}',
    "deep": "[" * 100_000,
    "wide": '[["message_id", "b"]]',
    "true": '{"message_id": "b", "topic": "t", "at_ms": true}',
    "long": '{"message_id": "b", "topic": "t", "at_ms": 99999999999999999999}',
    "micros": '{"message_id": "b", "topic": "t", "at_ms": 1700000000000000}',
    "before": '{"message_id": "b", "topic": "t", "at_ms": -1}',
    "twice": '{"message_id": "b", "topic": "t", "topic": "u"}',
}


@pytest.fixture(autouse=True)
def as_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the commands leave the claim of this process to the processors as it is."""
    monkeypatch.setenv("TIDEMILL_PIPELINE_PRIORITY", "normal")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("archive-verify --to nosuch", "there is no archive at nosuch"),
        ("archive-compact --to nosuch", "there is no archive at nosuch"),
        ("archive-expire --to nosuch --days 1", "there is no archive at nosuch"),
        ("archive-vacuum --to nosuch", "there is no archive at nosuch"),
        ("replay --from nosuch --into t --state s", "there is no archive at nosuch"),
        ("replay --from nosuch --into t --state s --option bogus", "bogus is not name=value"),
        ("archive --to file", "file is not a folder"),
        ("archive-verify --to file", "file is not a folder"),
        ("archive-expire --to file --days 1", "file is not a folder"),
        ("archive-vacuum --to file", "file is not a folder"),
        ("archive --to a -O pulBatchSize=3", "pullBatchSize"),
        ("replay --from a --into t --state s --speed 3", "--speed 3 needs --timing scaled"),
        ("delay-accuracy --to a -O failOnDataLos=false", "failOnDataLoss"),
        ("archive --to a -O topic", "topic is not name=value"),
        ('audit --to a -O startingOffsets={"a":{"0":5}}', '{"TOPIC": {"BROKER-GROUP": {"QUEUE"'),
        ("audit --to a --sends nofile", "--sends nofile: file not found"),
        ("audit --to a --sends text", "--sends text, line 2: not a JSON object with a"),
        ("audit --to a --sends ids", "--sends ids, line 3: not a JSON object with a message_id"),
        ("audit --to a --sends times", "--sends times, line 1: at_ms is not an integer"),
        (
            "audit --to a --sends untold -t t",
            "--sends untold, line 2: topic is missing, which is required",
        ),
        (
            "audit --to a --sends null -t t,u",
            "--sends null, line 2: topic is missing, which is required",
        ),
        ("audit --to a --sends null --topic-pattern t.*", "--sends null, line 2: topic is missing"),
        ("audit --to a --sends empty -O topic=t", "--sends empty, line 2: topic is missing"),
        ("audit --to a --sends number", "--sends number, line 2: topic is not a text"),
        ("audit --to a --sends list", "--sends list, line 2: topic is not a text"),
        ("audit --to a --sends half", "--sends half, line 2: topic is not a text"),
        ("audit --to a --sends halfid", "--sends halfid, line 2: not a JSON object"),
        ("audit --to a --sends deep", "--sends deep, line 2: not a JSON object with a message_id"),
        ("audit --to a --sends wide", "--sends wide, line 2: not a JSON object with a message_id"),
        ("audit --to a --sends true", "--sends true, line 2: at_ms is not an integer"),
        ("audit --to a --sends long", "--sends long, line 2: at_ms is not an integer"),
        ("audit --to a --sends micros", "--sends micros, line 2: at_ms is not an integer"),
        ("audit --to a --sends before", "--sends before, line 2: at_ms is not an integer"),
        ("audit --to a --sends twice", "--sends twice, line 2: message_id, topic or at_ms occurs"),
        ("delay-accuracy --to a --baseline nobase", "no earlier run found at nobase"),
    ],
)
def test_wrong_input_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("text").write_text(f"{RIGHT}not json\n")
    Path("times").write_text('{"message_id": "a", "topic": "t", "at_ms": "noon"}\n')
    Path("ids").write_text(f'{RIGHT}\n{{"id": "x"}}\n')
    for name, wrong in WRONG_SENDS.items():
        Path(name).write_text(f"{RIGHT}{wrong}\n")
    done = CliRunner().invoke(app, line.split())
    assert sentence in done.output
    assert "Traceback" not in done.output
    assert done.exit_code == EXIT_USAGE
    assert not Path("nosuch").exists()


def test_a_window_is_a_duration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["audit", "--to", "a", "--window", "5 bananas"])
    assert "--window 5 bananas: give a duration" in done.output
    assert done.exit_code == EXIT_USAGE


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("to: [unclosed\n", "job.yaml cannot be read: while parsing"),
        ("- a\n", "job.yaml does not contain"),
        ("nonsense: 1\n", "job.yaml: this command has no option nonsense"),
        # Names as on the command line, and one of what there may be several of.
        ("from: nosuch\ninto: t\nstate: s\ntopic: orders\n", "there is no archive at nosuch"),
        ("from: nosuch\ninto: t\nstate: s\ndry_run: true\n", "there is no archive at nosuch"),
        (None, "job.yaml cannot be read: [Errno 2]"),
    ],
)
def test_a_file_of_options_is_read_or_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    if text is not None:
        Path("job.yaml").write_text(text)
    done = CliRunner().invoke(app, ["replay", "--config", "job.yaml"])
    assert sentence in done.output
    assert "Traceback" not in done.output
    assert done.exit_code != 0


def record_of(folder: Path) -> dict[str, Any]:
    """Return the record of the one run that a folder has."""
    (record,) = (folder / "_runs").iterdir()
    found: dict[str, Any] = json.loads(record.read_text())
    return found


def offsets_of(record: dict[str, Any], which: str) -> int:
    """Return where a run began to read its only queue, or ended."""
    (offset,) = Offsets.from_document(record["input_offsets"][which]).at.values()
    return offset


@pytest.mark.parametrize(
    ("by", "options", "sentence", "status"),
    [
        pytest.param(
            signal.SIGINT, "", "ended by Ctrl-C", EXIT_INTERRUPTED, marks=pytest.mark.heavy
        ),
        (signal.SIGTERM, "", "ended by SIGTERM", EXIT_TERMINATED),
        # While tasks run, of which the calls end with the JVM.
        (
            signal.SIGTERM,
            "--batch-rows 20 -O maxRatePerTask=5",
            "ended by SIGTERM",
            EXIT_TERMINATED,
        ),
    ],
)
def test_a_job_that_is_ended_says_so_in_a_sentence_and_in_its_record(
    cluster: FakeCluster,
    tmp_path: Path,
    by: signal.Signals,
    options: str,
    sentence: str,
    status: int,
) -> None:
    cluster.add("orders", "a", 0, 200 if options else 20)
    metrics = tmp_path / "metrics"
    line = (
        f"pipeline archive --to {tmp_path / 'a'} --endpoints {cluster.endpoint} --every 3600"
        f" --metrics-file {metrics} --cluster east {options}"
    )
    job = subprocess.Popen(
        command(*line.split(), "--master", "local[1]"),
        start_new_session=True,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stderr is not None
    lines = []
    try:
        for each in job.stderr:
            lines.append(each)
            if '"rows": 20' in each:
                if not options:
                    eventually(metrics.exists, within_ms=600_000)
                os.killpg(job.pid, by)  # The JVM, too, as a terminal and `timeout` do.
        assert job.wait(RUN_S) == status, lines
    finally:
        job.kill()
        job.wait()
        job.stderr.close()
    assert lines[-1] == f"error: {sentence}: start it again, and it goes on where it was\n"
    assert not any("Traceback" in each for each in lines)
    record = record_of(tmp_path / "a")
    assert record["status"].startswith("failed: ")
    assert offsets_of(record, "start") == 0
    assert offsets_of(record, "end") >= record["rows"] >= 20
    if not options:
        counted = r'rows_total\{cluster="east",.*topic="orders".*\} 20\.0'
        assert re.search(counted, metrics.read_text())


def javas_of(job: int) -> list[int]:
    """Return the processes below a job that are Spark's JVM by now."""
    found = []
    for pid in descendants(job):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            # Not the one that finds out how it is to be started.
            is_java = words[0].endswith(b"java") and b"org.apache.spark.launcher.Main" not in words
            if is_java and b"org.apache.spark.deploy.SparkSubmit" in words:
                found.append(pid)
    return found


def test_a_job_that_is_ended_while_spark_starts_does_not_wait_for_it(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    """Java stands still, so who waits for the start waits for ever."""
    line = f"pipeline archive --to {tmp_path / 'a'} --endpoints {cluster.endpoint}"
    job = subprocess.Popen(
        command(*line.split(), "--master", "local[1]"),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    javas: list[int] = []

    def has_java() -> bool:
        javas[:] = javas_of(job.pid)
        return bool(javas)

    try:
        eventually(has_java, within_ms=600_000)
        for java in javas:
            os.kill(java, signal.SIGSTOP)
        job.terminate()
        job.wait(RUN_S)
    finally:
        job.kill()
        for java in javas:
            with contextlib.suppress(ProcessLookupError):
                os.kill(java, signal.SIGCONT)
        _, output = job.communicate()
    assert job.returncode == EXIT_TERMINATED, output
    assert output.splitlines()[-1].startswith("error: ended by SIGTERM: start it again")
    assert "Traceback" not in output
    assert record_of(tmp_path / "a")["status"] == "failed: Termination"
    eventually(lambda: not any(map(is_running, javas)), within_ms=60_000)


def test_a_command_that_is_ended_while_it_loads_a_job_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slow_to_load.py").write_text("import signal; signal.raise_signal(signal.SIGTERM)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        run_job("slow_to_load", lambda _: None)
    assert ended.value.code == EXIT_TERMINATED
    assert "ended by SIGTERM" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("by", "is_whole_group"),
    [
        (signal.SIGTERM, True),
        pytest.param(signal.SIGTERM, False, marks=pytest.mark.heavy),
        pytest.param(signal.SIGINT, True, marks=pytest.mark.heavy),
    ],
)
def test_a_replay_that_is_ended_sends_no_more(
    cluster: FakeCluster,
    archive: ArchiveWorld,
    tmp_path: Path,
    by: signal.Signals,
    *,
    is_whole_group: bool,
) -> None:
    cluster.add("orders", "a", 0, 3000)
    cluster.add("again", "a", 0, 1)
    archive.job(batch_rows=5000, task_rows=5000, topicPattern="", topic="orders").append()
    line = f"pipeline replay --from {archive.path} --into again --state {tmp_path / 's'}"
    slowly = "--option maxRatePerTask=50 --option BATCHSIZE=5 --master local[1]"
    job = subprocess.Popen(
        command(*line.split(), *slowly.split(), "--endpoints", cluster.endpoint),
        start_new_session=True,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        eventually(lambda: len(cluster.sent) >= 30, within_ms=600_000)
        (os.killpg if is_whole_group else os.kill)(job.pid, by)
        _, output = job.communicate(timeout=RUN_S)
    finally:
        job.kill()
        job.wait()
    is_terminated = by == signal.SIGTERM
    assert job.returncode == (EXIT_TERMINATED if is_terminated else EXIT_INTERRUPTED), output
    assert len(cluster.sent) < 3000
    assert "Traceback" not in output
    record = record_of(tmp_path / "s")
    assert record["status"].startswith("failed: ")
    # Of its only batch nothing is through.
    assert record["input_offsets"] == {}


def run_command(line: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(line, env=environment(), capture_output=True, timeout=RUN_S, check=False)


@pytest.mark.heavy
def test_jobs_leave_their_metrics_and_the_example_runs(
    cluster: FakeCluster, archive: ArchiveWorld, tmp_path: Path
) -> None:
    """Two jobs run at a time: Spark starts a Python process again if it is later than 10 s."""
    cluster.add("orders", "a", 0, 30)
    archive.append()
    cluster.create("again")
    fired = pb.Event(
        kind=pb.EVENT_KIND_FIRED, topic="orders", timer_id=1, at_ms=1_000, due_at_ms=990
    )
    cluster.add_events("a", fired)
    at = f"--endpoints {cluster.endpoint}"
    lost = tmp_path / "sends.jsonl"
    lost.write_text('{"message_id": "lost", "topic": "orders", "at_ms": 1000}\n')
    lines = {
        "replay": f"--from {archive.path} --into again --state {tmp_path / 's'} --set tag='new'",
        "delay-accuracy": f"--to {tmp_path / 'd'}",
        "audit": f"--to {tmp_path / 'a'} --grace 0 --sends {lost}",
    }
    jobs = [
        command(
            "pipeline",
            job,
            *options.split(),
            *at.split(),
            "--metrics-file",
            tmp_path / f"{job}.prom",
            "--master",
            "local[1]",
            "-t",
            "orders",
        )
        for job, options in lines.items()
    ]
    example = [sys.executable, str(EXAMPLE), *at.split()]
    with ThreadPoolExecutor(2) as two_at_a_time:
        ended = list(two_at_a_time.map(run_command, (*jobs, example)))
    for each, expected in zip(ended, (0, 0, EXIT_FOUND, 0), strict=True):
        assert each.returncode == expected, each.stderr.decode()
    said = [(each.stdout, each.stderr) for each in ended]
    # No terminal, so of each batch there is a line of JSON.
    (batch,) = [line for line in said[0][1].decode().splitlines() if line.startswith("{")]
    assert json.loads(batch).items() >= {"event": "batch", "job": "replay", "rows": 30}.items()
    figures = {}
    for job in lines:
        found = re.search(r"rows_total\{(.*)\} (\d+)\.0", (tmp_path / f"{job}.prom").read_text())
        assert found is not None
        figures[job] = (f'work="{job}"' in found[1], found[2])
    assert figures == {"replay": (True, "30"), "delay-accuracy": (True, "1"), "audit": (True, "1")}
    head, row, *_, sentence = said[2][0].decode().rstrip().splitlines()
    counts = dict(zip(re.split("  +", head), row.split(), strict=True))
    # Of a topic's row nothing is of a group.
    shown_counts = {name: counts[name] for name in ("PRODUCED", "FIRED", "DELIVERED")}
    assert shown_counts == {"PRODUCED": "1", "FIRED": "1", "DELIVERED": "-"}
    assert sentence.startswith("missing: lost, orders: its send was acknowledged")
    assert "1 acknowledged sends were compared" in said[2][1].decode()
    assert "lost" in (tmp_path / "a" / "audit" / "index.html").read_text()
    assert {each.system_properties.tag for each in cluster.sent} == {"new"}
    sent = record_of(tmp_path / "s")
    assert [offsets_of(sent, which) for which in ("start", "end")] == [0, 30]
    measured = record_of(tmp_path / "d")["input_offsets"]
    assert 0 == measured["start"]["e"]["a"]["at"] < measured["end"]["e"]["a"]["at"]
    # Thirty messages without a tag, and one event.
    shown = said[-1][0].decode()
    assert "|NULL|30      |" in shown
    assert "|fired|" in shown
    assert re.search(r" WARN |log4j|log level", said[-1][1].decode()) is None, "of the start"


def test_archive_expire_affects_one_namespace(cluster: FakeCluster, archive: ArchiveWorld) -> None:
    cluster.add("orders", "a", 0, 5)
    archive.append()
    cluster.add("tenant%orders", "a", 0, 5)
    archive.job(namespace="tenant").append()
    line = f"archive-expire --to {archive.path} --days 1 -t orders"

    def left() -> dict[str, int]:
        return {key.namespace: queue.start for key, queue in archive.manifest().queues.items()}

    looked = CliRunner().invoke(app, [*line.split(), "--dry-run"])
    assert looked.output.startswith("1 files with 5 messages of orders, stored before 20")
    assert left() == {"": 0, "tenant": 0}
    assert CliRunner().invoke(app, [*line.split(), "-O", "namespace=tenant"]).exit_code == 0
    assert left() == {"": 0, "tenant": 5}
    assert CliRunner().invoke(app, line.split()).exit_code == 0
    assert left() == {"": 5, "tenant": 5}
    done = CliRunner().invoke(app, [*line.split(), "-O", "namespace=other"])
    assert "the archive has no topic orders" in done.output


@pytest.mark.large
def test_the_exit_status_distinguishes_damage_from_an_unreachable_cluster(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    cluster.add("orders", "a", 0, 20, body_size=500)
    archive.append()
    (path,) = archive.files()
    path.write_bytes(path.read_bytes()[:-100])

    def verified(endpoint: str) -> tuple[int, str]:
        line = f"pipeline archive-verify --to {archive.path} --endpoints {endpoint} -O maxRetries=0"
        done = subprocess.run(
            command(*line.split(), "--master", "local[2]"),
            env=environment(),
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    status, output = verified(cluster.endpoint)
    assert status == EXIT_DAMAGED, output
    assert path.name in output
    status, output = verified("127.0.0.1:1")
    assert status == EXIT_UNREACHABLE, output
    assert "no answer from 127.0.0.1:1" in output
