"""What an image is made of, as CycloneDX: run inside it, by `make image`."""

import importlib.metadata
import json
import platform
import sys
from pathlib import Path
from typing import Any

DPKG = Path("/var/lib/dpkg/status")


def python_packages() -> list[dict[str, Any]]:
    """Return what pip has installed."""
    found = []
    for one in importlib.metadata.distributions():
        name, version = one.metadata["Name"], one.version
        component: dict[str, Any] = {
            "type": "library",
            "name": name,
            "version": version,
            "purl": f"pkg:pypi/{name.lower().replace('_', '-')}@{version}",
        }
        if licence := one.metadata.get("License-Expression"):
            component["licenses"] = [{"expression": licence}]
        found.append(component)
    return found


def debian_packages() -> list[dict[str, Any]]:
    """Return what Debian has installed."""
    found = []
    for paragraph in DPKG.read_text("utf-8").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in paragraph.splitlines() if ": " in line[:40])
        if fields.get("Status", "").endswith(" installed"):
            name, version = fields["Package"], fields["Version"]
            purl = f"pkg:deb/debian/{name}@{version}?arch={fields['Architecture']}"
            found.append({"type": "library", "name": name, "version": version, "purl": purl})
    return found


def main() -> None:
    """Print the bill."""
    interpreter = {
        "type": "library",
        "name": "python",
        "version": platform.python_version(),
        "purl": f"pkg:generic/python@{platform.python_version()}",
    }
    components = [interpreter, *python_packages(), *debian_packages()]
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "container", "name": sys.argv[1]}},
        "components": sorted(components, key=lambda one: str(one["purl"])),
    }
    print(json.dumps(bill, indent=1))


if __name__ == "__main__":
    main()
