"""Configuration of deduplication. Its defaults are defined here only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DedupConfig:
    """The limits of dedup keys at one broker."""

    memory_bytes: int = 64 << 20  # of all topics: 1,240,000 keys at least
