"""The results and actions of records of the audit log."""

from __future__ import annotations

from enum import StrEnum


class AuditResult(StrEnum):
    """What became of a change, or of a call."""

    OK = "ok"
    BEGUN = "begun"
    FAILED = "failed"
    REFUSED = "refused"
    WOULD_REFUSE = "would_refuse"


class AuditAction(StrEnum):
    """The actions of records: those of rights (`acl.Action`)."""

    PUB = "Pub"
    SUB = "Sub"
    CREATE = "Create"
    UPDATE = "Update"
    DELETE = "Delete"
    GET = "Get"
    LIST = "List"
