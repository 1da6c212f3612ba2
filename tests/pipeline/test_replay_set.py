"""J7 with `--set`: allowed columns, and errors that the job reports before it sends."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from tests.support.worlds.archiving import NOW_MS, ArchiveWorld
from tests.support.worlds.fake_cluster import FakeCluster
from tests.support.worlds.replaying import FIRST_MS, breaks_off, replaying, stored
from tidemill.common.exit_codes import EXIT_USAGE
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill_pipeline.cli import app
from tidemill_pipeline.errors import BadOption
from tidemill_pipeline.jobs import replay
from tidemill_pipeline.transforms.replay import (
    ORIGINAL_GROUP,
    ORIGINAL_ID,
    ORIGINAL_PLACE,
    ReplaySchedule,
    to_send,
)
from tidemill_pipeline.transforms.setting import SETTABLE

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

# Log line of gRPC's own threads when a server of an earlier test stops: level, date, time.
OF_GRPC = re.compile(r"[IWE]\d{4} \d\d:")
TIMING = ReplaySchedule(first_stored_ms=FIRST_MS, begin_ms=1_900_000_000_000)


def sent(
    spark: SparkSession,
    given: dict[str, Any],
    timing: ReplaySchedule | None = None,
    **expressions: str,
) -> Row:
    """Return the message that a replay of one message sends."""
    (row,) = to_send(stored(spark, given), timing, expressions).collect()
    return row


def test_each_expression_sees_the_message_as_it_is_archived(spark: SparkSession) -> None:
    row = sent(
        spark,
        {"tag": "t", "keys": ["k"], "properties": {"email": "e", "own": "1"}},
        body="concat(tag, '-', keys[0])",
        tag="properties['email']",
        keys="array(tag, message_id)",
        properties="map_filter(properties, (k, v) -> k <> 'email')",
    )
    assert (row.body, row.tag, row["keys"]) == ("t-k", "e", ["t", "m0"])
    assert row.properties == {"own": "1", ORIGINAL_ID: "m0", ORIGINAL_PLACE: "orders/a/1/0"}


@pytest.mark.parametrize("nothing", ["null", "map()", "map('tidemill-original-id', 'another')"])
def test_the_first_id_stays_whatever_is_set(spark: SparkSession, nothing: str) -> None:
    """Also with `null` instead of a map, and for a message that was replayed before."""
    row = sent(spark, {"properties": {ORIGINAL_ID: "FIRST"}}, properties=nothing)
    assert row.properties == {ORIGINAL_ID: "FIRST", ORIGINAL_PLACE: "orders/a/1/0"}
    row = sent(spark, {}, properties=nothing)
    assert row.properties[ORIGINAL_ID] == "m0"


def test_nothing_is_any_type(spark: SparkSession) -> None:
    row = sent(spark, {"tag": "t", "keys": ["k"]}, tag="null", keys="array()")
    assert (row.tag, row["keys"]) == (None, [])


def test_a_message_group_is_masked_wherever_it_is_kept(spark: SparkSession) -> None:
    before = {"message_group": "g", "properties": {ORIGINAL_GROUP: "g"}}
    without = "map_filter(properties, (k, v) -> v <> 'g')"
    assert sent(spark, before, message_group="'h'").message_group == "h"
    assert sent(spark, before, properties=without).properties.get(ORIGINAL_GROUP) is None
    row = sent(spark, before, TIMING, message_group="'h'", properties=without)
    assert row.properties[ORIGINAL_GROUP] == "h"


def test_a_due_time_may_be_set_where_no_timing_says_it(spark: SparkSession) -> None:
    due = "if(tag = 'later', timestamp_millis(2000000000000), null)"
    later = sent(spark, {"tag": "later", "message_group": "g"}, due_timestamp=due)
    assert later.due_timestamp.timestamp() == 2_000_000_000
    assert (later.message_group, later.properties[ORIGINAL_GROUP]) == (None, "g")
    now = sent(spark, {"tag": "now", "message_group": "g"}, due_timestamp=due)
    assert (now.due_timestamp, now.message_group) == (None, "g")
    assert ORIGINAL_GROUP not in now.properties


@pytest.mark.parametrize(
    ("column", "text", "sentence"),
    [
        ("body", "sha2(bodi, 256)", "with name `bodi` cannot be resolved. Did you mean"),
        ("body", "sha2(body", "[PARSE_SYNTAX_ERROR] Syntax error at or near"),
        ("body", "nosuch(body)", "Cannot resolve routine `nosuch`"),
        ("body", "1", "column body is binary or string, and 1 is int"),
        ("tag", "body", "column tag is string, and body is binary"),
        ("keys", "map()", "column keys is array<string>, and map() is map<void,void>"),
        ("properties", "map(1, 2)", "column properties is map<string,string>, and"),
        # Expressions that return no row or several rows.
        ("tag", "explode(keys)", "column tag cannot be set to explode(keys): "),
        ("tag", "max(tag)", "column tag cannot be set to max(tag): "),
        ("tag", "lag(tag) over (order by tag)", "column tag cannot be set to lag(tag) over"),
        ("tag", "*", "column tag cannot be set to *: "),
    ],
)
def test_an_invalid_set_expression_fails_before_the_first_send(
    spark: SparkSession,
    cluster: FakeCluster,
    archive: ArchiveWorld,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    column: str,
    text: str,
    sentence: str,
) -> None:
    cluster.add("orders", "a", 0, 3)
    archive.append()
    settings = replaying(cluster, archive, tmp_path / "s", expressions={column: text})
    for do in (replay.look, lambda *given: replay.send(*given, now_ms=lambda: NOW_MS)):
        with pytest.raises(BadOption) as error:
            do(spark, settings)
        assert sentence in str(error.value)
        assert "\n" not in str(error.value)
    assert cluster.sent == []
    assert not (tmp_path / "s").exists()
    said = capfd.readouterr().err.splitlines()
    assert [line for line in said if not OF_GRPC.match(line)] == [], "nothing but the sentence"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--set bodi=1", "there is no column bodi; did you mean body? Of messages those that can"),
        ("--set message_id=1", "column message_id cannot be set, because it describes the archive"),
        ("--set queue_offset=1", "those that can be are body, tag, keys, message_group, prop"),
        ("--set due_timestamp=now() --timing original", "--timing original sets the due time"),
        ("--set body", "--set body is not COLUMN=SQL"),
        ("--set body=", "--set body= is not COLUMN=SQL"),
        ("--set body=1 --set body=2", "--set body is given twice"),
    ],
)
def test_columns_that_cannot_be_set_are_a_sentence_before_spark_is_started(
    cluster: FakeCluster, archive: ArchiveWorld, tmp_path: Path, options: str, sentence: str
) -> None:
    cluster.add("orders", "a", 0, 3)
    archive.append()
    line = f"--priority normal replay --from {archive.path} --into again --state {tmp_path / 's'}"
    done = CliRunner().invoke(app, [*line.split(), *options.split()])
    assert sentence in done.output
    assert done.exit_code == EXIT_USAGE
    assert not (tmp_path / "s").exists()


def pack(cluster: FakeCluster, text: bytes) -> None:
    message = v2.Message(topic=v2.Resource(name="orders"), body=gzip.compress(text))
    message.system_properties.message_id = "packed"
    message.system_properties.body_encoding = v2.GZIP
    cluster.put(message, "a")


def test_a_packed_body_is_unpacked_for_an_expression_alone(
    spark: SparkSession, cluster: FakeCluster, archive: ArchiveWorld, tmp_path: Path
) -> None:
    pack(cluster, b"plain")
    archive.append()
    sent = {}
    for name, expressions in {
        "seen": {"tag": "string(body)"},
        "set": {"body": "upper(string(body))"},
        "unread": {"body": "'constant'"},
        "untouched": {"tag": "'t'"},
    }.items():
        settings = replaying(cluster, archive, tmp_path / name, expressions=expressions)
        assert replay.send(spark, settings, now_ms=lambda: NOW_MS).sent == 1
        message = cluster.sent.pop()
        system = message.system_properties
        sent[name] = message.body, system.tag, v2.Encoding.Name(system.body_encoding)
    assert gzip.decompress(sent["untouched"][0]) == b"plain"
    assert sent == {
        "seen": (b"plain", "plain", "IDENTITY"),
        "set": (b"PLAIN", "", "IDENTITY"),
        "unread": (b"constant", "", "IDENTITY"),
        "untouched": (sent["untouched"][0], "t", "GZIP"),
    }


def test_a_continued_replay_keeps_its_set_expressions(
    spark: SparkSession, cluster: FakeCluster, archive: ArchiveWorld, tmp_path: Path
) -> None:
    cluster.add("orders", "a", 0, 5, tag="secret")
    archive.append()
    masked = replaying(cluster, archive, tmp_path / "s", expressions={"tag": "sha2(tag, 256)"})
    breaks_off(spark, cluster, masked, after=0)
    for others in ({}, {"tag": "upper(tag)"}):
        settings = replaying(cluster, archive, tmp_path / "s", expressions=others)
        with pytest.raises(BadOption, match="belongs to another replay; give the options"):
            replay.send(spark, settings, now_ms=lambda: NOW_MS)
    cluster.sent.clear()
    assert replay.send(spark, masked, now_ms=lambda: NOW_MS).sent == 5
    assert {len(each.system_properties.tag) for each in cluster.sent} == {64}


def test_a_replay_from_a_version_without_set_expressions_continues(
    spark: SparkSession, cluster: FakeCluster, archive: ArchiveWorld, tmp_path: Path
) -> None:
    cluster.add("orders", "a", 0, 5)
    archive.append()
    settings = replaying(cluster, archive, tmp_path / "s")
    breaks_off(spark, cluster, settings, after=0)
    plan = tmp_path / "s" / "plan.json"
    kept = json.loads(plan.read_text())
    del kept["asked"]["expressions"]
    plan.write_text(json.dumps(kept))
    masked = replaying(cluster, archive, tmp_path / "s", expressions={"tag": "'t'"})
    with pytest.raises(BadOption, match="belongs to another replay"):
        replay.send(spark, masked, now_ms=lambda: NOW_MS)
    assert replay.send(spark, settings, now_ms=lambda: NOW_MS).sent == 5


def test_a_dry_run_describes_the_changed_messages(
    spark: SparkSession, cluster: FakeCluster, archive: ArchiveWorld, tmp_path: Path
) -> None:
    cluster.add("orders", "a", 0, 3, tag="paid")
    cluster.add("orders", "a", 0, 2)
    archive.append()
    expressions = {
        "body": "if(queue_offset = 4, null, sha2(body, 256))",
        "tag": "upper(tag)",
        "keys": "keys",
        "properties": "map('tier', tag)",
    }
    looked = replay.look(
        spark, replaying(cluster, archive, tmp_path / "s", expressions=expressions)
    )
    found = {each.column: each for each in looked.effects}
    counts = {name: (each.changed, each.missing) for name, each in found.items()}
    assert counts == {"body": (5, 1), "tag": (3, 2), "keys": (0, 0), "properties": (5, 0)}
    assert (found["tag"].before, found["tag"].after) == ("paid", "PAID")
    assert found["properties"].after == '{"tier":"paid"}'
    assert found["body"].before == "orders/a/0/0".ljust(10, ".")
    assert len(found["body"].after or "") == 60
    assert (looked.plan.rows, cluster.sent) == (5, [])
    assert [each.sentences()[1:] for each in looked.effects] == [
        ["1 would have no body and are not sent"],
        ["2 would have none"],
        [],
        [],
    ]
    assert found["tag"].sentences()[:1] == ["tag would change in 3 of them: paid becomes PAID"]
    assert found["keys"].sentences() == ["keys would change in 0 of them"]


def test_a_failed_cast_of_a_value_is_a_short_error(
    spark: SparkSession, cluster: FakeCluster, archive: ArchiveWorld, tmp_path: Path
) -> None:
    cluster.add("orders", "a", 0, 3, tag="no number")
    archive.append()
    expressions = {"tag": "string(int(repeat(tag, 1000)) + 1)"}
    settings = replaying(cluster, archive, tmp_path / "s", expressions=expressions)
    for do in (replay.look, lambda *given: replay.send(*given, now_ms=lambda: NOW_MS)):
        with pytest.raises(
            BadOption, match=r"an expression failed for a message: \[CAST_INV"
        ) as error:
            do(spark, settings)
        assert len(str(error.value)) < 400
    assert cluster.sent == []


def test_settable_columns_are_the_sent_fields() -> None:
    from tidemill_pipeline.schema import MESSAGES
    from tidemill_pipeline.sink.messages import COLUMNS

    assert SETTABLE.items() <= COLUMNS.items()
    assert SETTABLE.keys() <= {column.name for column in MESSAGES}


def test_unsent_messages_are_counted_separately(
    spark: SparkSession, cluster: FakeCluster, archive: ArchiveWorld, tmp_path: Path
) -> None:
    cluster.add("orders", "a", 0, 3)
    archive.append()
    settings = replaying(
        cluster,
        archive,
        tmp_path / "s",
        expressions={"body": "if(queue_offset = 1, binary('spoil the call'), body)"},
        more={"onError": "dead-letter", "deadLetterPath": str(tmp_path / "bad")},
    )
    replayed = replay.send(spark, settings, now_ms=lambda: NOW_MS)
    assert (replayed.sent, replayed.bad) == (2, 1)
    assert len(cluster.sent) == 2
