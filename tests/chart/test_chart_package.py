"""The chart as a package has what reviewers of charts expect, and no invented address."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.chart import CHART, HELM, ROOT, need_helm
from tools.chart_readme import described_values

CHART_FILE: dict[str, Any] = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))


@pytest.mark.parametrize(
    "field", ["name", "description", "version", "appVersion", "keywords", "maintainers", "icon"]
)
def test_chart_metadata_is_complete(field: str) -> None:
    """`home` and `sources` need a public address, which the project does not have yet."""
    assert CHART_FILE[field]
    assert not {"home", "sources"} & CHART_FILE.keys()


def test_the_chart_has_the_version_of_the_package() -> None:
    package = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert CHART_FILE["version"] == CHART_FILE["appVersion"] == package["version"]
    changes = (CHART / "CHANGELOG.md").read_text("utf-8")
    assert re.search(rf"^## {re.escape(package['version'])}\b", changes, re.MULTILINE)


def test_the_chart_has_the_licence_of_the_project() -> None:
    assert (CHART / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_the_readme_has_a_row_for_each_value() -> None:
    """A value in a block without a comment, such as the kinds of a probe, belongs to its map."""
    values = (CHART / "values.yaml").read_text("utf-8")
    described = {value.path for value in described_values(values)}
    assert len(described) == len(re.findall(r"^ *# -- ", values, re.MULTILINE))
    assert {"brokerGroups[].minInSync", "proxy.tls.mode", "monitoring.alerts.enabled"} <= described
    missing = []
    for name, value in yaml.safe_load(values).items():
        if isinstance(value, dict) and value:
            missing += [f"{name}.{key}" for key in value if not covered(f"{name}.{key}", described)]
        elif name not in described:
            missing.append(name)
    assert missing == []


def covered(path: str, described: set[str]) -> bool:
    return path in described or any(one.startswith(f"{path}.") for one in described)


def test_the_readme_shows_an_optional_value_and_a_default() -> None:
    readme = (CHART / "README.md").read_text("utf-8")
    assert "| `brokerGroups[].minInSync` |  | Replicas that must store" in readme
    assert "| `proxy.service.port` | `8081` | Port that clients use. |" in readme
    assert "| `proxy.service` |  | The Service that clients use. |" in readme


SIGNER = "A Signer <signer@example.com>"
KEY = f"""
%no-protection
Key-Type: RSA
Key-Length: 2048
Name-Real: {SIGNER.partition(" <")[0]}
Name-Email: signer@example.com
%commit
"""


@pytest.mark.skipif(shutil.which("gpg") is None, reason="gpg is not installed")
def test_a_signed_package_is_verified(tmp_path: Path) -> None:
    """deploy/package/make calls Helm in this way."""
    need_helm()
    home = tmp_path / "gnupg"
    home.mkdir(mode=0o700)
    gpg = ["gpg", "--homedir", str(home), "--batch", "--quiet"]
    ring, public = tmp_path / "secret.gpg", tmp_path / "public.gpg"
    try:
        subprocess.run([*gpg, "--gen-key"], input=KEY.encode(), check=True)
        subprocess.run([*gpg, "--export-secret-keys", "--output", str(ring)], check=True)
        subprocess.run([*gpg, "--export", "--output", str(public)], check=True)
    finally:
        subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], check=False)
    helm(
        *("package", CHART, "--destination", tmp_path, "--sign"),
        *("--key", "A Signer", "--keyring", ring),
    )
    [package] = tmp_path.glob("*.tgz")
    assert Path(f"{package}.prov").exists()
    assert SIGNER in helm("verify", package, "--keyring", public)
    package.write_bytes(package.read_bytes() + b"x")
    with pytest.raises(subprocess.CalledProcessError):
        helm("verify", package, "--keyring", public)


def helm(*arguments: str | Path) -> str:
    return subprocess.run(
        [HELM, *arguments], check=True, capture_output=True, text=True, timeout=60
    ).stdout


def test_the_package_has_what_an_operator_reads(tmp_path: Path) -> None:
    need_helm()
    helm("package", CHART, "--destination", tmp_path)
    [package] = tmp_path.glob("*.tgz")
    with tarfile.open(package) as archive:
        names = {name.removeprefix("tidemill/") for name in archive.getnames()}
    assert {
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "values-prod.yaml",
        "crds/brokergroups.yaml",
    } <= (names)
    assert "schema.in.yaml" not in names
    # Helm keeps a compressed chart in each Secret of a release, which may have 1 MiB.
    assert package.stat().st_size < 256 * 1024
