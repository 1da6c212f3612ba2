"""The checks of the half messages of a topic."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from tidemill.broker.engine.layout.record import UnknownRecord
from tidemill.common.errors import BadRequest

TRANSACTION_LEVEL: Final = 4  # feature level of transactions

FIRST_CHECK_MS_MIN: Final = 1_000
CHECK_MS_MAX: Final = 3_600_000  # of both times
ATTEMPTS_MAX: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionPolicy:
    """When a half message is checked, and how often."""

    first_check_ms: int = 6_000  # after the half message; a duration in the message replaces it
    period_ms: int = 30_000  # between two checks, and from the last one to the expiry
    attempts: int = 15  # checks that are written to a producer, before the message expires

    def check(self) -> None:
        """Raise BadRequest if a value is outside of its bounds."""
        for name, value in (("firstCheckMs", self.first_check_ms), ("periodMs", self.period_ms)):
            if not FIRST_CHECK_MS_MIN <= value <= CHECK_MS_MAX:
                raise BadRequest(
                    f"{name} of a transaction policy is {FIRST_CHECK_MS_MIN} to {CHECK_MS_MAX} ms,"
                    f" not {value}"
                )
        if not 1 <= self.attempts <= ATTEMPTS_MAX:
            raise BadRequest(
                f"a transaction policy has 1 to {ATTEMPTS_MAX} attempts, not {self.attempts}"
            )

    def as_item(self) -> dict[str, Any]:
        """Return the policy as a field of a configuration item."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChange:
    """A change of the checks of a topic; None does not change a field."""

    first_check_ms: int | None = None
    period_ms: int | None = None
    attempts: int | None = None

    def apply_to(self, old: TransactionPolicy) -> TransactionPolicy:
        """Return the policy after the change. Raises BadRequest."""
        changes = {name: value for name, value in asdict(self).items() if value is not None}
        new = replace(old, **changes)
        new.check()
        return new


DEFAULT_POLICY: Final = TransactionPolicy()
NO_POLICY_CHANGE: Final = PolicyChange()


def decode_policy(item: dict[str, Any]) -> TransactionPolicy:
    """Read the JSON form. Raises UnknownRecord for an unknown field."""
    try:
        return TransactionPolicy(**item)
    except TypeError:
        raise UnknownRecord(f"transaction policy of a topic: {item}") from None
