"""The audit of locked dependencies."""

from __future__ import annotations

import json
from pathlib import Path

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


def test_an_unreachable_index_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    lock = tmp_path / "a.lock"
    lock.write_text(f"good==1 --hash=sha256:{'0' * 64}\n")
    assert audit_dependencies.main([str(lock)]) == 0
    assert "not audited: pip-audit failed" in capsys.readouterr().err
