"""SQL92 filters against a naive evaluator, and random texts."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tidemill.common.errors import IllegalFilter
from tidemill.message.sql92.conditions import EXPONENT_MAX, TRUE, PropertyNumbers
from tidemill.message.sql92.grammar import parse

NAMES = ["a", "b", "_c$", "x-y", "or", 'say "z"']
TEXTS = ["", "1", "2", "10", "1.5", "1e1", "-1", "+1", "x", "abc", "it's", "TRUE", "false", " 1"]
NUMBERS = ["0", "1", "2", "10L", "1.5", "1e1", "-1", "+ 2", ".5", "2."]
WORDS = """
    a b TRUE false AND OR NOT IS NULL IN BETWEEN CONTAINS ( ) , = <> < >= 1 -1 . 1.5 'x' '' "y" " '
    -- /* */ + 0 é
"""
# A naive result is True, False or None (UNKNOWN). A tree is a tuple: its kind, and its parts.
Tree = tuple[Any, ...]

names = st.sampled_from(NAMES)
texts = st.sampled_from(TEXTS)
operators = st.sampled_from(["=", "<>", "<", "<=", ">", ">="])
predicates = st.one_of(
    st.tuples(st.just("null"), names, st.booleans()),
    st.tuples(st.just("in"), names, st.lists(texts, min_size=1, max_size=3), st.booleans()),
    st.tuples(st.just("number"), names, operators, st.sampled_from(NUMBERS), st.booleans()),
    st.tuples(st.just("text"), names, operators, texts, st.booleans()),
    st.tuples(st.just("truth"), names, st.sampled_from(["=", "<>"]), st.booleans(), st.booleans()),
    st.tuples(st.just("names"), names, operators, st.sampled_from(["a", "b", "_c$"])),
    st.tuples(
        st.just("match"),
        names,
        st.sampled_from(["CONTAINS", "startswith", "EndsWith"]),
        texts.filter(bool),
        st.booleans(),
    ),
    st.tuples(
        st.just("between"),
        names,
        st.lists(texts, min_size=2, max_size=2).map(sorted),
        st.booleans(),
    ),
    st.tuples(st.just("constant"), st.booleans()),
)
trees = st.recursive(
    predicates,
    lambda inner: st.one_of(
        st.tuples(st.just("not"), inner),
        st.tuples(st.sampled_from(["and", "or"]), st.lists(inner, min_size=2, max_size=3)),
    ),
    max_leaves=8,
)
properties = st.dictionaries(names, texts)


def name_text(name: str) -> str:
    if re.fullmatch(r"[A-Za-z_$][A-Za-z0-9_$]*", name) and name != "or":
        return name
    return '"' + name.replace('"', '""') + '"'


def text_of(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def swapped(operator: str) -> str:
    return operator.translate(str.maketrans("<>", "><")) if operator != "<>" else operator


def compared(name: str, operator: str, literal: str, *, is_left: bool) -> str:
    # A quoted name stands on the left only.
    if is_left or name_text(name).startswith('"'):
        return f"{name_text(name)}{operator}{literal}"
    return f"{literal} {swapped(operator)} {name}"


def written(tree: Tree) -> str:
    """Write a tree as a filter; each part is in parentheses."""
    match tree:
        case ("null", name, negated):
            return f"{name_text(name)} is {'not ' if negated else ''}NULL"
        case ("in", name, values, negated):
            listed = ",".join(map(text_of, values))
            return f"{name_text(name)} {'NOT ' if negated else ''}in ({listed})"
        case ("number", name, operator, number, is_left):
            return compared(name, operator, number, is_left=is_left)
        case ("text", name, operator, text, is_left):
            return compared(name, operator, text_of(text), is_left=is_left)
        case ("truth", name, operator, truth, is_left):
            return compared(name, operator, str(truth), is_left=is_left)
        case ("names", name, operator, other):
            return f"{name_text(name)} {operator} {other}"
        case ("match", name, word, text, negated):
            return f"{name_text(name)} {'not ' if negated else ''}{word} {text_of(text)}"
        case ("between", name, (low, high), negated):
            word = "NOT BETWEEN" if negated else "between"
            return f"{name_text(name)} {word} {text_of(low)} and {text_of(high)}"
        case ("constant", value):
            return str(value)
        case ("not", part):
            return f"NOT ({written(part)})"
        case (word, parts):
            return f" {word} ".join(f"({written(part)})" for part in parts)
    raise AssertionError(tree)


def number(text: str) -> Fraction | None:
    """Read a decimal number as a fraction."""
    if re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text) is None:
        return None
    return Fraction(text.rstrip(".") if text[-1] == "." else text)


def number_in(found: dict[str, str], name: str) -> Fraction | None:
    return number(found[name]) if name in found else None


def holds(left: Any, operator: str, right: Any) -> bool | None:
    if left is None or right is None:
        return None
    results: dict[str, bool] = {
        "=": left == right,
        "<>": left != right,
        "<": left < right,
        "<=": left <= right,
        ">": left > right,
        ">=": left >= right,
    }
    return results[operator]


def opposite(value: bool | None, negated: bool = True) -> bool | None:
    return value if value is None or not negated else not value


def naive(tree: Tree, found: dict[str, str]) -> bool | None:
    match tree:
        case ("null", name, negated):
            return opposite(name not in found, negated)
        case ("in", name, values, negated):
            return opposite(found[name] in values, negated) if name in found else None
        case ("number", name, operator, literal, _):
            return holds(
                number_in(found, name), operator, number(literal.replace(" ", "").rstrip("L"))
            )
        case ("text", name, operator, text, _):
            return holds(found.get(name), operator, text)
        case ("truth", name, operator, truth, _):
            words = {"true": True, "false": False}
            return holds(words.get(found.get(name, "").lower()), operator, truth)
        case ("names", name, operator, other):
            if operator in ("=", "<>"):
                return holds(found.get(name), operator, found.get(other))
            return holds(number_in(found, name), operator, number_in(found, other))
        case ("match", name, word, text, negated):
            if name not in found:
                return None
            places = {
                "contains": text in found[name],
                "startswith": found[name][: len(text)] == text,
                "endswith": found[name][-len(text) :] == text,
            }
            return opposite(places[word.lower()], negated)
        case ("between", name, (low, high), negated):
            return opposite(low <= found[name] <= high, negated) if name in found else None
        case ("constant", value):
            return bool(value)
        case ("not", part):
            return opposite(naive(part, found))
        case (word, parts):
            results = [naive(part, found) for part in parts]
            decisive = bool(word == "or")
            if decisive in results:
                return decisive
            return None if None in results else not decisive
    raise AssertionError(tree)


def evaluated(expression: str, found: dict[str, str]) -> int:
    numbers = PropertyNumbers()
    evaluate = parse(expression).compiled(numbers)
    return evaluate([found.get(name) for name in numbers.by_name])


@given(tree=trees, found=properties)
def test_each_result_is_that_of_the_naive_evaluator(tree: Tree, found: dict[str, str]) -> None:
    expression = written(tree)
    expected = {True: TRUE, None: 1, False: 0}[naive(tree, found)]
    assert evaluated(expression, found) == expected
    condition = parse(expression)
    assert parse(condition.canonical()) == condition
    assert evaluated(condition.canonical(), found) == expected


@given(tree=trees, found=properties)
def test_the_order_of_operands_has_no_effect(tree: Tree, found: dict[str, str]) -> None:
    def turned(part: Tree) -> Tree:
        match part:
            case ("not", inner):
                return ("not", turned(inner))
            case ("and" | "or" as word, parts):
                return (word, [turned(one) for one in reversed(parts)])
            case ("number" | "text" | "truth" as kind, name, operator, literal, is_left):
                return (kind, name, operator, literal, not is_left)
            case ("names", "a" | "b" | "_c$" as name, ("=" | "<>") as operator, other):
                return ("names", other, operator, name)
        return part

    assert evaluated(written(tree), found) == evaluated(written(turned(tree)), found)


def check_any_text(expression: str) -> None:
    """Parse a text. If it is a filter, its canonical form is the same filter."""
    try:
        condition = parse(expression)
    except IllegalFilter:
        return
    assert parse(condition.canonical()) == condition


@given(parts=st.lists(st.sampled_from([*WORDS.split(), " ", "\n"])))
def test_any_sequence_of_tokens_is_a_filter_or_rejected(parts: list[str]) -> None:
    check_any_text(" ".join(parts))
    check_any_text("".join(parts))


@given(text=st.text())
def test_any_text_is_a_filter_or_rejected(text: str) -> None:
    check_any_text(text)


# Numbers near the highest exponent, before and after a change to their normal form.
edge_numbers = st.builds(
    "{}{}{}".format,
    st.sampled_from(["", "-", "+"]),
    st.sampled_from(["0", "1", "10", "123.4", "0.001", ".5", "0.0", "0." + "0" * 400 + "1"]),
    st.one_of(
        st.just(""),
        st.builds(
            "{}{}{}".format,
            st.sampled_from(["e", "E"]),
            st.sampled_from(["", "-", "+"]),
            st.integers(EXPONENT_MAX - 8, EXPONENT_MAX + 4),
        ),
    ),
)


@given(operator=operators, low=edge_numbers, high=edge_numbers)
def test_numbers_near_the_highest_exponent_have_a_canonical_form(
    operator: str, low: str, high: str
) -> None:
    check_any_text(f"a {operator} {low}")
    check_any_text(f"{low} {operator} {high}")
    check_any_text(f"a BETWEEN {low} AND {high}")


@given(tree=trees, character=st.sampled_from("'\"()=<>1aé -*/\n\0"), data=st.data())
def test_a_changed_filter_is_a_filter_or_rejected(
    tree: Tree, character: str, data: st.DataObject
) -> None:
    expression = written(tree)
    at = data.draw(st.integers(0, len(expression)))
    check_any_text(expression[:at])
    check_any_text(expression[:at] + character + expression[at + 1 :])
    check_any_text(expression[:at] + character + expression[at:])
