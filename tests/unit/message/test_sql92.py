"""SQL92 filters: the decisions about each trap, and the unit tests of the reference."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tidemill.common.errors import IllegalFilter
from tidemill.message.sql92.conditions import FALSE, TRUE, UNKNOWN, PropertyNumbers
from tidemill.message.sql92.grammar import DEPTH_MAX, PREDICATES_MAX, TEXTS_OF_IN_MAX, parse

LEVELS = {"true": TRUE, "unknown": UNKNOWN, "false": FALSE}


def evaluate(expression: str, properties: dict[str, str]) -> int:
    numbers = PropertyNumbers()
    condition = parse(expression)
    evaluation = condition.compiled(numbers)
    level = evaluation([properties.get(name) for name in numbers.by_name])
    # The canonical form means the same.
    again = parse(condition.canonical())
    assert again == condition
    numbers = PropertyNumbers()
    evaluation = again.compiled(numbers)
    assert evaluation([properties.get(name) for name in numbers.by_name]) == level
    return level


class Case(NamedTuple):
    """An expression with properties, and its result here and in RocketMQ 5.5."""

    expression: str
    properties: dict[str, str]
    result: str
    reference: str
    reason: str = ""  # of a difference


FOUR = "a=3 and b<>4 And c>5 AND d<=4"
ANY = "a=3 or b<>4 Or c>5 OR d<=4"
QUOTED = '"a.b" = \'1\' AND "say ""x""" = \'2\''
CASES = [
    # ---- numbers
    Case("price > 10", {"price": "10.5"}, "true", "error", "decimal numbers"),
    Case("price > 10", {"price": " 11"}, "unknown", "error", "blanks are not digits"),
    Case("price > 10", {"price": "abc"}, "unknown", "error", "not a number"),
    Case("a = 1", {"a": "1.0"}, "true", "error", "decimal numbers"),
    Case("a > 1.0", {"a": "NaN"}, "unknown", "true", "not a number"),
    Case("a > 1.0", {"a": "2f"}, "unknown", "true", "not a number"),
    Case("a > 1.0", {"a": " 2 "}, "unknown", "true", "not a number"),
    Case("a > 1.0", {"a": "1e3"}, "true", "true"),
    Case("a > 1", {"a": "+2"}, "true", "true"),
    Case("a > 0.0", {"a": "1"}, "true", "rejected", "a valid number"),
    Case("a > 9223372036854775808", {"a": "9223372036854775809"}, "true", "rejected", "size"),
    Case("a <> 5", {"a": "abc"}, "unknown", "error", "not a number"),
    Case("a BETWEEN 1 AND 5", {"a": "3.5"}, "true", "error", "decimal numbers"),
    Case("a > 3.1E10", {"a": "3.1415E10"}, "true", "true"),
    Case("a > 3.14", {"a": "3.1415"}, "true", "true"),
    Case("a = 10L", {"a": "10"}, "true", "true"),
    Case("a = 1e2", {"a": "100"}, "true", "true"),
    Case("a = -1", {"a": "-1"}, "true", "true"),
    Case("a = - 1", {"a": "-1"}, "true", "rejected", "a sign is a token"),
    Case("a = +1", {"a": "1"}, "true", "true"),
    Case("a = 1", {"a": "1e309"}, "unknown", "error", "exponents are limited"),
    Case("a > 0", {"a": "9" * 65}, "unknown", "error", "values of 64 characters"),
    Case("a > 0.1", {"a": "0.10000000000000000000000000000000001"}, "true", "false", "exact"),
    Case("5 < a", {"a": "6"}, "true", "true"),
    # ---- operands and errors
    Case("a = 5 OR b = 'x'", {"a": "abc", "b": "x"}, "true", "false", "the order has no effect"),
    Case("b = 'x' OR a = 5", {"a": "abc", "b": "x"}, "true", "true"),
    Case("a <> 'x'", {}, "unknown", "false", "as in SQL"),
    Case("NOT (a = 'x')", {}, "unknown", "false", "as in SQL"),
    Case("'x' <> a", {}, "unknown", "true", "symmetric"),
    Case("NOT ('x' = a)", {}, "unknown", "true", "symmetric"),
    Case("a = b", {}, "unknown", "true", "NULL equals nothing"),
    Case("NOT (a = b)", {"a": "1"}, "unknown", "true", "NULL equals nothing"),
    Case("a = b", {"a": "3.14", "b": "3.14"}, "true", "true"),
    Case("a = b", {"a": "1", "b": "1.0"}, "false", "false"),
    Case("a > b", {"a": "10", "b": "20"}, "false", "false"),
    Case("a > b", {"a": "20", "b": "10"}, "true", "true"),
    Case("a > b", {"a": "x", "b": "10"}, "unknown", "error", "not a number"),
    # ---- TRUE and FALSE
    Case("a = TRUE", {"a": "TRUE"}, "true", "true"),
    Case("a = TRUE", {"a": "yes"}, "unknown", "false", "only two words are truth values"),
    Case("a = FALSE", {"a": "yes"}, "unknown", "true", "only two words are truth values"),
    Case("a <> TRUE", {"a": "False"}, "true", "true"),
    Case("TRUE = a", {"a": "true"}, "true", "error", "symmetric"),
    Case("TRUE", {}, "true", "true"),
    Case("FALSE OR TRUE", {}, "true", "true"),
    Case("TRUE = FALSE", {}, "false", "error", "symmetric"),
    # ---- IN, BETWEEN, texts
    Case("a IN ('x')", {}, "unknown", "false", "as in SQL"),
    Case("a NOT IN ('x')", {}, "unknown", "false", "as in SQL"),
    Case("a IN ('x', 'y')", {"a": "y"}, "true", "true"),
    Case("a NOT IN ('x', 'y')", {"a": "z"}, "true", "true"),
    Case("a NOT BETWEEN 1 AND 5", {}, "unknown", "false", "as in SQL"),
    Case("a BETWEEN '1' AND '5'", {"a": "3"}, "true", "rejected", "texts have an order"),
    Case(
        "t > '2026-11-30T00:00:00Z'", {"t": "2026-11-30T03:00:00Z"}, "true", "rejected", "times"
    ),
    Case("a CONTAINS 'b'", {"a": "abc"}, "true", "true"),
    Case("a STARTSWITH 'A'", {"a": "abc"}, "false", "false"),
    Case("a ENDSWITH 'bc'", {"a": "abc"}, "true", "true"),
    Case("a NOT ENDSWITH 'bc'", {"a": "abc"}, "false", "false"),
    Case("a NOT CONTAINS 'b'", {}, "unknown", "false", "symmetric"),
    Case("NOT (a CONTAINS 'b')", {}, "unknown", "true", "symmetric"),
    Case("a = 'it''s'", {"a": "it's"}, "true", "true"),
    # ---- NULL
    Case("a IS NULL", {}, "true", "true"),
    Case("a IS NULL", {"a": ""}, "false", "false"),
    Case("a IS NOT NULL", {"a": "x"}, "true", "true"),
    Case("a is null OR a='hello'", {"a": "abc"}, "false", "false"),
    Case("a is null OR a='hello'", {}, "true", "true"),
    Case("a is not null and a='hello'", {"a": "hello"}, "true", "true"),
    Case("a is not null and a='hello'", {}, "false", "false"),
    Case("TAGS is not null and TAGS='''''tag'''''", {"TAGS": "''tag''"}, "true", "true"),
    # ---- precedence, names, comments, blanks
    Case("NOT a = 'x'", {"a": "y"}, "true", "false", "NOT binds weaker, as in SQL"),
    Case("a = 'x' OR a = 'y' AND b = '1'", {"a": "x"}, "true", "true"),
    Case(FOUR, {"a": "3", "b": "5", "c": "6", "d": "1"}, "true", "true"),
    Case(FOUR, {"a": "4", "b": "5", "c": "6", "d": "1"}, "false", "false"),
    Case(ANY, {"a": "4", "b": "4", "c": "3", "d": "2"}, "true", "true"),
    Case(ANY, {"a": "4", "b": "4", "c": "3", "d": "10"}, "false", "false"),
    Case("a <= now", {"a": "1", "now": "2"}, "true", "true"),
    Case("a_b$ = '1' AND _a = '2'", {"a_b$": "1", "_a": "2"}, "true", "true"),
    Case(QUOTED, {"a.b": "1", 'say "x"': "2"}, "true", "rejected", "names"),
    Case('"or" = \'1\'', {"or": "1"}, "true", "rejected", "every name can be written"),
    Case("a = 1 -- comment", {"a": "1"}, "true", "true"),
    Case("a /* one\ntwo */ =\t1", {"a": "1"}, "true", "true"),
    Case("A = 1", {"a": "1"}, "unknown", "false", "names have a case"),
    Case("TAGS = 'x' AND r = 'eu'", {"TAGS": "x", "r": "eu"}, "true", "true"),
    # ---- two literals
    Case("'5' = 5", {}, "true", "true"),
    Case("5 >= '5.0'", {}, "true", "true"),
    Case("1 = 1", {}, "true", "true"),
    Case("'a' < 'b'", {}, "true", "rejected", "texts have an order"),
    Case("'x' = 5", {}, "unknown", "error", "not a number"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.expression)
def test_an_expression_has_its_result(case: Case) -> None:
    assert evaluate(case.expression, case.properties) == LEVELS[case.result]
    # Where the results differ, a reason is given: UNKNOWN does not match, as false.
    is_same = case.result == case.reference or (case.result, case.reference) == ("unknown", "error")
    assert is_same or case.reason


# Expressions with the column and a part of the error.
REJECTED = [
    ("", 1, "the end"),
    ("a = '1' b = '2'", 9, "unexpected b"),
    ("(a = '1'))", 10, "no parenthesis is open"),
    ("(a = '1'", 9, "a parenthesis is still open"),
    ("a = '1' -1", 9, "no arithmetic"),
    ("a = 1 + 1", 7, "no arithmetic"),
    ("a-b = 1", 2, "double quotes"),
    ("a + 1 > 2", 3, "no arithmetic"),
    ("a LIKE 'x%'", 3, "use STARTSWITH, ENDSWITH or CONTAINS"),
    ("a > 0x10", 5, "0x10 is not a decimal number"),
    ("a = 010", 5, "010 is not a decimal number"),
    ("a > 2f", 5, "2f is not a decimal number"),
    ("a = 1.5.2", 8, "unexpected .2"),
    ("a = 10l", 5, "10l is not a decimal number"),
    ("a = 1e309", 5, "an exponent is at most 308"),
    ("a = 0.001e-308", 5, "an exponent is at most 308, and this number has -311"),
    ("a BETWEEN 1e308 AND 10e308", 21, "this number has +309"),
    (f"a = 0.{'0' * 308}1", 5, "this number has -309"),
    ("a", 1, "write `= TRUE`"),
    ("a AND b = 1", 1, "write `= TRUE`"),
    ("NOT a", 5, "write `= FALSE`"),
    ("'x'", 4, "a comparison follows"),
    ("a IN ()", 7, "texts in single quotes"),
    ("a IN (1, 2)", 7, "texts in single quotes"),
    ("a IN ('x', NULL)", 12, "texts in single quotes"),
    ("'x' IN ('x')", 1, "only a property may stand before IN"),
    ("a BETWEEN 5 AND 1", 11, "above the second one"),
    ("a NOT BETWEEN 5 AND 1", 15, "above the second one"),
    ("a BETWEEN 1 AND NULL", 17, "unexpected NULL"),
    ("a BETWEEN up AND low", 11, "unexpected up"),
    ("a BETWEEN 1 AND '5'", 11, "one bound of BETWEEN is a number"),
    ("5 BETWEEN 1 AND 9", 1, "only a property"),
    ("a and between 2 and 10", 1, "write `= TRUE`"),
    (" a between 10 and 0", 12, "above the second one"),
    ("a CONTAINS ''", 12, "not empty"),
    ("a NOT = 1", 7, "NOT stands before"),
    ("a = NULL", 5, "write IS NULL"),
    ("NULL = NULL", 1, "write IS NULL"),
    ("5 IS NULL", 1, "only a property may stand before IS"),
    ("a == 1", 3, "use = to compare"),
    ("a != 1", 3, "use <> to compare"),
    ("a = 1 && b = 1", 7, "use AND"),
    ("a = 1 || b = 1", 7, "use OR"),
    ("a = 'b' = TRUE", 9, "do not chain"),
    ("5 < a < 9", 7, "use BETWEEN"),
    ('a = "x"', 5, "write 'x' for a text"),
    ("a.b = '1'", 2, "double quotes"),
    ("été = '1'", 1, "double quotes"),
    ("or = '1'", 1, "unexpected or"),
    ("1a = '1'", 1, "1a is not a decimal number"),
    ("a = '1' AND", 12, "unexpected the end"),
    ("a = '1';", 8, "unexpected ';'"),
    ("a = 'x", 5, "no end"),
    ('"a = 1', 1, "no end"),
    ("a = 1 /* x", 7, "no end"),
    ("a < TRUE", 3, "compare TRUE and FALSE with = or <>"),
    ("TRUE = 1", 1, "never equal"),
    ("𝄞 = 1", 1, "unexpected"),
    ("a = '𝄞𝄞' b", 10, "unexpected b"),
]


@pytest.mark.parametrize(("expression", "column", "part"), REJECTED)
def test_an_expression_is_rejected_with_its_position(
    expression: str, column: int, part: str
) -> None:
    with pytest.raises(IllegalFilter) as caught:
        parse(expression)
    assert caught.value.message.startswith(f"SQL filter, column {column}: ")
    assert part in caught.value.message


def test_an_error_in_several_lines_names_the_line() -> None:
    with pytest.raises(IllegalFilter, match=r"^SQL filter, line 3, column 4: unexpected LIKE; use"):
        parse("a = 'x\ny' AND\n b LIKE 'z'")


def test_an_error_shows_at_most_forty_characters() -> None:
    with pytest.raises(IllegalFilter) as caught:
        parse(f"a = 1 '{'x' * 4_000}'")
    assert "x" * 36 in caught.value.message
    assert "x" * 40 not in caught.value.message


@pytest.mark.parametrize(
    ("make", "limit"),
    [
        (lambda count: "(" * count + "a = 1" + ")" * count, DEPTH_MAX),
        (lambda count: "NOT " * count + "a = 1", DEPTH_MAX),
        (lambda count: " OR ".join(["a = 1"] * count), PREDICATES_MAX),
        (lambda count: f"a IN ({', '.join(['$'] * count)})".replace("$", "'x'"), TEXTS_OF_IN_MAX),
    ],
    ids=["parentheses", "NOT", "predicates", "texts of IN"],
)
def test_limits_hold_at_their_edge(make: object, limit: int) -> None:
    assert callable(make)
    assert parse(make(limit)).canonical()
    with pytest.raises(IllegalFilter, match=r"^SQL filter, column \d+: .*more than"):
        parse(make(limit + 1))


def test_texts_that_differ_in_blanks_case_and_order_of_operands_are_equal() -> None:
    assert parse(" a  =1 and( b in('y','x') )") == parse("1 = a AND b IN ('x', 'y')")


@pytest.mark.parametrize("begin", ["(", "NOT ", "a=1 OR "])
def test_a_limit_rejects_a_filter_before_its_rest_is_read(begin: str) -> None:
    """A rejected filter then costs no more than the part within the limits."""
    with pytest.raises(IllegalFilter, match="more than"):
        parse(begin * 500 + "a = 'this text has no end")
