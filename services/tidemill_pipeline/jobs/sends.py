"""A list of acknowledged sends: JSON lines with `message_id`, `topic` and `at_ms`.

Whoever produces writes it, so that no loss can hide in what brokers tell. A line that is no such
send is refused, and by its number: a list of which a part is passed over proves nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeGuard

import pyarrow as pa

from tidemill_pipeline.errors import BadOption
from tidemill_pipeline.options import TopicSelection

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SENDS: Final = "message_id string, topic string, at_ms bigint"
BATCH_SENDS: Final = 100_000  # of a list of sends, held as Python's objects at once
YEAR_10000_MS: Final = 253_402_300_800_000  # microseconds of any time since 1978 are more
LINE_SHOWN: Final = 80  # bytes of a line that is wrong

# An object is a tuple of its pairs: one that says something twice can be told from others.
_JSON: Final = json.JSONDecoder(object_pairs_hook=tuple)
_HALF: Final = re.compile("[\ud800-\udfff]")  # of a character beyond 16 bits
_TOLD: Final = ("message_id", "topic", "at_ms")  # of a send: the columns of SENDS
_SEND: Final = pa.schema(
    [("message_id", pa.string()), ("topic", pa.string()), ("at_ms", pa.int64())]
)

Send = tuple[str, str | None, int | None]  # message_id, topic, at_ms


def asks_for_topics(given: Mapping[str, str]) -> bool:
    """Say whether some topics are read, and not all of them."""
    return any(given.get(name) for name in ("topic", "topics", "topicPattern"))


def check_sends(path: Path, *, needs_topic: bool = False) -> None:
    """Raise BadOption for a list of sends with a line that is none."""
    for _ in _sends_of(path, needs_topic=needs_topic):
        pass


def _sends_of(path: Path, *, needs_topic: bool) -> Iterator[Send]:
    if not path.is_file():
        raise BadOption(f"--sends {path}: there is no such file")
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield _send(line, needs_topic=needs_topic)
            except BadOption as wrong:
                raise BadOption(f"--sends {path}, line {number}: {wrong}") from None


def _send(line: bytes, *, needs_topic: bool) -> Send:
    """Return what a line of a list of sends says. Raises BadOption where it is none."""
    try:
        pairs = _JSON.decode(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        pairs = None
    told = [pair for pair in pairs if pair[0] in _TOLD] if isinstance(pairs, tuple) else []
    found = dict(told)
    message_id, topic, at_ms = (found.get(name) for name in _TOLD)
    if not _is_text(message_id):
        wrong = "it is no JSON with a message_id"
    elif len(found) < len(told):
        wrong = "it says its message_id, topic or at_ms twice"
    elif topic is not None and not _is_text(topic):
        wrong = "its topic is no text"
    elif needs_topic and not topic:
        wrong = "it has no topic, and topics were asked for"
    elif at_ms is not None and not (type(at_ms) is int and 0 <= at_ms < YEAR_10000_MS):
        wrong = "its at_ms is no whole number of milliseconds since 1970"
    else:
        return message_id, topic, at_ms
    raise BadOption(f"{wrong}: {line[:LINE_SHOWN].decode('utf-8', 'replace').strip()}")


def _is_text(found: object) -> TypeGuard[str]:
    """Say whether something is a text without half a character, which no column can have."""
    return isinstance(found, str) and not _HALF.search(found)


def read_sends(spark: SparkSession, path: str, *, needs_topic: bool = False) -> DataFrame:
    """Return a list of sends. Raises BadOption for a line that is none.

    Of a file on this machine Spark would take the name for a pattern, and one with an underscore in
    front for no data at all.
    """
    if "://" not in path:
        sends = _sends_of(Path(path), needs_topic=needs_topic)
        return spark.createDataFrame(pa.Table.from_batches(_batches(sends), _SEND))
    return _read_elsewhere(spark, path, needs_topic=needs_topic)


def _batches(sends: Iterator[Send]) -> Iterator[pa.RecordBatch]:
    while some := list(islice(sends, BATCH_SENDS)):
        columns = zip(*some, strict=True)
        arrays = [pa.array(each, of.type) for each, of in zip(columns, _SEND, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=_SEND)


def _read_elsewhere(spark: SparkSession, path: str, *, needs_topic: bool) -> DataFrame:
    from pyspark.sql import functions as F  # noqa: N812  # As all of Spark's users write it.

    def parsed(line: bytes) -> tuple[str | None, str | None, int | None, str | None]:
        try:
            return *_send(bytes(line), needs_topic=needs_topic), None
        except BadOption as wrong:
            return None, None, None, str(wrong)

    parse = F.udf(parsed, f"{SENDS}, wrong string", useArrow=False)  # Arrow's takes pandas.
    lines = spark.read.text(path).where(F.col("value").rlike(r"\S"))
    found = lines.select(parse(F.col("value").cast("binary")).alias("send")).select("send.*")
    # Which line of which file it is Spark does not say.
    for row in found.where("wrong is not null").limit(1).collect():
        raise BadOption(f"--sends {path}: of a line, {row.wrong}")
    return found.drop("wrong")


def of_topics(sends: DataFrame, given: Mapping[str, str]) -> DataFrame:
    """Return the sends to topics whose events are read."""
    if not asks_for_topics(given):
        return sends
    names = (given.get("topics") or given.get("topic") or "").split(",")
    asked = TopicSelection(
        names=tuple(name.strip() for name in names), pattern=given.get("topicPattern", "")
    )
    # By the rule that reads go by, which Spark's expressions do not.
    told = sends.select("topic").distinct().where("topic is not null").collect()
    return sends.where(sends["topic"].isin([row.topic for row in told if asked.have(row.topic)]))
