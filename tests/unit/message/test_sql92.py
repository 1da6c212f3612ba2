"""SQL92 filters: the decisions about each trap, and the unit tests of the reference."""

from __future__ import annotations

import pytest

from tests.support.sql92_cases import CASES, Case
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
