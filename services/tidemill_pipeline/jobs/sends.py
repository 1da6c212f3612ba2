"""Lists of acknowledged sends: JSON lines with `message_id`, `topic` and `at_ms`.

The producer writes the list, so the audit does not depend on brokers alone. An invalid line is an
error with its number: a list with skipped lines would prove nothing.
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
BATCH_SENDS: Final = 100_000  # Python objects in memory at once
YEAR_10000_MS: Final = 253_402_300_800_000  # a larger value is a time in microseconds
LINE_SHOWN: Final = 80  # bytes of an invalid line in the error

# JSON objects become tuples of pairs, which keep duplicate names.
_JSON: Final = json.JSONDecoder(object_pairs_hook=tuple)
_SURROGATE: Final = re.compile("[\ud800-\udfff]")  # half of a character beyond 16 bits
_FIELDS: Final = ("message_id", "topic", "at_ms")  # the columns of SENDS
_SEND: Final = pa.schema(
    [("message_id", pa.string()), ("topic", pa.string()), ("at_ms", pa.int64())]
)

Send = tuple[str, str | None, int | None]  # message_id, topic, at_ms


def asks_for_topics(given: Mapping[str, str]) -> bool:
    """Whether the options select topics."""
    return any(given.get(name) for name in ("topic", "topics", "topicPattern"))


def check_sends(path: Path, *, needs_topic: bool = False) -> None:
    """Raise BadOption for a list of sends with an invalid line."""
    for _ in _sends_of(path, needs_topic=needs_topic):
        pass


def _sends_of(path: Path, *, needs_topic: bool) -> Iterator[Send]:
    if not path.is_file():
        raise BadOption(f"--sends {path}: file not found")
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield _send(line, needs_topic=needs_topic)
            except BadOption as wrong:
                raise BadOption(f"--sends {path}, line {number}: {wrong}") from None


def _send(line: bytes, *, needs_topic: bool) -> Send:
    """Parse a line of a list of sends. Raises BadOption if it is invalid."""
    try:
        pairs = _JSON.decode(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        pairs = None
    known = [pair for pair in pairs if pair[0] in _FIELDS] if isinstance(pairs, tuple) else []
    found = dict(known)
    message_id, topic, at_ms = (found.get(name) for name in _FIELDS)
    if not _is_text(message_id):
        wrong = "not a JSON object with a message_id"
    elif len(found) < len(known):
        wrong = "message_id, topic or at_ms occurs twice"
    elif topic is not None and not _is_text(topic):
        wrong = "topic is not a text"
    elif needs_topic and not topic:
        wrong = "topic is missing, which is required with --topic or --topic-pattern"
    elif at_ms is not None and not (type(at_ms) is int and 0 <= at_ms < YEAR_10000_MS):
        wrong = "at_ms is not an integer of milliseconds since 1970"
    else:
        return message_id, topic, at_ms
    raise BadOption(f"{wrong}: {line[:LINE_SHOWN].decode('utf-8', 'replace').strip()}")


def _is_text(found: object) -> TypeGuard[str]:
    """Whether a value is a string without surrogates, which a column cannot store."""
    return isinstance(found, str) and not _SURROGATE.search(found)


def read_sends(spark: SparkSession, path: str, *, needs_topic: bool = False) -> DataFrame:
    """Return a list of sends. Raises BadOption for an invalid line.

    A local file is read without Spark: Spark would interpret its name as a pattern and would ignore
    a name that begins with an underscore.
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
    from pyspark.sql import functions as F  # noqa: N812  # The usual name among users of Spark.

    def parsed(line: bytes) -> tuple[str | None, str | None, int | None, str | None]:
        try:
            return *_send(bytes(line), needs_topic=needs_topic), None
        except BadOption as wrong:
            return None, None, None, str(wrong)

    parse = F.udf(parsed, f"{SENDS}, wrong string", useArrow=False)  # Arrow needs pandas.
    lines = spark.read.text(path).where(F.col("value").rlike(r"\S"))
    found = lines.select(parse(F.col("value").cast("binary")).alias("send")).select("send.*")
    # Spark does not report the file and the line number.
    for row in found.where("wrong is not null").limit(1).collect():
        raise BadOption(f"--sends {path}, in one line: {row.wrong}")
    return found.drop("wrong")


def of_topics(sends: DataFrame, given: Mapping[str, str]) -> DataFrame:
    """Return the sends to the selected topics."""
    if not asks_for_topics(given):
        return sends
    names = (given.get("topics") or given.get("topic") or "").split(",")
    pattern = given.get("topicPattern", "")
    asked = TopicSelection(pattern=pattern) if pattern else TopicSelection.of(map(str.strip, names))
    # Match as reads do; Spark's expressions match differently.
    rows = sends.select("topic").distinct().where("topic is not null").collect()
    return sends.where(sends["topic"].isin([row.topic for row in rows if asked.have(row.topic)]))
