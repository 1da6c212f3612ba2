"""Archived and then verified by one run, whatever kept a part from being archived."""

from __future__ import annotations

import itertools
import subprocess

import pytest

from tests.support.processes.processes import command, environment
from tests.support.worlds.archiving import ArchiveWorld
from tests.support.worlds.fake_cluster import FakeCluster
from tidemill_pipeline.commands.shared import EXIT_DAMAGED
from tidemill_pipeline.errors import BadOption, NoAnswer
from tidemill_pipeline.jobs.archive import ArchiveJob, ArchiveProgress
from tidemill_pipeline.jobs.archive_commands import ArchiveRound, append_once

GATE = "archive"
RUN_S = 600.0  # for a job on Spark; only a test that fails waits for so long


def run_once(job: ArchiveJob) -> ArchiveRound:
    return append_once(job, lambda _: None, then_verify=True)


def test_existing_messages_are_sealed_and_released_after_a_broker_group_was_removed(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    for broker in ("a", "b"):
        cluster.add("orders", broker, 0, 10)
    assert run_once(archive.job(gate_group=GATE)).done.wrong == ()
    cluster.remove("b")
    cluster.add("orders", "a", 0, 10)
    appended = run_once(archive.job(gate_group=GATE))
    assert not appended.done.is_over_allowed, "status 1"
    assert archive.sealed() == [("orders", 20, 20), ("orders", 10, 10)]
    assert [each.pull_offset for each in cluster.brokers["a"].progress] == [20]


def test_a_failed_append_does_not_prevent_sealing(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    cluster.add("orders", "a", 0, 10)
    archive.append()
    job = archive.job(topicPattern="", topics="orders,nosuch")
    with pytest.raises(BadOption, match="there is no topic nosuch"):
        job.append()
    appended = run_once(job)
    assert "there is no topic nosuch" in appended.done.wrong[0]
    assert isinstance(appended.ended_by, BadOption), "who goes on ends with it"
    assert appended.verified is not None
    assert archive.sealed() == [("orders", 10, 10)]


def test_without_an_archive_or_an_answer_nothing_is_verified(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    assert run_once(archive.job()).verified is None
    with pytest.raises(BadOption, match="there is no topic nosuch"):
        run_once(archive.job(topicPattern="", topics="nosuch"))
    cluster.add("orders", "a", 0, 10)
    archive.append()
    cluster.brokers["a"].error = "it is away"
    with pytest.raises(NoAnswer):
        run_once(archive.job())


def test_closed_queues_are_reported_although_the_verification_failed(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    for topic in ("orders", "payments"):
        cluster.add(topic, "a", 0, 10)
    archive.append()
    cluster.delete("orders")
    looks = itertools.count(1)

    def look() -> None:
        if next(looks) == 2:  # The verification's.
            cluster.brokers["a"].error = "it is away"

    cluster.on_look = look
    appended = run_once(archive.job())
    (over,) = appended.done.over
    assert "orders" in over
    assert "it is away" in appended.done.wrong[0]
    assert appended.verified is None


def test_closed_queues_are_reported_before_the_verification(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    cluster.add("orders", "a", 0, 10)
    cluster.add("payments", "a", 0, 10)
    archive.append()
    cluster.delete("orders")
    reports: list[ArchiveProgress] = []

    def ending(done: ArchiveProgress) -> None:
        reports.append(done)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        append_once(archive.job(), lambda _: None, ending, then_verify=True)
    assert "orders" in reports[0].over[0]
    assert archive.sealed() == [("orders", 0, 10), ("payments", 0, 10)], "it was not verified yet"


@pytest.mark.large
def test_the_command_ends_with_the_worse_status(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    for topic in ("orders", "payments"):
        cluster.add(topic, "a", 0, 10)
    cluster.brokers["a"].queues["orders", 0].messages[5] = None
    line = f"pipeline archive --to {archive.path} --endpoints {cluster.endpoint} --then-verify"
    done = subprocess.run(
        command(*line.split(), "--master", "local[2]", "--gate", GATE),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == EXIT_DAMAGED, output
    assert "offsets from 5 to 6 were lost before they were archived" in done.stdout
    assert archive.sealed() == [("payments", 10, 10)]
    assert {each.topic: each.pull_offset for each in cluster.brokers["a"].progress} == {
        "orders": 0,
        "payments": 10,
    }
