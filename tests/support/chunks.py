"""Seeds of a property in parts, of which `make test` runs some and `make heavy` the rest."""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet


def chunks(count: int, *, light: int) -> list[ParameterSet]:
    """Return the numbers of the parts; those behind the first `light` are heavy."""
    return [pytest.param(n, marks=() if n < light else pytest.mark.heavy) for n in range(count)]
