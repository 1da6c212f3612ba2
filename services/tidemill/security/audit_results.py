"""The results of records of the audit log."""

from __future__ import annotations

from enum import StrEnum


class AuditResult(StrEnum):
    """What became of a change, or of a call."""

    OK = "ok"
    BEGUN = "begun"
    FAILED = "failed"
    REFUSED = "refused"
    WOULD_REFUSE = "would_refuse"
