"""Make foreign-types.json.gz: the kinds that the chart renders and others describe.

python -m tests.chart.cut_foreign_types        # asks the proxy of Go modules for the two below

cert-manager and the Gateway API publish their kinds with their Go modules.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import yaml

from tests.chart.cut_types import cut
from tests.support.kubernetes_types import FOREIGN_FILE

# By module and version, the files with the kinds.
MODULES = {
    "github.com/cert-manager/cert-manager@v1.18.2": (
        "deploy/crds/crd-certificates.yaml",
        "deploy/crds/crd-issuers.yaml",
    ),
    "sigs.k8s.io/gateway-api@v1.3.0": (
        "config/crd/standard/gateway.networking.k8s.io_grpcroutes.yaml",
    ),
}


def main() -> None:
    """Write the file."""
    kinds: dict[str, str] = {}
    types: dict[str, Any] = {}
    for module, files in MODULES.items():
        folder = downloaded(module)
        for file in files:
            for definition in yaml.safe_load_all((folder / file).read_text("utf-8")):
                for version in definition["spec"]["versions"]:
                    kind = definition["spec"]["names"]["kind"]
                    name = f"{definition['spec']['group']}/{version['name']} {kind}"
                    kinds[name] = name
                    types[name] = cut(version["schema"]["openAPIV3Schema"])
    text = json.dumps({"kinds": kinds, "types": types}, sort_keys=True)
    FOREIGN_FILE.write_bytes(gzip.compress(text.encode(), mtime=0))


def downloaded(module: str) -> Path:
    """Return the folder in which Go keeps a module."""
    with tempfile.TemporaryDirectory() as elsewhere:  # Of no other module.
        told = subprocess.run(
            ["go", "mod", "download", "-json", module],
            capture_output=True,
            check=True,
            cwd=elsewhere,
        ).stdout
    return Path(json.loads(told)["Dir"])


if __name__ == "__main__":
    main()
