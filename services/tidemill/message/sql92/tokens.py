"""The tokens of a SQL92 filter, with their positions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from tidemill.common.errors import IllegalFilter
from tidemill.message.sql92.conditions import KEYWORDS

SHOWN_CHARS: Final = 40  # of the expression, in an error
_TOKEN: Final = re.compile(
    r"""
      (?P<blank>   [ \t\r\n\f]+ | --[^\r\n]* | /\*.*?\*/ )
    | (?P<decimal> (?:[0-9]+\.[0-9]* | \.[0-9]+)(?:[eE][+-]?[0-9]+)? | [0-9]+[eE][+-]?[0-9]+ )
    | (?P<integer> (?:0|[1-9][0-9]*) L? )
    | (?P<name>    [A-Za-z_$][A-Za-z0-9_$]* )
    | (?P<text>    '(?:[^']|'')*' )
    | (?P<quoted>  "(?:[^"]|"")*" )
    | (?P<symbol>  <> | <= | >= | =(?!=) | [<>(),+-] )
    """,
    re.VERBOSE | re.DOTALL,
)
_PART_OF_NUMBER: Final = re.compile(r"[A-Za-z0-9_]")
_END: Final = "end"  # kind of the last token
# Texts of other languages, and what to write.
_HINTS: Final = (
    ("==", "use = to compare"),
    ("!=", "use <> to compare"),
    ("&&", "use AND"),
    ("||", "use OR"),
    ("/*", "this comment has no end"),
    ("'", "this text has no end"),
    ('"', "this quoted name has no end"),
    (".", "put a name with this character in double quotes"),
)


class FilterToken(NamedTuple):
    """A token of a filter."""

    kind: str  # keyword, name, quoted, text, integer, decimal, symbol or end
    # Keywords in capitals; a name or text without its quotes.
    value: str
    at: int  # position in the expression

    def is_word(self, *words: str) -> bool:
        """Whether this is one of these keywords or symbols."""
        return self.value in words and self.kind in ("keyword", "symbol")


def at_position(expression: str, at: int, problem: str) -> str:
    """Return the text of an error with its position. Columns count code points from 1."""
    line = expression.count("\n", 0, at) + 1
    column = at - expression.rfind("\n", 0, at)
    place = f"column {column}" if "\n" not in expression else f"line {line}, column {column}"
    return f"SQL filter, {place}: {problem}"


def shown_token(expression: str, token: FilterToken) -> str:
    """Return a token as it stands in the expression, for an error."""
    if token.kind == _END:
        return "the end"
    match = _TOKEN.match(expression, token.at)
    return shortened(match[0]) if match else shortened(expression[token.at :])


def shortened(text: str) -> str:
    """Return a part of an expression as an error may show it."""
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."


def tokens_of(expression: str) -> Iterator[FilterToken]:
    """Yield the tokens of an expression; the last one is its end. Raises IllegalFilter."""
    at = 0
    while at < len(expression):
        match = _TOKEN.match(expression, at)
        # In `010` and `2f`, the rest would otherwise be a token of its own.
        rest = match.end() if match and match.lastgroup in ("integer", "decimal") else None
        if match is None or (rest is not None and _PART_OF_NUMBER.match(expression, rest)):
            raise _unreadable(expression, at, is_number=match is not None)
        token = _token(match, at)
        if token is not None:
            yield token
        at = match.end()
    yield FilterToken(_END, "", at)


def _token(match: re.Match[str], at: int) -> FilterToken | None:
    """Return the token of a match; None for blanks and comments."""
    text = match[0]
    match match.lastgroup:
        case "blank":
            return None
        case "name" if text.upper() in KEYWORDS:
            return FilterToken("keyword", text.upper(), at)
        case "text":
            return FilterToken("text", text[1:-1].replace("''", "'"), at)
        case "quoted":
            return FilterToken("quoted", text[1:-1].replace('""', '"'), at)
        case kind:
            return FilterToken(str(kind), text, at)


def _syntax_error(expression: str, at: int, problem: str) -> IllegalFilter:
    return IllegalFilter(at_position(expression, at, problem))


def _unreadable(expression: str, at: int, *, is_number: bool) -> IllegalFilter:
    rest = expression[at:]
    if is_number:
        word = re.match(r"[A-Za-z0-9_.]+", rest)
        found = shortened(word[0]) if word else rest[0]
        return _syntax_error(expression, at, f"{found} is not a decimal number")
    for begin, hint in _HINTS:
        if rest.startswith(begin):
            return _syntax_error(expression, at, f"unexpected {begin}; {hint}")
    hint = "put a name with this character in double quotes, and a text in single quotes"
    return _syntax_error(expression, at, f"unexpected {rest[0]!r}; {hint}")
