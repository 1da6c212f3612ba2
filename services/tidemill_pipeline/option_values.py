"""Reading option values from text: numbers, flags, choices, durations and instants."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NoReturn, TypeVar

from tidemill_pipeline.errors import BadOption
from tidemill_pipeline.option_table import SPELLINGS, Option, spelt

_Choice = TypeVar("_Choice", bound=str)

_EPOCH: Final = datetime.fromtimestamp(0, UTC)
_UNIT_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}


def instant_ms(text: str) -> int | None:
    """Return an instant of ISO 8601 or milliseconds; None for any other text.

    An instant between two milliseconds is rounded up. A message that was stored at the earlier
    millisecond is then before the instant.
    """
    if re.fullmatch(r"\d{1,15}", text):
        return int(text)
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        return None
    # The pipeline uses UTC everywhere, so an instant without a zone is in UTC.
    aware = instant if instant.tzinfo is not None else instant.replace(tzinfo=UTC)
    return -((_EPOCH - aware) // timedelta(milliseconds=1))


class OptionReader:
    """Given options, read by the types of one table. Each method raises BadOption."""

    def __init__(
        self, given: Mapping[str, str], table: Sequence[Option], *, is_stream: bool | None
    ) -> None:
        self._table = {option.name.lower(): option for option in table}
        self._given = {name.lower(): value for name, value in given.items()}
        for name in sorted(given):
            option = self._table.get(name.lower())
            if option is None:
                raise BadOption(self._unknown(name))
            if is_stream is not None and not (option.stream if is_stream else option.batch):
                kind = "batch reads" if is_stream else "streams"
                raise BadOption(f"option {option.name} is for {kind} only")

    def _unknown(self, name: str) -> str:
        """Return the error text for an option that this table does not have.

        The suggestion may come from the other table: a replay takes the options of both and passes
        unknown options to the sink.
        """
        if name.lower() in SPELLINGS:
            return f"option {spelt(name)} is for {self._others()} only"
        near = difflib.get_close_matches(name.lower(), [*self._table, *SPELLINGS], n=1, cutoff=0.5)
        if not near:
            known = ", ".join(option.name for option in self._table.values())
            return f"there is no option {name}; known are {known}"
        whose = "" if near[0] in self._table else f", which is for {self._others()}"
        return f"there is no option {name}; did you mean {spelt(near[0])}{whose}?"

    def _others(self) -> str:
        return "writes" if "dataset" in self._table else "reads"

    def reject(self, name: str, why: str) -> NoReturn:
        """Raise BadOption with the option's name and value."""
        value = self._given.get(name.lower())
        raise BadOption(f"option {name}{'' if value is None else f' = {value}'}: {why}")

    def text(self, name: str) -> str:
        """Return the value or the default, without surrounding spaces."""
        key = name.lower()
        return self._given.get(key, self._table[key].default).strip()

    def is_given(self, name: str) -> bool:
        """Return whether the option has a value that is not empty."""
        return bool(self._given.get(name.lower(), "").strip())

    def names(self, name: str) -> tuple[str, ...]:
        """Return the parts of a list with commas."""
        return tuple(part for part in map(str.strip, self.text(name).split(",")) if part)

    def flag(self, name: str) -> bool:
        """Return true or false."""
        text = self.text(name).lower()
        if text not in {"true", "false"}:
            self.reject(name, "use true or false")
        return text == "true"

    def choice(self, name: str, choices: Sequence[_Choice]) -> _Choice:
        """Return one of the choices."""
        text = self.text(name).lower()
        for each in choices:
            if each == text:
                return each
        near = difflib.get_close_matches(text, choices, n=1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(choices)}"
        return self.reject(name, hint)

    def count(self, name: str) -> int | None:
        """Return a number of at least 1; None for an option without a value."""
        text = self.text(name)
        if not text:
            return None
        if not re.fullmatch(r"\d{1,18}", text) or int(text) < 1:
            self.reject(name, "use a number of at least 1")
        return int(text)

    def at_most(self, name: str, limit: int) -> int:
        """Return a number from 1 to `limit` of an option with a default."""
        value = self.count(name)
        assert value is not None, f"{name} has a default"
        if value > limit:
            self.reject(name, f"at most {limit} is allowed")
        return value

    def duration_ms(self, name: str) -> int:
        """Return a duration in milliseconds."""
        match = re.fullmatch(r"(\d{1,9})\s*(ms|s|m|h)", self.text(name).lower())
        if match is None:
            self.reject(name, "use a duration such as 500ms, 30s, 15m or 1h")
        return int(match[1]) * _UNIT_MS[match[2]]
