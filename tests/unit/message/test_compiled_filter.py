"""SQL92 filters on stored messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from tidemill.message.encoding import encode_stored
from tidemill.message.sql92.compiled import (
    DECODED_BYTES_A_STEP,
    SCANNED_BYTES_A_STEP,
    CompiledFilter,
)
from tidemill.message.sql92.conditions import FALSE, TRUE, UNKNOWN
from tidemill.message.sql92.grammar import parse
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2


def stored(
    properties: Mapping[str, str], *, tag: str | None = None, keys: Sequence[str] = ()
) -> bytes:
    system = v2.SystemProperties(message_id="m1", keys=keys, tag=tag, born_host="here")
    message = v2.Message(user_properties=properties, system_properties=system, body=b"body")
    return encode_stored(message, message_type=v2.NORMAL, now_ms=1)


def evaluate(expression: str, blob: bytes) -> int:
    compiled = CompiledFilter(parse(expression))
    # The broker reads messages as views of the log.
    assert compiled.evaluate(memoryview(blob)) == compiled.evaluate(blob)
    return compiled.evaluate(blob)


def test_a_filter_reads_user_properties() -> None:
    blob = stored({"region": "eu", "price": "7", "été": "ü"})
    assert evaluate("region = 'eu' AND price > 5", blob) == TRUE
    assert evaluate("\"été\" = 'ü'", blob) == TRUE
    assert evaluate("missing = '1'", blob) == UNKNOWN
    assert evaluate("price > 7", blob) == FALSE
    assert evaluate("TRUE", blob) == TRUE


def test_a_filter_reads_the_tag_and_all_keys() -> None:
    blob = stored({"region": "eu"}, tag="paid", keys=("k1", "k2"))
    assert evaluate("TAGS = 'paid' AND KEYS = 'k1 k2'", blob) == TRUE
    assert evaluate("TAGS = 'paid' AND region = 'eu'", blob) == TRUE
    assert evaluate("TAGS IS NULL AND KEYS IS NULL", stored({})) == TRUE
    # Nothing else is visible.
    assert evaluate("message_id IS NULL AND born_host IS NULL", blob) == TRUE


def test_an_empty_property_is_not_missing() -> None:
    assert evaluate("a IS NOT NULL AND a = ''", stored({"a": ""})) == TRUE


@pytest.mark.parametrize(
    ("expression", "tags"),
    [
        ("TAGS = 'x'", {"x"}),
        ("'x' = TAGS AND a = 1", {"x"}),
        ("TAGS IN ('x', 'y') AND (a = 1 OR b = 1)", {"x", "y"}),
        ("TAGS IN ('x', 'y') AND TAGS <> 'y' AND TAGS IN ('y', 'z')", {"y"}),
        ("TAGS NOT IN ('x')", None),
        ("TAGS = 'x' OR a = 1", None),
        ("NOT TAGS = 'x'", None),
        ("TAGS = a", None),
        ("TAGS = 5", None),
        ("TAGS = TRUE", None),
        ("a = 'x'", None),
    ],
)
def test_the_tags_that_a_filter_requires(expression: str, tags: set[str] | None) -> None:
    assert CompiledFilter(parse(expression)).required_tags == tags


def test_what_is_no_stored_message_is_an_error() -> None:
    with pytest.raises(ValueError, match="stored message"):
        evaluate("a = 1", b"short")


@pytest.mark.parametrize(
    ("expression", "steps"),
    [
        ("TRUE", 1),
        ("a IS NULL", 1),
        ("a IN ('x', 'y')", 1),
        ("a BETWEEN 'x' AND 'y'", 1),
        ("a BETWEEN 1 AND 2", 8),
        ("a = 'x'", 1),
        ("a = b", 1),
        ("a < b", 8),
        ("a = TRUE", 1),
        ("a > 5", 4),
        ("5 < a", 4),
        ("NOT a > 5", 5),
        ("a > 5 AND (a = 'x' OR b = 'y')", 8),
        ("a STARTSWITH 'x'", 1),
        ("a CONTAINS 'x'", 1),
    ],
)
def test_the_steps_of_a_filter(expression: str, steps: int) -> None:
    assert CompiledFilter(parse(expression)).cost_steps(stored({})) == steps


def test_the_steps_grow_with_the_bytes_that_a_filter_reads() -> None:
    blob = stored({"a": "x" * 15_000})
    decoded = CompiledFilter(parse("a = 'x'")).cost_steps(blob)
    assert decoded == 1 + 15_008 // DECODED_BYTES_A_STEP
    searched = CompiledFilter(parse("a CONTAINS 'x' OR a NOT CONTAINS 'y'")).cost_steps(blob)
    assert searched == decoded + 2 + 2 * 15_008 // SCANNED_BYTES_A_STEP
    # TAGS and KEYS are no user properties.
    assert CompiledFilter(parse("TAGS = 'x'")).cost_steps(blob) < 10


@pytest.mark.parametrize("value", ["TRUE", "tRue", "true "])
def test_truth_in_any_case_of_letters(value: str) -> None:
    assert evaluate("a = TRUE", stored({"a": value})) == (UNKNOWN if " " in value else TRUE)
