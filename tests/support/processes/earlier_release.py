"""The program of an earlier release, from its commit, for tests of mixed versions."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tools import releases

ROOT = Path(__file__).resolve().parents[3]
PARTS = ("services", "proto", "tools", "pyproject.toml")


def build_release(version: str, folder: Path) -> Mapping[str, str]:
    """Unpack a release into `folder`; return the environment with which it is imported.

    It runs in the virtual environment of the tests, with their versions of the libraries. A clone
    without the history of the release cannot run the test.
    """
    [commit] = [
        one.commit
        for one in releases.read(ROOT / "changes" / "releases.toml")
        if one.version == version
    ]
    known = ["git", "-C", str(ROOT), "cat-file", "-e", f"{commit}^{{commit}}"]
    if subprocess.run(known, capture_output=True, check=False).returncode:
        pytest.skip(f"the clone lacks commit {commit[:12]}, release {version}: fetch its history")
    archive = subprocess.run(
        ["git", "-C", ROOT, "archive", commit, "--", *PARTS], check=True, capture_output=True
    )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    subprocess.run([sys.executable, folder / "tools" / "generate_stubs.py"], check=True)
    return {"PYTHONPATH": str(folder / "services")}
