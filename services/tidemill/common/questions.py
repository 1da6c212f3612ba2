"""Limits of the questions that a broker sends to a proxy; both ends use them (ADR 0032)."""

from __future__ import annotations

from typing import Final

QUESTIONS_MAX: Final = 64  # in flight from a broker to a proxy: those of operators and dashboards
CHECKS_MAX: Final = 256  # of half messages in flight from a broker to a proxy, beside the questions
ANSWER_TIMEOUT_MS_MAX: Final = 60_000  # the longest time for the answer of a client or a proxy
