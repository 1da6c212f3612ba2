"""Fail if a locked dependency has a known vulnerability.

    python -m tools.audit_dependencies requirements.lock

The package index has the advisories. If it has none, as a mirror, or cannot be reached, this is
reported; then nothing was audited.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

TIMEOUT_S: Final = 120.0  # of the requests about one lock file
# Ids of advisories that do not concern us, with the reason.
ACCEPTED: Final[Mapping[str, str]] = {}


class AuditResult(NamedTuple):
    """The result for the dependencies of one lock file."""

    vulnerable: Sequence[str]  # one line each
    audited: int
    unknown: int  # dependencies whose advisories the index does not have


def main(locks: Sequence[str]) -> int:
    """Audit lock files; return 1 for a vulnerable dependency."""
    status = 0
    for lock in locks:
        try:
            result = read(audit(Path(lock)))
        except IndexUnreachable as error:
            print(f"{lock}: not audited: {error}", file=sys.stderr)
            continue
        for line in result.vulnerable:
            print(f"{lock}: {line}", file=sys.stderr)
            status = 1
        if result.unknown:
            print(
                f"{lock}: the package index has no advisories for {result.unknown} of"
                f" {result.audited + result.unknown} dependencies, which were not audited",
                file=sys.stderr,
            )
    return status


class IndexUnreachable(Exception):
    """pip-audit has made no report."""


def audit(lock: Path) -> str:
    """Return the report of pip-audit, JSON. Raises IndexUnreachable."""
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(lock)]
    options = ["--no-deps", "--disable-pip", "--format=json", "--progress-spinner=off"]
    try:
        done = subprocess.run(
            [*command, *options], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise IndexUnreachable(f"pip-audit took more than {TIMEOUT_S:g} s") from None
    if not done.stdout:
        last = done.stderr.strip().rpartition("\n")[2]
        raise IndexUnreachable(f"pip-audit failed: {last}")
    return done.stdout


def read(report: str) -> AuditResult:
    """Return the result in a report of pip-audit."""
    dependencies: list[dict[str, Any]] = json.loads(report)["dependencies"]
    vulnerable = [
        f"{one['name']} {one['version']}: {found['id']}, fixed in"
        f" {', '.join(found['fix_versions']) or 'no version'}"
        for one in dependencies
        for found in one.get("vulns", ())
        if not {found["id"], *found.get("aliases", ())} & ACCEPTED.keys()
    ]
    unknown = sum("skip_reason" in one for one in dependencies)
    return AuditResult(vulnerable, len(dependencies) - unknown, unknown)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
