"""What both ends of a question to a proxy keep to: its broker, and the proxy itself (ADR 0032)."""

from __future__ import annotations

from typing import Final

QUESTIONS_MAX: Final = 64  # under way from a broker to a proxy: operators, and their dashboards
ANSWER_TIMEOUT_MS_MAX: Final = 60_000  # until a client, or a proxy, has answered; whatever is asked
