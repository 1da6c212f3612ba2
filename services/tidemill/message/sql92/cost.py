"""The cost of one evaluation of a condition, and of keeping it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple


class ConditionCost(NamedTuple):
    """The work of one evaluation, beside the decoding of the message, and its memory."""

    steps: int  # of about half a microsecond
    scans: int  # searches of a text in a whole value
    memory_bytes: int  # estimated, beside the canonical text

    @classmethod
    def of_chain(cls, costs: Iterable[ConditionCost]) -> ConditionCost:
        """Return the sum of the costs of parts, and a step for their chain."""
        steps, scans, memory_bytes = map(sum, zip(*costs, strict=True))
        return cls(1 + steps, scans, CHAIN_BYTES + memory_bytes)


# Measured: a comparison of texts takes 0.1 us. A number of 64 digits takes 1.3 us, and two take
# 2.7 us.
ONE_STEP: Final = ConditionCost(1, 0, 600)
NUMBER_COST: Final = ConditionCost(4, 0, 900)
TWO_NUMBERS_COST: Final = ConditionCost(8, 0, 1_500)
SCAN_COST: Final = ConditionCost(1, 1, 600)
CHAIN_BYTES: Final = 300
TEXT_OF_IN_BYTES: Final = 140
