"""Wildcards in names of topics, and dead letters in archives. Without a Spark session."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from tests.support.worlds.archiving import ArchiveWorld
from tests.support.worlds.fake_cluster import FakeCluster
from tests.support.worlds.micro_batches import Stream, read_batch
from tidemill_pipeline.cli import app
from tidemill_pipeline.jobs.archive_commands import omitted_text
from tidemill_pipeline.options import TopicSelection, parse_source

TOPICS = ("orders", "order", "others", "a.b", "%DLQ%billing", "%DLQ%shipping", "%RETRY%g%t")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["orders"], {"orders"}),
        (["o*"], {"orders", "order", "others"}),
        (["*s"], {"orders", "others"}),
        (["*"], {"orders", "order", "others", "a.b"}),
        (["%DLQ%*"], {"%DLQ%billing", "%DLQ%shipping"}),
        (["%DLQ%*", "orders"], {"orders", "%DLQ%billing", "%DLQ%shipping"}),
        (["*", "%DLQ%*"], {"orders", "order", "others", "a.b", "%DLQ%billing", "%DLQ%shipping"}),
        (["a.*", "%DLQ%b*"], {"a.b", "%DLQ%billing"}),
        (["aXb", "a?b", "a+"], set()),
    ],
)
def test_a_wildcard_is_any_text_of_a_name(names: list[str], expected: set[str]) -> None:
    selection = TopicSelection.of(names)
    assert {topic for topic in TOPICS if selection.have(topic)} == expected


@pytest.mark.parametrize(
    ("topics", "rows"), [("orders,%DLQ%*", 5), ("*,%DLQ%*", 9), ("o*", 2), ("%DLQ%b*", 1)]
)
def test_reads_select_topics_by_wildcards(cluster: FakeCluster, topics: str, rows: int) -> None:
    fill(cluster)
    assert len(read_batch(cluster, topics=topics)) == rows
    assert len(Stream(cluster, topics=topics).run()) == rows


def fill(cluster: FakeCluster) -> None:
    """Add six messages of two topics and three dead letters of two consumer groups."""
    for topic, count in (("orders", 2), ("bills", 4), ("%DLQ%billing", 1), ("%DLQ%shipping", 2)):
        cluster.add(topic, "a", 0, count)


def test_alternatives_of_a_namespace_exclude_other_namespaces(cluster: FakeCluster) -> None:
    for topic in ("shop%orders", "lab%orders", "orders", "%DLQ%shop%billing", "%DLQ%lab%billing"):
        cluster.add(topic, "a", 0, 1)
    given = {"namespace": "shop", "topics": "*,%DLQ%*"}
    assert {row["topic"] for row in read_batch(cluster, **given)} == {"orders", "%DLQ%billing"}
    pattern = {"namespace": "shop", "topicPattern": "%DLQ%billing|orders"}
    assert {row["topic"] for row in read_batch(cluster, **pattern)} == {"orders", "%DLQ%billing"}


def test_dead_letters_are_archived_and_verified_by_name(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    fill(cluster)
    assert archive.append().rows == 6
    everything = {"topicPattern": "", "topics": "*,%DLQ%*"}
    assert archive.job(**everything).append().rows == 3
    assert not archive.verify().wrong
    assert {topic for topic, _, _ in archive.sealed()} == {
        "orders",
        "bills",
        "%DLQ%billing",
        "%DLQ%shipping",
    }
    rows = archive.read(topic="", topics="%DLQ%*", readMode="archive")
    assert len(rows) == 3


def test_an_archive_of_all_topics_names_the_dead_letters_that_it_leaves_out(
    cluster: FakeCluster,
) -> None:
    def text(**chosen: str) -> str:
        return omitted_text(
            parse_source({"endpoints": cluster.endpoint, **chosen}, is_stream=False)
        )

    assert text(topicPattern=".*") == ""
    fill(cluster)
    cluster.create("%DLQ%empty")
    sentence = (
        "left out: 3 dead letters of %DLQ%billing, %DLQ%shipping. Archive them, too, with --topic"
        " '*' --topic '%DLQ%*'"
    )
    assert text(topicPattern=".*") == text(topics="*") == sentence
    assert text(topics="*,%DLQ%billing").startswith("left out: 2 dead letters of %DLQ%shipping.")
    assert text(topics="*,%DLQ%*") == text(topic="orders") == text(topicPattern="o.*") == ""


def test_an_expiry_of_some_topics_never_takes_the_others(
    cluster: FakeCluster, archive: ArchiveWorld
) -> None:
    fill(cluster)
    archive.job(topicPattern="", topics="*,%DLQ%*").append()

    def expire(*options: str) -> str:
        line = ["archive-expire", "--to", archive.path, "--days", "0", *options]
        return CliRunner().invoke(app, [*line, "--dry-run"]).output

    assert "2 files with 3 messages of %DLQ%billing, %DLQ%shipping," in expire("-t", "%DLQ%*")
    assert "1 files with 2 messages of orders," in expire("-t", "o*")
    assert "1 files with 2 messages of orders," in expire("-O", "topicPattern=ord.*")
    assert "the archive has no topic that matches b\\-.*" in expire("-t", "b-*")
    assert "4 files with 9 messages" in expire()
