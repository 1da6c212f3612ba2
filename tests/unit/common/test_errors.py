"""The error tree and its table."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.common.errors import (
    CODES,
    RequestError,
    ServiceError,
    UnavailableError,
    codes_of,
    from_wire,
)

BRANCHES = {RequestError, UnavailableError}


def below(error: type[ServiceError]) -> Iterator[type[ServiceError]]:
    """Yield the subclasses of an error, except those that stay in their module."""
    for child in error.__subclasses__():
        if not child.__name__.startswith("_"):
            yield child
            yield from below(child)


def test_every_error_has_a_row_and_every_row_is_an_error() -> None:
    assert set(below(ServiceError)) - BRANCHES == set(CODES)


def test_an_error_survives_the_wire() -> None:
    for error in CODES:
        raised = from_wire(error.__name__, "why")
        assert type(raised) is error
        assert raised.message == "why"
        assert codes_of(raised) is CODES[error]
