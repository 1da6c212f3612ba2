"""A table of the metrics on `/metrics`: name, type, labels, process, meaning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

# Labels of every sample, and labels of a histogram's samples.
COMMON = frozenset({"cluster", "node_type", "node_id", "proxy_mode"})
INHERENT = frozenset({"le"})
HEAD = ("metric", "type", "labels", "from", "meaning")


@dataclass(slots=True)
class ExposedMetric:
    """One metric."""

    name: str
    type: str
    meaning: str
    labels: set[str] = field(default_factory=set)
    processes: set[str] = field(default_factory=set)
    sample_names: set[str] = field(default_factory=set)

    def row(self) -> tuple[str, ...]:
        """Return the cells of a table."""
        return (
            f"`{self.name}`",
            self.type,
            ", ".join(f"`{label}`" for label in sorted(self.labels)),
            ", ".join(sorted(self.processes)),
            self.meaning,
        )


def exposed(scrapes: Mapping[str, Iterable[str]]) -> dict[str, ExposedMetric]:
    """Return the metrics of scrapes by name; `scrapes` maps kinds of processes to texts."""
    found: dict[str, ExposedMetric] = {}
    for process, texts in scrapes.items():
        for text in texts:
            for family in text_string_to_metric_families(text):
                name = f"{family.name}_total" if family.type == "counter" else family.name
                known = found.setdefault(
                    name, ExposedMetric(name, family.type, family.documentation)
                )
                known.processes.add(process)
                for sample in family.samples:
                    known.sample_names.add(sample.name)
                    known.labels |= sample.labels.keys() - COMMON - INHERENT
    return found


def table(metrics: Iterable[ExposedMetric]) -> str:
    """Return a table of metrics, by name."""
    rows = [each.row() for each in sorted(metrics, key=lambda each: each.name)]
    lines = [HEAD, ("---",) * len(HEAD), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def parse(text: str) -> dict[str, ExposedMetric]:
    """Return the metrics of a page with such a table, by name."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == len(HEAD) and cells[0].startswith("`"):
            name, kind, labels, processes, meaning = cells
            names = {label.strip("`") for label in labels.split(", ") if label}
            name = name.strip("`")
            found[name] = ExposedMetric(name, kind, meaning, names, set(processes.split(", ")))
    return found
