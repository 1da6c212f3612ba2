"""Generate what Grafana and Prometheus read: dashboards for the chart, and alerts for a laptop.

`make dashboards` writes them; a test fails while they differ from `tools/watching` and the chart.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
# As a script this module knows only its own folder.
sys.path.insert(0, str(ROOT))

from tools.watching import alerts, grafana  # noqa: E402  # See above.
from tools.watching.pages import PAGES  # noqa: E402  # See above.

DASHBOARDS: Final = ROOT / "charts" / "tidemill" / "files" / "dashboards"
RULES: Final = ROOT / "deploy" / "observability" / "alerts.yaml"


def documents() -> dict[Path, str]:
    """Return every generated file by its path."""
    dashboards = {DASHBOARDS / f"{page.name}.json": grafana.text_of(page) for page in PAGES}
    return {**dashboards, RULES: alerts.rule_file()}


def main() -> None:
    """Write the files, and remove the dashboards that are none any more."""
    made = documents()
    for path in set(DASHBOARDS.glob("*.json")) - set(made):
        path.unlink()
    for path, text in made.items():
        path.write_text(text, "utf-8")
        sys.stdout.write(f"{path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
