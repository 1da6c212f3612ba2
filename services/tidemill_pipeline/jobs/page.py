"""HTML pages of reports: one file without scripts, which a browser opens from disk."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 900, 220, 70, 24  # pixels of a curve and of its margins
_COLOURS: Final = ("#2563eb", "#d97706", "#dc2626", "#059669", "#7c3aed", "#475569")
_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem;
       color: #1e293b; background: #fff }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0 }
th, td { border-bottom: 1px solid #e2e8f0; padding: .25rem .6rem; text-align: left }
td.n { text-align: right } .good { color: #047857 } .bad { color: #b91c1c }
p.good, p.bad { font-size: 1.2rem; font-weight: 600 } summary { cursor: pointer }
div.wide { overflow-x: auto }
"""


def page(title: str, parts: Sequence[str], *, now_ms: int) -> str:
    """Return a page; `parts` are HTML."""
    made = datetime.fromtimestamp(now_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{html.escape(title)}</h1><p>{made}</p>{''.join(parts)}</body></html>\n"
    )


def table(
    head: Sequence[str], rows: Sequence[Sequence[Any]], *, details: Sequence[str] = ()
) -> str:
    """Return a table. The last cell of a row expands to its detail, which is HTML."""
    if not rows:
        return "<p>None.</p>"
    shown = []
    for i, row in enumerate(rows):
        cells = [_cell(value) for value in row]
        if details and details[i]:
            last = html.escape(str(row[-1]))
            cells[-1] = f"<td><details><summary>{last}</summary>{details[i]}</details></td>"
        shown.append(f"<tr>{''.join(cells)}</tr>")
    heads = "".join(f"<th>{html.escape(name.replace('_', ' '))}</th>" for name in head)
    return f"<div class='wide'><table><tr>{heads}</tr>{''.join(shown)}</table></div>"


def _cell(value: Any) -> str:
    if value is None:
        return "<td class='n'>-</td>"
    if isinstance(value, int):
        return f"<td class='n'>{value:,}</td>"
    return f"<td>{html.escape(str(value))}</td>"


def curve(series: Mapping[str, Sequence[tuple[float, int]]], *, unit: str) -> str:
    """Return named curves of (seconds, value) over time, with a marker at each point."""
    points = [point for each in series.values() for point in each]
    if not points:
        return "<p>None in this time.</p>"
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(0, *(y for _, y in points)), max(1, *(y for _, y in points))

    def place(x: float, y: float) -> tuple[float, float]:
        along = (x - first) / (last - first) if last > first else 0.5
        up = (y - low) / (high - low)
        return (_LEFT + along * (_WIDTH - _LEFT - 10), 10 + (1 - up) * (_HEIGHT - _BOTTOM - 20))

    drawn, names = [], []
    for i, (name, each) in enumerate(sorted(series.items())):
        colour = _COLOURS[i % len(_COLOURS)]
        line = " ".join(f"{px:.1f},{py:.1f}" for px, py in (place(x, y) for x, y in sorted(each)))
        drawn.append(
            f"<polyline fill='none' stroke='{colour}' stroke-width='1.5' points='{line}'/>"
        )
        for x, y in each:
            px, py = place(x, y)
            title = html.escape(f"{name}: {y:,} {unit}, {_clock(x)}")
            drawn.append(
                f"<circle cx='{px:.1f}' cy='{py:.1f}' r='2.5' fill='{colour}'>"
                f"<title>{title}</title></circle>"
            )
        names.append(f"<span style='color:{colour}'>&#9632;</span> {html.escape(name)}")
    top, bottom = place(first, high)[1], place(first, low)[1]
    axis = (
        f"<text x='0' y='{top + 4:.0f}' font-size='12'>{high:,} {unit}</text>"
        f"<text x='0' y='{bottom:.0f}' font-size='12'>{low:,} {unit}</text>"
        f"<line x1='{_LEFT}' x2='{_WIDTH}' y1='{bottom:.1f}' y2='{bottom:.1f}' stroke='#cbd5e1'/>"
        f"<text x='{_LEFT}' y='{_HEIGHT - 4}' font-size='12'>{_clock(first)}</text>"
        f"<text x='{_WIDTH - 10}' y='{_HEIGHT - 4}' font-size='12' text-anchor='end'>"
        f"{_clock(last)}</text>"
    )
    return (
        f"<p>{' &nbsp; '.join(names)}</p><svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img'"
        f" width='100%' style='max-width:{_WIDTH}px'>{axis}{''.join(drawn)}</svg>"
    )


def _clock(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%m-%d %H:%M:%S")
