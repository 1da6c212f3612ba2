"""SQL92 filters and messages, with the results here and in RocketMQ 5.5."""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    """An expression with properties, and its result here and in RocketMQ 5.5.

    RocketMQ has no "unknown". It has "error", where the evaluation raises, and "rejected".
    """

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
    Case("a = - 1", {"a": "-1"}, "true", "true"),
    Case("a = +1", {"a": "1"}, "true", "true"),
    Case("a = 1", {"a": "1e309"}, "unknown", "error", "exponents are limited"),
    Case("a > 0", {"a": "9" * 65}, "unknown", "error", "values of 64 characters"),
    Case("a > 0.1", {"a": "0.10000000000000000000000000000000001"}, "true", "false", "exact"),
    Case("5 < a", {"a": "6"}, "true", "true"),
    # ---- operands and errors
    Case("a = 5 OR b = 'x'", {"a": "abc", "b": "x"}, "true", "error", "the order has no effect"),
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
    Case("TRUE = FALSE", {}, "false", "false"),
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
    Case("NOT a = 'x'", {"a": "y"}, "true", "error", "NOT binds weaker, as in SQL"),
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
    Case("5 >= '5.0'", {}, "true", "rejected", "decimal numbers"),
    Case("1 = 1", {}, "true", "true"),
    Case("'a' < 'b'", {}, "true", "rejected", "texts have an order"),
    Case("'x' = 5", {}, "unknown", "error", "not a number"),
]  # fmt: skip
