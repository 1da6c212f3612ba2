"""Check the .proto files with buf: their style, and their changes since the last release.

buf.yaml has the rules. Without buf the check names the reason and passes, except in CI.

Usage: python -m tools.check_protos
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tools import releases

ROOT = Path(__file__).resolve().parent.parent
BUF = ROOT / "tools" / "buf" / "node_modules" / ".bin" / "buf"


def commands(root: Path, buf: Path) -> list[list[str]]:
    """Return the commands of the check; raise LookupError if the clone lacks the last release."""
    lint = [str(buf), "lint"]
    found = releases.read(root / "changes" / "releases.toml")
    if not found:
        return [lint]
    last = found[-1]
    known = ["git", "-C", str(root), "cat-file", "-e", f"{last.commit}^{{commit}}"]
    if subprocess.run(known, capture_output=True, check=False).returncode:
        raise LookupError(f"the clone lacks commit {last.commit[:12]}, release {last.version}")
    return [lint, [str(buf), "breaking", "--against", f".git#ref={last.commit}"]]


def main() -> int:
    """Run buf; return the exit status."""
    if not BUF.exists():
        print(f".proto files are not checked: {BUF} is missing; it needs npm", file=sys.stderr)
        return 1 if os.environ.get("CI") else 0
    try:
        planned = commands(ROOT, BUF)
    except LookupError as error:
        print(f"changes of .proto files are not checked: {error}", file=sys.stderr)
        planned = [[str(BUF), "lint"]]
    return max(subprocess.run(command, cwd=ROOT, check=False).returncode for command in planned)


if __name__ == "__main__":
    sys.exit(main())
