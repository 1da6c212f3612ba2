"""The conditions of a SQL92 filter: their canonical text, and their evaluation.

Each condition is FALSE, UNKNOWN or TRUE, in this order. AND is the minimum and OR the maximum. Only
TRUE matches. A missing property makes its predicate UNKNOWN, and so does a value that cannot be
compared. The other predicates are evaluated all the same, so the order of operands has no effect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from operator import ge, gt, le, lt
from typing import Final, NamedTuple, Protocol, TypeAlias, final

from tidemill.message.sql92.cost import (
    NUMBER_COST,
    ONE_STEP,
    SCAN_COST,
    TEXT_OF_IN_BYTES,
    TWO_NUMBERS_COST,
    ConditionCost,
)

FALSE: Final = 0
UNKNOWN: Final = 1
TRUE: Final = 2

EXPONENT_MAX: Final = 308
NUMBER_CHARS_MAX: Final = 64  # of a value that is compared as a number
_TRUTH_CHARS_MAX: Final = len("false")
_NUMBER: Final = re.compile(r"[+-]?(?:[0-9]+(\.[0-9]*)?|(\.[0-9]+))(?:[eE]([+-]?[0-9]+))?")
_PLAIN_NAME: Final = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]*")
_KEYWORDS: Final = "AND OR NOT BETWEEN IN IS NULL TRUE FALSE CONTAINS STARTSWITH ENDSWITH"
KEYWORDS: Final = frozenset(_KEYWORDS.split())

Number: TypeAlias = int | Decimal
Literal: TypeAlias = int | Decimal | str | bool
# The values of the properties by their number; None: missing.
Values: TypeAlias = Sequence[str | None]
Evaluate: TypeAlias = Callable[[Values], int]

_ORDERS: Final[Mapping[str, Callable[[Number | str, Number | str], bool]]] = {
    "<": lt,
    "<=": le,
    ">": gt,
    ">=": ge,
}
# The operator after an exchange of its operands.
_EXCHANGED: Final = {"=": "=", "<>": "<>", "<": ">", "<=": ">=", ">": "<", ">=": "<="}


def number_of(text: str) -> Number | None:
    """Read the value of a property as a decimal number; None if it is not one."""
    if len(text) > NUMBER_CHARS_MAX:
        return None
    if text.isdigit() and text.isascii():
        return int(text)  # the common case, in a tenth of the time
    if (match := _NUMBER.fullmatch(text)) is None:
        return None
    fraction, begin, exponent = match.groups()
    if exponent is None:
        return int(text) if fraction is None and begin is None else Decimal(text)
    return Decimal(text) if abs(int(exponent)) <= EXPONENT_MAX else None


class Condition(Protocol):
    """A condition of a filter. Two conditions are equal if their canonical texts are equal."""

    @property
    def precedence(self) -> int:
        """0 for OR, 1 for AND, 2 for NOT, 3 for all others."""

    def canonical(self) -> str:
        """Return the text in its canonical form, which has the same meaning."""

    def compiled(self, numbers: PropertyNumbers) -> Evaluate:
        """Return the evaluation, which reads the properties by their numbers."""

    @property
    def cost(self) -> ConditionCost:
        """The highest cost of one evaluation, and of keeping it."""


@final
class PropertyNumbers:
    """The names of the properties that a filter reads, numbered in the order of their first use."""

    def __init__(self) -> None:
        self.by_name: dict[str, int] = {}

    def number_of(self, name: str) -> int:
        """Return the number of a property."""
        return self.by_name.setdefault(name, len(self.by_name))


class Property(NamedTuple):
    """A property of the message, the tag (TAGS), or its keys (KEYS)."""

    name: str


Operand: TypeAlias = Property | Literal


def _shown_property(name: str) -> str:
    if _PLAIN_NAME.fullmatch(name) and name.upper() not in KEYWORDS:
        return name
    return '"' + name.replace('"', '""') + '"'


def _shown(operand: Operand) -> str:
    if isinstance(operand, Property):
        return _shown_property(operand.name)
    if isinstance(operand, bool):
        return str(operand).upper()
    if isinstance(operand, str):
        return "'" + operand.replace("'", "''") + "'"
    return str(operand)


def _inner(part: Condition, precedence: int) -> str:
    """Return the text of a part, in parentheses if it binds weaker than its condition."""
    return part.canonical() if part.precedence >= precedence else f"({part.canonical()})"


@final
@dataclass(frozen=True, slots=True)
class Constant:
    """TRUE or FALSE as a condition."""

    value: bool
    precedence = 3

    def canonical(self) -> str:
        """Return the text."""
        return str(self.value).upper()

    def compiled(self, _numbers: PropertyNumbers) -> Evaluate:
        """Return the evaluation."""
        level = TRUE if self.value else FALSE
        return lambda _values: level

    @property
    def cost(self) -> ConditionCost:
        """One step."""
        return ONE_STEP


@final
@dataclass(frozen=True, slots=True)
class Or:
    """At least one of several conditions."""

    parts: tuple[Condition, ...]
    precedence = 0

    def canonical(self) -> str:
        """Return the text."""
        return " OR ".join([_inner(part, 1) for part in self.parts])

    def compiled(self, numbers: PropertyNumbers) -> Evaluate:
        """Return the evaluation: the maximum."""
        parts = [part.compiled(numbers) for part in self.parts]

        def evaluate(values: Values) -> int:
            highest = FALSE
            for part in parts:
                if (level := part(values)) > highest:
                    if level == TRUE:
                        return TRUE
                    highest = level
            return highest

        return evaluate

    @property
    def cost(self) -> ConditionCost:
        """The costs of all parts."""
        return ConditionCost.of_chain(part.cost for part in self.parts)


@final
@dataclass(frozen=True, slots=True)
class And:
    """All of several conditions."""

    parts: tuple[Condition, ...]
    precedence = 1

    def canonical(self) -> str:
        """Return the text."""
        return " AND ".join([_inner(part, 2) for part in self.parts])

    def compiled(self, numbers: PropertyNumbers) -> Evaluate:
        """Return the evaluation: the minimum."""
        parts = [part.compiled(numbers) for part in self.parts]

        def evaluate(values: Values) -> int:
            lowest = TRUE
            for part in parts:
                if (level := part(values)) < lowest:
                    if level == FALSE:
                        return FALSE
                    lowest = level
            return lowest

        return evaluate

    @property
    def cost(self) -> ConditionCost:
        """The costs of all parts."""
        return ConditionCost.of_chain(part.cost for part in self.parts)


@final
@dataclass(frozen=True, slots=True)
class Not:
    """The opposite of a condition; UNKNOWN stays UNKNOWN."""

    part: Condition
    precedence = 2

    def canonical(self) -> str:
        """Return the text."""
        return f"NOT {_inner(self.part, 2)}"

    def compiled(self, numbers: PropertyNumbers) -> Evaluate:
        """Return the evaluation."""
        return _negated(self.part.compiled(numbers))

    @property
    def cost(self) -> ConditionCost:
        """The cost of the part, and one step."""
        return ConditionCost.of_chain([self.part.cost])


def _negated(evaluate: Evaluate) -> Evaluate:
    return lambda values: TRUE - evaluate(values)


@final
@dataclass(frozen=True, slots=True)
class IsNull:
    """A property is missing, or is not."""

    subject: Property
    is_negated: bool
    precedence = 3

    def canonical(self) -> str:
        """Return the text."""
        return f"{_shown(self.subject)} IS {'NOT ' if self.is_negated else ''}NULL"

    def compiled(self, numbers: PropertyNumbers) -> Evaluate:
        """Return the evaluation, which is never UNKNOWN."""
        at = numbers.number_of(self.subject.name)
        missing, present = (FALSE, TRUE) if self.is_negated else (TRUE, FALSE)
        return lambda values: missing if values[at] is None else present

    @property
    def cost(self) -> ConditionCost:
        """One step."""
        return ONE_STEP


@final
@dataclass(frozen=True, slots=True)
class In:
    """The value of a property is one of several texts, or is not."""

    subject: Property
    texts: frozenset[str]
    is_negated: bool
    precedence = 3

    def canonical(self) -> str:
        """Return the text, with the values in order."""
        texts = ", ".join([_shown(text) for text in sorted(self.texts)])
        return f"{_shown(self.subject)} {'NOT ' if self.is_negated else ''}IN ({texts})"

    def compiled(self, numbers: PropertyNumbers) -> Evaluate:
        """Return the evaluation."""
        at, texts = numbers.number_of(self.subject.name), self.texts
        inside, outside = (FALSE, TRUE) if self.is_negated else (TRUE, FALSE)

        def evaluate(values: Values) -> int:
            if (value := values[at]) is None:
                return UNKNOWN
            return inside if value in texts else outside

        return evaluate

    @property
    def cost(self) -> ConditionCost:
        """One step: the number of texts has an effect on the memory only."""
        memory_bytes = ONE_STEP.memory_bytes + TEXT_OF_IN_BYTES * len(self.texts)
        return ONE_STEP._replace(memory_bytes=memory_bytes)


@final
@dataclass(frozen=True, slots=True)
class Between:
    """The value of a property is at least `low` and at most `high`, or is not."""

    subject: Property
    low: Number | str
    high: Number | str
    is_negated: bool
    precedence = 3

    def canonical(self) -> str:
        """Return the text."""
        word = "NOT BETWEEN" if self.is_negated else "BETWEEN"
        return f"{_shown(self.subject)} {word} {_shown(self.low)} AND {_shown(self.high)}"

    def compiled(self, numbers: PropertyNumbers) -> Evaluate:
        """Return the evaluation."""
        low = Comparison(self.subject, ">=", self.low).compiled(numbers)
        high = Comparison(self.subject, "<=", self.high).compiled(numbers)

        def evaluate(values: Values) -> int:
            return min(low(values), high(values))

        return _negated(evaluate) if self.is_negated else evaluate

    @property
    def cost(self) -> ConditionCost:
        """The cost of two comparisons."""
        return ONE_STEP if isinstance(self.low, str) else TWO_NUMBERS_COST


@final
@dataclass(frozen=True, slots=True)
class TextMatch:
    """The value of a property has a text inside, at its begin or at its end, or has not."""

    subject: Property
    word: str  # CONTAINS, STARTSWITH or ENDSWITH
    text: str
    is_negated: bool
    precedence = 3

    def canonical(self) -> str:
        """Return the text."""
        word = f"NOT {self.word}" if self.is_negated else self.word
        return f"{_shown(self.subject)} {word} {_shown(self.text)}"

    def compiled(self, numbers: PropertyNumbers) -> Evaluate:
        """Return the evaluation."""
        at, text = numbers.number_of(self.subject.name), self.text
        matches: Callable[[str, str], bool] = {
            "CONTAINS": str.__contains__,
            "STARTSWITH": str.startswith,
            "ENDSWITH": str.endswith,
        }[self.word]
        found, other = (FALSE, TRUE) if self.is_negated else (TRUE, FALSE)

        def evaluate(values: Values) -> int:
            if (value := values[at]) is None:
                return UNKNOWN
            return found if matches(value, text) else other

        return evaluate

    @property
    def cost(self) -> ConditionCost:
        """One step, and the search of CONTAINS."""
        return SCAN_COST if self.word == "CONTAINS" else ONE_STEP


@final
@dataclass(frozen=True, slots=True)
class Comparison:
    """Two operands and one of `=`, `<>`, `<`, `<=`, `>` and `>=`."""

    left: Operand
    operator: str
    right: Operand
    precedence = 3

    def canonical(self) -> str:
        """Return the text."""
        return f"{_shown(self.left)} {self.operator} {_shown(self.right)}"

    def exchanged(self) -> Comparison:
        """Return the same comparison with the operands in the other order."""
        return Comparison(self.right, _EXCHANGED[self.operator], self.left)

    def compiled(self, numbers: PropertyNumbers) -> Evaluate:
        """Return the evaluation."""
        left, operator, right = self.left, self.operator, self.right
        if not isinstance(left, Property):
            if isinstance(right, Property):
                return self.exchanged().compiled(numbers)
            level = _compare_literals(left, operator, right)
            return lambda _values: level
        at = numbers.number_of(left.name)
        if isinstance(right, Property):
            return _two_properties(at, operator, numbers.number_of(right.name))
        if isinstance(right, bool):
            return _property_and_boolean(at, operator, right)
        if isinstance(right, str):
            return _property_and_text(at, operator, right)
        return _property_and_number(at, operator, right)

    @property
    def cost(self) -> ConditionCost:
        """The cost of reading the numbers in the values."""
        operands = (self.left, self.right)
        if all(isinstance(operand, Property) for operand in operands):
            return TWO_NUMBERS_COST if self.operator in _ORDERS else ONE_STEP
        return NUMBER_COST if any(map(is_number, operands)) else ONE_STEP


def is_number(operand: Operand) -> bool:
    """Return whether an operand is a number; TRUE and FALSE are not."""
    return isinstance(operand, int | Decimal) and not isinstance(operand, bool)


def _property_and_text(at: int, operator: str, text: str) -> Evaluate:
    if operator in _ORDERS:
        order = _ORDERS[operator]

        def compare(values: Values) -> int:
            if (value := values[at]) is None:
                return UNKNOWN
            return TRUE if order(value, text) else FALSE

        return compare
    same, other = (TRUE, FALSE) if operator == "=" else (FALSE, TRUE)

    def equal(values: Values) -> int:
        if (value := values[at]) is None:
            return UNKNOWN
        return same if value == text else other

    return equal


def _property_and_number(at: int, operator: str, number: Number) -> Evaluate:
    def evaluate(values: Values) -> int:
        if (value := values[at]) is None or (found := number_of(value)) is None:
            return UNKNOWN
        return _level(found, operator, number)

    return evaluate


def _property_and_boolean(at: int, operator: str, boolean: bool) -> Evaluate:
    expected = str(boolean).lower()
    same, other = (TRUE, FALSE) if operator == "=" else (FALSE, TRUE)

    def evaluate(values: Values) -> int:
        # A long value is not changed to lower case: that takes 0.1 ms.
        if (value := values[at]) is None or len(value) > _TRUTH_CHARS_MAX:
            return UNKNOWN
        if (found := value.lower()) not in ("true", "false"):
            return UNKNOWN
        return same if found == expected else other

    return evaluate


def _two_properties(at: int, operator: str, other_at: int) -> Evaluate:
    def evaluate(values: Values) -> int:
        if (value := values[at]) is None or (other := values[other_at]) is None:
            return UNKNOWN
        if operator not in _ORDERS:
            return _level(value, operator, other)
        found, limit = number_of(value), number_of(other)
        return UNKNOWN if found is None or limit is None else _level(found, operator, limit)

    return evaluate


def _compare_literals(left: Literal, operator: str, right: Literal) -> int:
    """Compare two literals of a kind; a text beside a number or a truth value is read as such."""
    if isinstance(left, str) and not isinstance(right, str):
        return _compare_read(left, operator, right)
    if isinstance(right, str) and not isinstance(left, str):
        return _compare_read(right, _EXCHANGED[operator], left)
    return _level(left, operator, right)


def _compare_read(text: str, operator: str, literal: Literal) -> int:
    evaluate = Comparison(Property(""), operator, literal).compiled(PropertyNumbers())
    return evaluate([text])


def _level(left: Literal, operator: str, right: Literal) -> int:
    if operator in _ORDERS:
        holds = _ORDERS[operator](left, right)
    else:
        holds = (left == right) is (operator == "=")
    return TRUE if holds else FALSE
