"""The search for an existing name that a new name misspells."""

from __future__ import annotations

import string
from collections.abc import Container, Iterator
from typing import Final

from tidemill.message.resource_names import NAMESPACE_SEPARATOR

# Digits are left out: names that differ in one are a series, such as orders-1 and orders-2.
_LETTERS: Final = string.ascii_letters + "-_"
CHARS_MIN: Final = 4  # shorter names differ in one character by chance
CHARS_MAX: Final = 64  # bounds the number of candidates to about 7,000


def find_similar(name: str, names: Container[str]) -> str | None:
    """Return one of `names` that differs from `name` in one typing error, or in case.

    A typing error is a missing, an additional or another letter, or two that changed places. The
    time depends on the length of `name` and not on the number of `names`. The namespace is not
    searched: tenant-a and tenant-b are two.
    """
    namespace, separator, bare = name.rpartition(NAMESPACE_SEPARATOR)
    if not CHARS_MIN <= len(bare) <= CHARS_MAX:
        return None
    similar = (f"{namespace}{separator}{each}" for each in _candidates(bare) if each != bare)
    return next((each for each in similar if each in names), None)


def _candidates(name: str) -> Iterator[str]:
    yield name.lower()
    for at in range(len(name) + 1):
        before, after = name[:at], name[at:]
        if after[:1] in _LETTERS:
            yield before + after[1:]
            for letter in _LETTERS:
                yield before + letter + after[1:]
        if len(after) > 1:
            yield before + after[1] + after[0] + after[2:]
        for letter in _LETTERS:
            yield before + letter + after
