"""Configuration of transactions. Its defaults are defined here only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionConfig:
    """The limits of transactions at one broker."""

    open_max: int = 1_000_000  # half messages: 48 MB of memory
    outcomes_max: int = 1_000_000  # remembered results: 52 MB of memory
    outcome_memory_ms: int = 3_600_000
    # An operator recovers an expired message within this time; it holds the state floor.
    expired_memory_ms: int = 72 * 3_600_000
