"""SQL92 filters: the grammar.

    filter     = or ;
    or         = and { "OR" and } ;
    and        = not { "AND" not } ;
    not        = { "NOT" } primary ;
    primary    = "(" or ")" | "TRUE" | "FALSE" | predicate ;
    predicate  = property "IS" [ "NOT" ] "NULL"
               | property [ "NOT" ] "IN" "(" text { "," text } ")"
               | property [ "NOT" ] "BETWEEN" bound "AND" bound
               | property [ "NOT" ] ( "CONTAINS" | "STARTSWITH" | "ENDSWITH" ) text
               | operand ( "=" | "<>" | "<" | "<=" | ">" | ">=" ) right ;
    operand    = property | right ;
    right      = name | number | text | "TRUE" | "FALSE" ;
    bound      = number | text ;
    property   = name | quoted ;

A filter that meant something else would lose messages. So the parser accepts a text only as a
whole, and it rejects conditions that can never be true, such as a property alone (ADR 0082).
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Final, TypeVar, cast, final

from tidemill.common.errors import FilterBeyondLimit, IllegalFilter
from tidemill.message.sql92.conditions import (
    EXPONENT_MAX,
    And,
    Between,
    Comparison,
    Condition,
    Constant,
    In,
    IsNull,
    Not,
    Number,
    Operand,
    Or,
    Property,
    TextMatch,
    is_number,
)
from tidemill.message.sql92.tokens import FilterToken, at_position, shown_token, tokens_of

DEPTH_MAX: Final = 32  # of parentheses and NOT
PREDICATES_MAX: Final = 128
TEXTS_OF_IN_MAX: Final = 1_000
TEXTS_MAX: Final = 4_096  # of all IN of a filter
_ORDERS: Final = ("<", "<=", ">", ">=")
_COMPARISONS: Final = ("=", "<>", *_ORDERS)
_TEXT_MATCHES: Final = ("CONTAINS", "STARTSWITH", "ENDSWITH")
_Chain = TypeVar("_Chain", Or, And)


def parse(expression: str) -> Condition:
    """Parse a filter. Raises IllegalFilter, with the position and a hint."""
    return _Parser(expression).parse()


@final
class _Parser:
    def __init__(self, expression: str) -> None:
        self._expression = expression
        # Tokens are read one by one: a text beyond a limit is rejected before its rest is read.
        self._rest = tokens_of(expression)
        self._next = next(self._rest)
        self._following = next(self._rest, self._next)  # after the end comes the end
        self._depth = 0
        self._predicates = 0
        self._texts = 0  # of all IN

    def parse(self) -> Condition:
        condition = self._or()
        if self._next.kind == "end":
            return condition
        hint = "a filter ends here, or goes on with AND or OR"
        if self._next.is_word(*_COMPARISONS):
            hint = "comparisons do not chain; join two with AND, or use BETWEEN"
        elif self._next.is_word("+", "-"):
            hint = "a filter has no arithmetic"
        elif self._next.is_word(")"):
            hint = "no parenthesis is open"
        raise self._unexpected(hint)

    # ------------------------------------------------------------ tokens

    def _take(self) -> FilterToken:
        token = self._next
        self._next = self._following
        self._following = next(self._rest, self._next)
        return token

    def _take_word(self, *words: str) -> bool:
        """Take the next token if it is one of these keywords or symbols."""
        if self._next.is_word(*words):
            self._take()
            return True
        return False

    def _expect(self, word: str, hint: str) -> None:
        if not self._take_word(word):
            raise self._unexpected(hint)

    def _unexpected(self, hint: str, token: FilterToken | None = None) -> IllegalFilter:
        token = token or self._next
        return self._error(f"unexpected {shown_token(self._expression, token)}; {hint}", token)

    def _error(self, problem: str, token: FilterToken) -> IllegalFilter:
        return IllegalFilter(at_position(self._expression, token.at, problem))

    def _beyond_limit(self, problem: str, token: FilterToken) -> FilterBeyondLimit:
        return FilterBeyondLimit(at_position(self._expression, token.at, problem))

    # ------------------------------------------------------------ conditions

    def _or(self) -> Condition:
        return self._chain("OR", Or, self._and)

    def _and(self) -> Condition:
        return self._chain("AND", And, self._not)

    def _chain(self, word: str, kind: type[_Chain], part: Callable[[], Condition]) -> Condition:
        parts = [part()]
        while self._take_word(word):
            parts.append(part())
        if len(parts) == 1:
            return parts[0]
        # Parentheses around a part of the same kind have no effect.
        flat = [each.parts if isinstance(each, kind) else (each,) for each in parts]
        return kind(tuple(one for some in flat for one in some))

    def _not(self) -> Condition:
        if not self._next.is_word("NOT"):
            return self._primary()
        token = self._take()
        if self._is_alone():
            raise self._unexpected("a property alone is no condition; write `= FALSE` behind it")
        return Not(self._deeper(token, self._not))

    def _deeper(self, token: FilterToken, inner: Callable[[], Condition]) -> Condition:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise self._beyond_limit(f"more than {DEPTH_MAX} levels of parentheses and NOT", token)
        condition = inner()
        self._depth -= 1
        return condition

    def _primary(self) -> Condition:
        if self._next.is_word("("):
            condition = self._deeper(self._take(), self._or)
            self._expect(")", "a parenthesis is still open")
            return condition
        is_truth = self._next.is_word("TRUE", "FALSE")
        if is_truth and not self._following.is_word(*_COMPARISONS):
            return Constant(self._take().value == "TRUE")
        return self._predicate()

    def _is_alone(self) -> bool:
        """Whether the next token is a property without an operator behind it."""
        if self._next.kind not in ("name", "quoted"):
            return False
        return self._following.kind == "end" or self._following.is_word("AND", "OR", ")")

    def _predicate(self) -> Condition:
        first = self._next
        self._predicates += 1
        if self._predicates > PREDICATES_MAX:
            raise self._beyond_limit(f"more than {PREDICATES_MAX} conditions", first)
        if self._is_alone():
            raise self._unexpected("a property alone is no condition; write `= TRUE` behind it")
        subject: Operand
        if first.kind in ("name", "quoted"):
            subject = Property(self._take().value)
        else:
            subject = self._right()
        return self._word_predicate(subject, first) or self._comparison(subject, first)

    def _word_predicate(self, subject: Operand, first: FilterToken) -> Condition | None:
        """Read the rest of a predicate with a keyword; None if no keyword follows."""
        token = self._next
        if not token.is_word("IS", "NOT", "IN", "BETWEEN", *_TEXT_MATCHES):
            return None
        if not isinstance(subject, Property):
            raise self._unexpected(f"only a property may stand before {token.value}", first)
        if self._take_word("IS"):
            is_negated = self._take_word("NOT")
            self._expect("NULL", "IS needs NULL or NOT NULL")
            return IsNull(subject, is_negated)
        is_negated = self._take_word("NOT")
        if self._take_word("IN"):
            return In(subject, self._texts_of_in(), is_negated)
        if self._take_word("BETWEEN"):
            return self._between(subject, is_negated=is_negated)
        if not self._next.is_word(*_TEXT_MATCHES):
            raise self._unexpected(
                "NOT stands before IN, BETWEEN, CONTAINS, STARTSWITH and ENDSWITH"
            )
        word = self._take().value
        token = self._next
        text = self._text(f"{word} needs a text in single quotes")
        if not text:
            raise self._error(f"{word} needs a text that is not empty", token)
        return TextMatch(subject, word, text, is_negated)

    def _text(self, hint: str) -> str:
        if self._next.kind != "text":
            raise self._unexpected(hint)
        return self._take().value

    def _texts_of_in(self) -> frozenset[str]:
        hint = "IN needs texts in single quotes, in parentheses"
        first = self._next
        self._expect("(", hint)
        texts = [self._text(hint)]
        while self._take_word(","):
            texts.append(self._text(hint))
        self._expect(")", "a text ends with , or )")
        self._texts += len(texts)
        if len(texts) > TEXTS_OF_IN_MAX or self._texts > TEXTS_MAX:
            limits = f"more than {TEXTS_OF_IN_MAX} texts, or {TEXTS_MAX} in the whole filter"
            raise self._beyond_limit(f"IN has {limits}", first)
        return frozenset(texts)

    def _between(self, subject: Property, *, is_negated: bool) -> Between:
        first = self._next
        low = self._bound()
        self._expect("AND", "BETWEEN needs two bounds with AND between them")
        high = self._bound()
        if isinstance(low, str) is not isinstance(high, str):
            raise self._error("one bound of BETWEEN is a number, the other one a text", first)
        # Both are texts, or both are numbers.
        if cast("Number", low) > cast("Number", high):
            raise self._error("the first bound of BETWEEN is above the second one", first)
        return Between(subject, low, high, is_negated)

    def _bound(self) -> Number | str:
        if self._next.kind not in ("text", "integer", "decimal") and not self._next.is_word(
            "+", "-"
        ):
            raise self._unexpected("a bound of BETWEEN is a number, or a text in single quotes")
        return self._literal()

    def _comparison(self, subject: Operand, first: FilterToken) -> Comparison:
        operator = self._next
        if not self._take_word(*_COMPARISONS):
            raise self._unexpected(self._hint_for_operator())
        right_token = self._next
        if right_token.kind == "quoted":
            shown = right_token.value.replace("'", "''")
            raise self._unexpected(
                f"write '{shown[:20]}' for a text; a quoted name stands on the left"
            )
        right = self._right()
        found = Comparison(subject, operator.value, right)
        if operator.value in _ORDERS and (isinstance(subject, bool) or isinstance(right, bool)):
            raise self._unexpected("compare TRUE and FALSE with = or <>", operator)
        for literal, other in ((subject, right), (right, subject)):
            if isinstance(literal, bool) and is_number(other):
                raise self._unexpected("a number is never equal to TRUE or FALSE", first)
        # A property stands on the left in the canonical form.
        is_left = isinstance(subject, Property) or not isinstance(right, Property)
        return found if is_left else found.exchanged()

    def _hint_for_operator(self) -> str:
        token = self._next
        if token.is_word("+", "-"):
            return "a filter has no arithmetic; put a name with this character in double quotes"
        if token.kind == "name" and token.value.upper() == "LIKE":
            return "use STARTSWITH, ENDSWITH or CONTAINS"
        return "a comparison follows: = <> < <= > >= IS IN BETWEEN CONTAINS STARTSWITH ENDSWITH"

    def _right(self) -> Operand:
        token = self._next
        if token.kind == "name":
            return Property(self._take().value)
        if self._take_word("TRUE", "FALSE"):
            return token.value == "TRUE"
        if token.kind in ("text", "integer", "decimal") or token.is_word("+", "-"):
            return self._literal()
        if token.is_word("NULL"):
            raise self._unexpected("write IS NULL behind the property")
        raise self._unexpected(
            "a property, a number, a text in single quotes, TRUE or FALSE follows"
        )

    def _literal(self) -> Number | str:
        if self._next.kind == "text":
            return self._take().value
        sign = -1 if self._next.is_word("-") else 1
        self._take_word("+", "-")
        token = self._next
        if token.kind == "integer":
            return sign * int(self._take().value.removesuffix("L"))
        if token.kind != "decimal":
            raise self._unexpected("a number follows a sign")
        exponent = token.value.lower().partition("e")[2]
        if exponent and abs(int(exponent)) > EXPONENT_MAX:
            raise self._error(f"an exponent is at most {EXPONENT_MAX}", token)
        number = Decimal(self._take().value)
        # The canonical form of 10e308 is 1.0E+309.
        exponent = str(number).partition("E")[2]
        if exponent and abs(int(exponent)) > EXPONENT_MAX:
            limit = f"an exponent is at most {EXPONENT_MAX}"
            raise self._error(f"{limit}, and this number has {exponent}", token)
        # Not by a multiplication, which rounds.
        return number if sign > 0 else number.copy_negate()
