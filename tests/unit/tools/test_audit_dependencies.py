"""The audit of locked dependencies."""

from __future__ import annotations

import json

import pytest

from tools import audit_dependencies
from tools.audit_dependencies import AuditResult, read

FOUND = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["1.2"]}
REPORT = json.dumps(
    {
        "dependencies": [
            {"name": "good", "version": "1", "vulns": []},
            {"name": "bad", "version": "1.1", "vulns": [FOUND]},
            {"name": "hidden", "skip_reason": "not found"},
        ]
    }
)


def test_a_report_has_vulnerable_and_unknown_dependencies() -> None:
    assert read(REPORT) == AuditResult(["bad 1.1: PYSEC-1, fixed in 1.2"], 2, 1)


@pytest.mark.parametrize("accepted", ["PYSEC-1", "CVE-1"])
def test_an_accepted_advisory_is_left_out(monkeypatch: pytest.MonkeyPatch, accepted: str) -> None:
    monkeypatch.setattr(audit_dependencies, "ACCEPTED", {accepted: "not reachable"})
    assert not read(REPORT).vulnerable
